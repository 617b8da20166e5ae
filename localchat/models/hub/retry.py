"""Retry policy of downloads: exponential backoff, honours Retry-After."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 522, 524})
"""Statuses after which the same request may succeed."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits of retrying; waits double from `first_wait_s`."""

    tries: int = 8
    """Failures in a row, without progress, before it gives up."""
    first_tries: int = 1
    """The same where no server was reached yet: no network or no such host, which is said at once."""
    first_wait_s: float = 1.0
    longest_wait_s: float = 30.0
    """The longest wait of our own."""
    longest_asked_s: float = 900.0
    """The longest wait that a server may ask for."""
    sleep: Callable[[float], None] = time.sleep

    def wait_s(self, failures: int, asked_s: float | None) -> float:
        """Seconds before the next try, after this many failures in a row (from 1)."""
        # No wait at all, or a date that is past for our clock, would use up every try at once.
        if asked_s:
            return asked_s
        return min(self.longest_wait_s, self.first_wait_s * 2.0 ** (failures - 1))

    def ends(self, failures: int, asked_s: float | None, *, reached: bool = True) -> bool:
        """Whether to give up after this failure. `reached`: whether a server answered at all."""
        tries = self.tries if reached else min(self.tries, self.first_tries)
        return failures >= tries or (asked_s or 0.0) > self.longest_asked_s


def retry_after_s(header: str | None) -> float | None:
    """Seconds that a `Retry-After` header asks for, as a number or a date; None where it is unusable."""
    if not header:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        date = parsedate_to_datetime(header)
    except ValueError:
        return None
    aware = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max(0.0, (aware - datetime.now(UTC)).total_seconds())
