"""Retry policy of downloads: exponential backoff, unless the server sends Retry-After."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits of retrying. Waits double from `first_wait_s`."""

    tries: int = 8
    """Failures in a row, without progress, before giving up."""
    first_tries: int = 1
    """Failures before giving up if no server was reached: without a network, a user should know at once."""
    first_wait_s: float = 1.0
    longest_wait_s: float = 30.0
    """Longest wait without a Retry-After."""
    longest_asked_s: float = 900.0
    """Longest Retry-After to accept."""
    sleep: Callable[[float], None] = time.sleep

    def wait_s(self, failures: int, asked_s: float | None) -> float:
        """Return the seconds before the next try. failures: in a row, from 1."""
        # Ignore a wait of 0 s or a date in the past, which would use up every try at once.
        if asked_s:
            return asked_s
        return min(self.longest_wait_s, self.first_wait_s * 2.0 ** (failures - 1))

    def ends(self, failures: int, asked_s: float | None, *, reached: bool = True) -> bool:
        """Return True to give up after this failure. reached: whether a server answered at all."""
        tries = self.tries if reached else min(self.tries, self.first_tries)
        return failures >= tries or (asked_s or 0.0) > self.longest_asked_s
