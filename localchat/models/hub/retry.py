"""Retries of requests to the hub: exponential backoff, unless the server sends Retry-After."""

import threading
from collections.abc import Callable
from time import sleep
from typing import Final, TypeVar

from localchat.errors import NetworkError
from localchat.models.hub.client import RetryableError
from localchat.models.hub.events import EventSink, Note

T = TypeVar("T")

MAX_TRIES: Final = 8
"""Failures in a row, without progress, before giving up."""
_MAX_UNREACHED: Final = 1
"""Failures before giving up if no server was reached: without a network, a user should know at once."""
_FIRST_WAIT_S: Final = 1.0
_LONGEST_WAIT_S: Final = 30.0
"""Longest wait without a Retry-After."""
_LONGEST_ASKED_S: Final = 900.0
"""Longest Retry-After to accept."""
_SILENT_S: Final = 3.0
"""Time without an answer after which the user hears who is waited for."""


def gives_up(failures: int, asked_s: float | None, *, reached: bool = True) -> bool:
    """Return True to give up after this failure. reached: whether a server answered at all."""
    tries = MAX_TRIES if reached else _MAX_UNREACHED
    return failures >= tries or (asked_s or 0.0) > _LONGEST_ASKED_S


def wait_s(failures: int, asked_s: float | None) -> float:
    """Return the seconds before the next try. failures: in a row, from 1."""
    # Ignore a wait of 0 s or a date in the past, which would use up every try at once.
    if asked_s:
        return asked_s
    return min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** (failures - 1))


def pause(why: str, failures: int, asked_s: float | None, emit: EventSink) -> None:
    """Report a failure, and wait before the next try."""
    seconds = wait_s(failures, asked_s)
    emit(Note(f"{why}; next try in {seconds:.0f} s"))
    sleep(seconds)


def with_retries(read: Callable[[], T], emit: EventSink, server: str) -> T:
    """Call `read` until it succeeds, or fails too often.

    Emits a notice if it takes long. server: name for the notice. Raises LocalchatError.
    """
    failures = 0
    while True:
        slow = threading.Timer(_SILENT_S, emit, [Note(f"waiting for {server} to answer")])
        slow.daemon = True
        slow.start()
        try:
            return read()
        except RetryableError as caught:
            problem = caught
        finally:
            slow.cancel()
        failures += 1
        if gives_up(failures, problem.asked_s, reached=problem.reached):
            unreachable = {} if problem.reached else {"unreachable": True}
            raise NetworkError(
                str(problem), hint="check your connection", **unreachable
            ) from problem
        pause(str(problem), failures, problem.asked_s, emit)
