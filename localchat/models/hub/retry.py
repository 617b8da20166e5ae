"""How long a pull goes on against a network that fails: waits that double, and what a server asks for."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 522, 524})
"""Statuses after which the same request may succeed."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`tries`: failures in a row, without progress, before it ends; `first_tries` where no server is
    reached before anything has come: no network, or no such host, which a person should hear of soon.
    `longest_wait_s`: the longest wait of our own; a server may ask for up to `longest_asked_s`."""

    tries: int = 8
    first_tries: int = 4
    first_wait_s: float = 1.0
    longest_wait_s: float = 30.0
    longest_asked_s: float = 900.0
    sleep: Callable[[float], None] = time.sleep

    def wait_s(self, failures: int, asked_s: float | None) -> float:
        """Before the next try, after this many failures in a row (from 1)."""
        if asked_s is not None:
            return asked_s
        return min(self.longest_wait_s, self.first_wait_s * 2.0 ** (failures - 1))

    def ends(self, failures: int, asked_s: float | None, *, reached: bool = True) -> bool:
        """Whether this failure was the last that is borne. `reached`: whether a server was there at all."""
        tries = self.tries if reached else min(self.tries, self.first_tries)
        return failures >= tries or (asked_s or 0.0) > self.longest_asked_s


def retry_after_s(header: str | None) -> float | None:
    """What `Retry-After` asks for, in seconds or as a date; None where it says nothing of use."""
    if not header:
        return None
    if header.strip().isdigit():
        return float(header)
    try:
        at = parsedate_to_datetime(header)
    except ValueError:
        return None
    aware = at if at.tzinfo else at.replace(tzinfo=UTC)
    return max(0.0, (aware - datetime.now(UTC)).total_seconds())
