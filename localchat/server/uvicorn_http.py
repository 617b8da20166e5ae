"""uvicorn's HTTP/1.1 connection, with the patience that it lacks.

uvicorn waits for ever for the end of a request's headers, and for ever for a client that takes nothing; it
answers what is no HTTP in plain text. Here each has its limit, and every answer is JSON.
"""

import asyncio
import socket
import sys
from http import HTTPStatus
from typing import Any, ClassVar, Final

import h11
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from localchat.server.config import ServerLimits

HEAD_BYTES: Final = 64 << 10
"""Of a request's headers: browsers send every cookie that anything on localhost ever set."""
_LINGER_S = 2.0
_ASK_AGAIN_S: Final = (0.005, 0.02, 0.1, 0.5, 2.0)
_LENGTHS: Final = {b"content-length", b"transfer-encoding"}
FILLER: Final = "filler"
"""In the state of a request: bytes that say nothing, for between two pieces of an answer that streams."""


class Connection(H11Protocol):
    """One connection. `limits` is set by the subclass that `connection_class` makes."""

    limits: ClassVar[ServerLimits] = ServerLimits()

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._headers_due: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._ended = False
        self._asking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._answer(503, "server_error", "server_busy", "Too many connections are open.")
            return
        self._headers_due = self.loop.call_later(self.limits.header_s, self._headers_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timers()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends nothing more. Most that do so are gone, and what works for them shall end at once;
        one that has shut its own side alone waits for the answer."""
        self._ended = True
        waits = self.cycle is not None and not self.cycle.response_complete
        if not waits or self.conn.their_state not in (h11.DONE, h11.MUST_CLOSE):
            return False
        self._ask_whether_there(0)
        return not self.transport.is_closing()

    def _ask_whether_there(self, times: int) -> None:
        """Both look the same until something is written: whoever is gone refuses it. So what means nothing is
        written, less and less often."""
        self._asking = None
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        nothing = self._nothing()
        if nothing is None:
            self.transport.close()
            return
        self.transport.write(self.conn.send(nothing) or b"")
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        pause_s = _ASK_AGAIN_S[min(times, len(_ASK_AGAIN_S) - 1)]
        self._asking = self.loop.call_later(pause_s, self._ask_whether_there, times + 1)

    def _nothing(self) -> h11.InformationalResponse | h11.Data | None:
        """What says nothing here: before an answer that it will come, inside of a stream its filler. None:
        the client's HTTP is too old for the one, or the answer has no gaps for the other."""
        if self.conn.our_state is h11.SEND_RESPONSE and self.scope["http_version"] == "1.1":
            return h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
        filler: bytes | None = self.scope["state"].get(FILLER)
        return h11.Data(data=filler) if filler and self.conn.our_state is h11.SEND_BODY else None

    def _should_upgrade(self) -> bool:
        """No other protocol is spoken here, and a wish for one may be passed over (RFC 9110, 7.8). uvicorn
        warns of each, and of a library that would be no help; Java's client wishes for HTTP/2 every time."""
        return False

    def data_received(self, data: bytes) -> None:
        """Empty lines before a request are none of it: old clients send one behind a body (RFC 9112, 2.2).
        What comes behind the last request of a connection is nothing at all."""
        if self.conn.their_state is h11.MUST_CLOSE:
            return
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            data = data.lstrip(b"\r\n")
        if data:
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.transport.is_closing():
            return
        if self.cycle is not None and len({name for name, _ in self.headers} & _LENGTHS) > 1:
            # A proxy may have gone by the other: what follows may be a part of the body (RFC 9112, 6.1).
            self.cycle.keep_alive = False
        # Who does not read does not see the client leave: what comes behind a request is kept, up to a bound.
        behind = self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0])
        if self.flow.read_paused and behind and behind <= HEAD_BYTES:
            self.flow.resume_reading()
        # Waiting for the rest of a request's head: the time counts from its first byte.
        partial = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if partial and self._headers_due is None:
            self._headers_due = self.loop.call_later(self.limits.header_s, self._headers_late)
        elif not partial and self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def on_response_complete(self) -> None:
        """A request that was answered before its body had come is read to the end for a moment only: closing
        at once could take the answer from a client that is still sending."""
        super().on_response_complete()
        if self._ended and self.cycle.response_complete:
            self._unset_keepalive_if_required()
            self.transport.close()
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self.loop.call_later(_LINGER_S, self._leave)

    def _leave(self) -> None:
        if self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self.limits.stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP that can be read."""
        self._cancel_timers()
        error = sys.exception()
        assert isinstance(error, h11.RemoteProtocolError)
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # the answer was begun before the rest of the request could not be read
            return
        if str(error) == "no request line received":
            self.transport.close()  # an empty line behind the last request: nothing was asked
            return
        if " Host: header" in str(error):  # none, or two: the HTTP library refuses it first
            self._answer(403, "permission_error", "host_not_allowed", "One Host header is needed.")
            return
        status = error.error_status_hint
        code, message = _UNREADABLE.get(status, (None, "The request is no valid HTTP."))
        self._answer(status, "invalid_request_error", code, message)

    def _headers_late(self) -> None:
        self._headers_due = None
        self._answer(
            408, "invalid_request_error", "timeout", "The request's headers did not arrive in time."
        )

    def _cancel_timers(self) -> None:
        for timer in (self._headers_due, self._stalled, self._asking):
            if timer is not None:
                timer.cancel()
        self._headers_due = self._stalled = self._asking = None

    def _answer(self, status: int, kind: str, code: str | None, message: str) -> None:
        """An error without a request that it could belong to; the connection ends with it."""
        error = {"message": message, "type": kind, "param": None, "code": code}
        body = msgspec.json.encode({"error": error})
        later = "retry-after: 1\r\n" if status == 503 else ""
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n{later}connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


_UNREADABLE: Final = {
    431: ("headers_too_large", f"The request's headers are larger than {HEAD_BYTES} bytes."),
    501: ("not_supported", "The transfer encoding is not known here; there is chunked."),
}
"""What the HTTP library says of a request, other than that it is none."""


def connection_class(limits: ServerLimits) -> type[Connection]:
    """The connections of a server with these limits."""
    return type("LimitedConnection", (Connection,), {"limits": limits})
