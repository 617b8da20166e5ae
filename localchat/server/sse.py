"""Server-sent events on the wire: one `data: ` line each, LF only, a comment where there is silence.

The comment is `: keep-alive`, because some clients take a line that begins with `: ping` for the end.
"""

import asyncio
from collections.abc import Callable
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


def named(name: bytes, payload: bytes) -> bytes:
    """One event with its name, for protocols whose clients go by it."""
    return b"event: %b\ndata: %b\n\n" % (name, payload)


class EventStream:
    """An open stream: `async with` begins and ends the signs of life. A client that left takes nothing and
    hinders nothing.

    heartbeat_s: silence before a comment. `alive` makes an event that says no more than that, for clients
    that count silence in events and do not see comments; it comes after `event_s` without another, and is
    empty where the protocol has none.
    """

    def __init__(
        self,
        send: Send,
        heartbeat_s: float,
        event_s: float = 15.0,
        alive: Callable[[], bytes] = lambda: b"",
    ) -> None:
        self._send = send
        self._heartbeat_s = heartbeat_s
        self._event_s = event_s
        self._alive = alive
        self._loop = asyncio.get_running_loop()
        self._last_s = self._last_event_s = self._loop.time()
        self._turn = asyncio.Lock()
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
        async with self._turn:
            await self._sent(events)
            self._last_event_s = self._last_s

    async def _sent(self, events: bytes) -> None:
        await self._send({"type": "http.response.body", "body": events, "more_body": True})
        self._last_s = self._loop.time()

    async def end(self, events: bytes) -> None:
        """The last events; the body is complete."""
        if self._beat is not None:
            self._beat.cancel()
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

    async def _beats(self) -> None:
        while True:
            due_s = min(self._last_s + self._heartbeat_s, self._last_event_s + self._event_s)
            await asyncio.sleep(due_s - self._loop.time())
            # What is said is made in its turn, because events may be numbered.
            async with self._turn:
                now_s = self._loop.time()
                if now_s >= self._last_event_s + self._event_s:
                    self._last_event_s = now_s
                    if event := self._alive():
                        await self._sent(event)
                if now_s >= self._last_s + self._heartbeat_s:
                    await self._sent(KEEP_ALIVE)
