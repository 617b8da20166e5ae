"""Hardens uvicorn's HTTP/1.1 connection against slow, stalled and broken clients.

uvicorn waits without limit for the end of a request's headers and for a client that reads nothing, and answers
invalid HTTP in plain text. Connection limits every wait and answers in JSON. It overrides private methods of
uvicorn's H11Protocol; tests/server/test_uvicorn_http.py and test_lifecycle.py fail without any override.
"""

import asyncio
import sys
from http import HTTPStatus
from typing import Any, ClassVar, Final

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from localchat.server.config import ServerLimits
from localchat.server.errors import ApiError, openai_error

HEAD_BYTES: Final = 64 << 10
"""Limit of a request's headers: browsers send every cookie that any program on localhost ever set."""
_LINGER_S = 2.0
_MIN_READ_BYTES: Final = 48 << 10
"""Bytes of a long answer that a client must read within `stall_s`."""
_FIRST_PROBE_S: Final = 0.01
_MAX_PROBE_S: Final = 1.0
_LENGTH_HEADERS: Final = {b"content-length", b"transfer-encoding"}
PROBES_ONLY: Final = "probes_only"
"""Key in a request's state: the connection is beyond the limit, so that only probes are answered."""
WRITE: Final = "write"
"""Key in a request's state: the connection's `write_piece`."""


class Connection(H11Protocol):
    """An HTTP/1.1 connection. `connection_class` returns a subclass with the `limits` of a server."""

    limits: ClassVar[ServerLimits] = ServerLimits()

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, WRITE: self.write_piece}, _loop)
        self._header_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0
        """Size of the write buffer when the stall timer was started."""
        self._for_probes = False
        self._input_ended = False
        """True once the client has closed its sending side."""
        self._opened_s = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Every byte that waits for the client counts as a stall. An answer below asyncio's limit of 64 KiB
        # would end, and its connection would wait forever for a client that reads nothing.
        transport.set_write_buffer_limits(high=0)
        if len(self.connections) > self.limits.connections:
            self._for_probes = self.app_state[PROBES_ONLY] = True
            if not self._has_reserved_place():
                self._answer(503, "server_error", "server_busy", "Too many connections are open.")
                return
        self._header_timer = self.loop.call_later(self.limits.header_s, self._on_headers_late)

    def _has_reserved_place(self) -> bool:
        """Return True if a reserved place is free. Closes the oldest idle connection for it if necessary.

        A client that opens many connections must not prevent a supervisor from checking the server's health.
        """
        others = [
            connection
            for connection in self.connections
            if isinstance(connection, Connection)
            and connection._for_probes
            and connection is not self
        ]
        if len(others) < self.limits.probe_connections:
            return True
        idle = [
            connection
            for connection in others
            if connection.cycle is None or connection.cycle.response_complete
        ]
        if idle:
            min(idle, key=lambda connection: connection._opened_s).transport.abort()
        return bool(idle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timers()
        super().connection_lost(exc)

    def write_piece(self, piece: bytes) -> bool:
        """Write a piece of a chunked body directly. ASGI's `send` must have sent its first bytes.

        The layers of Starlette, uvicorn and h11 below `send` cost half of the server's time for a token.
        Returns False if `send` must send the piece: the client reads too slowly, or its HTTP has no chunks.
        """
        if not piece or self.transport.is_closing():
            return True
        if (
            self.flow.write_paused
            or self.conn.our_state is not h11.SEND_BODY
            or self.scope["http_version"] != "1.1"
        ):
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True

    def _should_upgrade(self) -> bool:
        """Ignore upgrade requests, as RFC 9110, 7.8 allows.

        uvicorn would log two warnings for each, and Java's client always requests HTTP/2.
        """
        return False

    def data_received(self, data: bytes) -> None:
        """Skip empty lines before a request and data after the last one.

        Old clients send an empty line after a body (RFC 9112, 2.2).
        """
        if self.conn.their_state is h11.MUST_CLOSE:
            return
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            data = data.lstrip(b"\r\n")
        if data:
            super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer a client that closes only its sending side, such as `nc -N`. Returns False to close.

        A client that disconnects looks the same until something is sent to it.
        """
        is_waiting = self.cycle is not None and self.conn.our_state is h11.SEND_RESPONSE
        if not is_waiting or self.cycle.more_body or self.scope["http_version"] != "1.1":
            return False
        self._input_ended = True
        self._end_with_request()
        return True

    def _end_with_request(self) -> None:
        """Close after the last request of a client that sends no more."""
        if self.cycle.response_complete:
            self.transport.close()
        else:
            self.cycle.keep_alive = bool(self.conn.trailing_data[0].strip())
            self._probe_later(_FIRST_PROBE_S)

    def _probe_later(self, delay_s: float) -> None:
        self.loop.call_later(delay_s, self._probe, self.cycle, 2 * delay_s)

    def _probe(self, cycle: RequestResponseCycle, delay_s: float) -> None:
        """Send an interim response until the answer starts. The second one fails if the client has left."""
        if cycle is self.cycle and not cycle.response_started and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._probe_later(min(delay_s, _MAX_PROBE_S))

    def handle_events(self) -> None:
        super().handle_events()
        if self.transport.is_closing():
            return
        if self._input_ended:
            self._end_with_request()
            return
        if self.cycle is not None and len({name for name, _ in self.headers} & _LENGTH_HEADERS) > 1:
            # A proxy may have used the other header, and data behind the body may belong to it (RFC 9112, 6.1).
            self.cycle.keep_alive = False
        # Keep reading after a request, up to a limit. Otherwise a disconnect goes unnoticed.
        ended = self.conn.their_state not in (h11.IDLE, h11.SEND_BODY)
        pipelined = ended and len(self.conn.trailing_data[0])
        if self.flow.read_paused and pipelined and pipelined <= HEAD_BYTES:
            self.flow.resume_reading()
        # The time for the headers of the next request starts with their first byte.
        incomplete = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if incomplete and self._header_timer is None:
            self._header_timer = self.loop.call_later(self.limits.header_s, self._on_headers_late)
        elif not incomplete and self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        # A body that ends after its answer stops the timer that the end of the answer started.
        is_idle = not incomplete and self.cycle is not None and self.conn.our_state is h11.IDLE
        if is_idle and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """Give a body that is incomplete after its answer a moment to arrive.

        Closing at once could lose the answer of a client that still sends.
        """
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self.loop.call_later(_LINGER_S, self._close_if_unread)

    def _close_if_unread(self) -> None:
        if self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_stall_timer()

    def _start_stall_timer(self) -> None:
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self.limits.stall_s, self._on_stalled)

    def _on_stalled(self) -> None:
        """Drop a client that has read almost nothing. A client that reads slowly gets more time."""
        if self.transport.get_write_buffer_size() <= self._unsent_bytes - _MIN_READ_BYTES:
            self._start_stall_timer()
        else:
            self.transport.abort()

    def resume_writing(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is not valid HTTP."""
        error = sys.exception()
        assert isinstance(error, h11.RemoteProtocolError)
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # too late for a status: the answer has begun
            return
        if str(error) == "no request line received":
            self.transport.close()  # an empty line after the last request is not a request
            return
        if " Host: header" in str(error):  # none, or two; h11 rejects it before our middleware
            self._answer(
                403, "permission_error", "host_not_allowed", "Exactly one Host header is required."
            )
            return
        status = error.error_status_hint
        code, message = _H11_ERRORS.get(status, (None, "The request is not valid HTTP."))
        self._answer(status, "invalid_request_error", code, message)

    def _on_headers_late(self) -> None:
        self._header_timer = None
        self._answer(
            408, "invalid_request_error", "timeout", "The request's headers did not arrive in time."
        )

    def _cancel_timers(self) -> None:
        for timer in (self._header_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        self._header_timer = self._stall_timer = None

    def _answer(self, status: int, kind: str, code: str | None, message: str) -> None:
        """Send an error that belongs to no request, and close the connection."""
        # A timer must not add a second answer while a slow client still reads this one.
        self._cancel_timers()
        body = openai_error(ApiError(status, code, message, kind=kind))
        retry = "retry-after: 1\r\n" if status == 503 else ""
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n{retry}connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


_H11_ERRORS: Final = {
    431: ("headers_too_large", f"The request's headers are larger than {HEAD_BYTES} bytes."),
    501: ("not_supported", "The transfer encoding is not supported; use chunked."),
}
"""Code and message of h11's errors by status, other than plain 400."""


def connection_class(limits: ServerLimits) -> type[Connection]:
    """Return the connection class of a server with these limits."""
    return type("LimitedConnection", (Connection,), {"limits": limits})
