"""Server-sent events: one `data: ` line per event, and heartbeats.

Lines end with LF only. The heartbeat is the comment `: keep-alive`, because some clients mistake a line that
starts with `: ping` for the end.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from starlette.types import Send

KEEP_ALIVE: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"
_HEADERS: Final = [
    (b"cache-control", b"no-cache"),
    # nginx would collect the events otherwise.
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class Framing:
    """Format of a stream."""

    content_type: bytes
    comment: bytes
    """Sent during silence; empty if the format has no comments."""


SSE: Final = Framing(b"text/event-stream; charset=utf-8", KEEP_ALIVE)
NDJSON: Final = Framing(b"application/x-ndjson", b"")
"""JSON objects, one per line."""


def event(payload: bytes) -> bytes:
    """Return an event. `payload` is compact JSON, without line breaks."""
    return b"data: %b\n\n" % payload


def named_event(name: bytes, payload: bytes) -> bytes:
    """Return an event with a name, for protocols whose clients dispatch by name."""
    return b"event: %b\ndata: %b\n\n" % (name, payload)


class EventStream:
    """An open stream with heartbeats, for an `async with` block.

    Writing to a client that disconnected has no effect.
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
        """heartbeat_s: seconds of silence before a comment. event_s: seconds without an event before one from
        `heartbeat`, for clients that do not see comments; it returns nothing if the protocol has no such event.
        headers: headers of this answer. write_piece: see Connection.write_piece in uvicorn_http.py."""
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
        """Timer of the next heartbeat. A task would cost each request three turns of the event loop."""
        self._busy = False
        """True while an event waits for a slow client."""
        self._unsent = b""
        """Events that `write_now` could not send."""
        self._late: asyncio.Task[None] | None = None
        """Heartbeat that waits for a slow client."""

    async def __aenter__(self) -> "EventStream":
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        self._schedule()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop()
        if self._late is not None:
            self._late.cancel()
            with suppress(asyncio.CancelledError):
                await self._late

    def ready(self) -> bool:
        """Return True if `write_now` may be called."""
        return self._late is None and not self._unsent

    def write_now(self, events: bytes) -> None:
        """Send complete events. What a slow client cannot take goes before the next `write`."""
        if not self._write_piece(events):
            self._unsent = events
        self._last_s = self._last_event_s = self._loop.time()

    async def write(self, events: bytes) -> None:
        """Send complete events. Waits for a slow client."""
        if self._late is not None:
            await self._late
        events = self._unsent + events
        self._unsent = b""
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
        body = self._unsent + events
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _schedule(self) -> None:
        due_s = min(self._last_s + self._heartbeat_s, self._last_event_s + self._event_s)
        self._timer = self._loop.call_at(due_s, self._beat)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        """Send the heartbeat that is due, unless the client still has something to read."""
        now_s = self._loop.time()
        event_due = now_s >= self._last_event_s + self._event_s
        comment_due = now_s >= self._last_s + self._heartbeat_s
        heartbeat = b""
        if not self._busy and self.ready():
            if event_due:
                heartbeat = self._heartbeat()
            if comment_due:
                heartbeat = heartbeat or self._comment
        if event_due:
            self._last_event_s = now_s
        if heartbeat or comment_due:
            self._last_s = now_s
        if heartbeat and not self._write_piece(heartbeat):
            self._late = asyncio.create_task(self._send_late(heartbeat))
        self._schedule()

    async def _send_late(self, heartbeat: bytes) -> None:
        await self._send_body(heartbeat)
        self._late = None
