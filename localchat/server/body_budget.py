"""Memory budget for the bodies of all requests that are being read."""

import asyncio
import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from localchat.server.errors import unavailable

FREE_BYTES: Final = 256 << 10
"""Part of each body that needs no budget: large bodies must not block small requests."""
_TRIM_BYTES: Final = 1 << 20
_TRIM_PAUSE_S: Final = 1.0


class BodyBudget:
    """Counts the bytes of bodies in flight. Used on the event loop only."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.used_bytes = 0
        """Bytes reserved now."""
        self._trim_timer: asyncio.TimerHandle | None = None

    @contextmanager
    def reservation(self) -> Iterator["BodyReservation"]:
        """Yield the reservation of one body. The end of the `with` block returns its bytes."""
        reservation = BodyReservation(self)
        try:
            yield reservation
        finally:
            self.give_back(reservation.taken_bytes)

    def take(self, size_bytes: int) -> None:
        """Reserve bytes. Raises ApiError (503) if the bodies in flight use up the budget."""
        if size_bytes > 0 and self.used_bytes + size_bytes > self._limit_bytes:
            error = unavailable("Other requests are sending large bodies; try again in a moment.")
            error.headers["connection"] = "close"
            raise error
        self.used_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Return bytes. After a large body, free memory returns to the system a moment later."""
        self.used_bytes -= size_bytes
        # One trim serves all large bodies that end within the pause.
        if size_bytes >= _TRIM_BYTES and self._trim_timer is None:
            loop = asyncio.get_running_loop()
            self._trim_timer = loop.call_later(_TRIM_PAUSE_S, self._trim, loop)

    def _trim(self, loop: asyncio.AbstractEventLoop) -> None:
        self._trim_timer = None
        loop.run_in_executor(None, return_free_memory)


class BodyReservation:
    """Reserved bytes of one body."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.taken_bytes = 0

    def resize(self, size_bytes: int) -> None:
        """Reserve the bytes that a body of this size needs. Raises ApiError (503)."""
        needed_bytes = max(0, size_bytes - FREE_BYTES)
        self._budget.take(needed_bytes - self.taken_bytes)
        self.taken_bytes = needed_bytes


def return_free_memory() -> None:
    """Return free heap pages to the system. Only glibc needs the request."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
