"""Cancellation: detects that a client disconnected, and undoes what a cancelled task started.

Leases, answers and the local API use this module, and do not import each other.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.types import Receive

T = TypeVar("T")


async def disconnected(receive: Receive) -> None:
    """Wait until the client closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def shielded(work: Awaitable[T], undo: Callable[[T], object]) -> T:
    """Await work that cannot be cancelled. If the caller is cancelled, `undo` gets the late result."""
    future = asyncio.ensure_future(work)

    def undo_result(done: "asyncio.Future[T]") -> None:
        if not done.cancelled() and done.exception() is None:
            undo(done.result())

    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        future.add_done_callback(undo_result)
        raise
