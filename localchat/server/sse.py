"""Server-sent events: one `data: ` line per event, and heartbeats.

Lines end with LF only. The heartbeat is the comment `: keep-alive`, because some clients take a line that
begins with `: ping` for the end.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from starlette.types import Send

KEEP_ALIVE: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"
_HEADERS: Final = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class Framing:
    """Form of a stream: its content type, and what is sent in silence (nothing if empty)."""

    content_type: bytes
    comment: bytes


SSE: Final = Framing(b"text/event-stream; charset=utf-8", KEEP_ALIVE)
NDJSON: Final = Framing(b"application/x-ndjson", b"")
"""JSON objects, one a line: there is no place for comments."""


def event(payload: bytes) -> bytes:
    """One event. `payload`: compact JSON, which has no line break."""
    return b"data: %b\n\n" % payload


def named_event(name: bytes, payload: bytes) -> bytes:
    """One event with a name, for protocols whose clients dispatch by name."""
    return b"event: %b\ndata: %b\n\n" % (name, payload)


class EventStream:
    """An open stream with heartbeats during the `async with` block. Writing to a client that left has no
    effect.

    heartbeat_s: seconds of silence before a comment. event_s: seconds without an event before one from
    `heartbeat`, for clients that measure silence in events and do not see comments; `heartbeat` returns
    nothing if the protocol has no such event. headers: of this answer, besides those of every stream.
    write_piece: a shorter way for a piece of the body, see uvicorn_http; False where it cannot be taken.
    """

    def __init__(
        self,
        send: Send,
        heartbeat_s: float,
        event_s: float = 15.0,
        heartbeat: Callable[[], bytes] = lambda: b"",
        headers: Sequence[tuple[bytes, bytes]] = (),
        write_piece: Callable[[bytes], bool] = lambda piece: False,
        framing: Framing = SSE,
    ) -> None:
        self._send = send
        self._write_piece = write_piece
        self._heartbeat_s = heartbeat_s
        self._event_s = event_s
        self._heartbeat = heartbeat
        self._headers = [(b"content-type", framing.content_type), *_HEADERS, *headers]
        self._comment = framing.comment
        self._loop = asyncio.get_running_loop()
        self._last_s = self._last_event_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        """Of the next heartbeat. A timer, because a task costs each request three turns of the event loop."""
        self._busy = False
        """An event waits for a slow client."""
        self._late: asyncio.Task[None] | None = None
        """A heartbeat that waits for a slow client."""

    async def __aenter__(self) -> "EventStream":
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        self._schedule()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()
        if self._late is not None:
            self._late.cancel()
            with suppress(asyncio.CancelledError):
                await self._late

    async def write(self, events: bytes) -> None:
        """Send complete events. Waits for a slow client."""
        if self._late is not None:
            await self._late
        if not self._write_piece(events):
            self._busy = True
            await self._send_body(events)
            self._busy = False
        self._last_s = self._last_event_s = self._loop.time()

    async def _send_body(self, events: bytes) -> None:
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, events: bytes) -> None:
        """Send the last events and end the body."""
        self._stop()
        if self._late is not None:
            await self._late
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

    def _schedule(self) -> None:
        due_s = min(self._last_s + self._heartbeat_s, self._last_event_s + self._event_s)
        self._timer = self._loop.call_at(due_s, self._beat)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        """Send the heartbeats that are due. A client that reads nothing gets none: it has enough to read."""
        now_s = self._loop.time()
        made = b""
        waits = self._busy or self._late is not None
        if now_s >= self._last_event_s + self._event_s:
            self._last_event_s = now_s
            made = b"" if waits else self._heartbeat()
        if made or now_s >= self._last_s + self._heartbeat_s:
            made = made or (b"" if waits else self._comment)
            self._last_s = now_s
        if made and not self._write_piece(made):
            self._late = asyncio.create_task(self._send_late(made))
        self._schedule()

    async def _send_late(self, heartbeat: bytes) -> None:
        await self._send_body(heartbeat)
        self._late = None
