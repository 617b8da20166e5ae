"""Server-sent events on the wire: one `data: ` line each, LF only, a comment where there is silence.

The comment is `: keep-alive`, because some clients take a line that begins with `: ping` for the end.
"""

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Final

from starlette.types import Send

KEEP_ALIVE: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"
_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(payload: bytes) -> bytes:
    """One event. `payload`: compact JSON, so without a newline."""
    return b"data: %b\n\n" % payload


class EventStream:
    """An open stream: `async with` begins and ends the signs of life. A client that left takes nothing and
    hinders nothing."""

    def __init__(self, send: Send, heartbeat_s: float) -> None:
        self._send = send
        self._heartbeat_s = heartbeat_s
        self._loop = asyncio.get_running_loop()
        self._last_s = self._loop.time()
        self._beat: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "EventStream":
        await self._send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        self._beat = asyncio.create_task(self._beats())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._beat is not None:
            self._beat.cancel()
            with suppress(asyncio.CancelledError):
                await self._beat

    async def write(self, events: bytes) -> None:
        """Whole events. Waits where the client is slow."""
        self._last_s = self._loop.time()
        await self._send({"type": "http.response.body", "body": events, "more_body": True})
        self._last_s = self._loop.time()

    async def end(self, events: bytes) -> None:
        """The last events; the body is complete."""
        if self._beat is not None:
            self._beat.cancel()
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

    async def _beats(self) -> None:
        while True:
            due_s = self._last_s + self._heartbeat_s - self._loop.time()
            if due_s > 0:
                await asyncio.sleep(due_s)
            else:
                await self.write(KEEP_ALIVE)
