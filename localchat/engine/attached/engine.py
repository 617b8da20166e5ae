"""AttachedEngine: a model in a running server of this user, over its private routes (protocol.py).

It uses http.client, because the command line would need longer to import a larger HTTP library.
"""

import http.client
import socket
import threading
import urllib.parse
from collections.abc import Callable
from contextlib import closing

import msgspec

from localchat.engine.attached.protocol import (
    MEDIA_TYPE,
    PREFIX,
    AttachSpec,
    GenerateCall,
    QueryCall,
    StopCall,
    Stopped,
)
from localchat.engine.events import Done
from localchat.engine.local import protocol
from localchat.engine.local.queries import FrameQueries, Reply
from localchat.engine.open_call import OpenCall
from localchat.engine.request import GenerateRequest
from localchat.engine.stream import Stream
from localchat.errors import EngineClosed, EngineDied, LocalchatError

_CONNECT_S = 10.0
"""Timeout of `ps` in seconds. The server is on this machine, which may be busy."""


class ServerClient:
    """Client of a running server, for programs of its owner. Thread-safe, with a connection per request."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        parts = urllib.parse.urlsplit(url)
        self._host = parts.hostname or "127.0.0.1"
        self._port = parts.port or 80
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": MEDIA_TYPE}

    def loaded_models(self) -> bytes | None:
        """Return the answer of `ps` as JSON, None if no server accepts the token. Never raises."""
        try:
            with closing(self._connection(_CONNECT_S)) as connection:
                connection.request("GET", f"{PREFIX}/ps", headers=self._headers)
                response = connection.getresponse()
                body = response.read()
        except (OSError, http.client.HTTPException):
            return None
        return body if response.status == 200 else None

    def stop(self, model: str | None) -> Stopped:
        """Unload a model, or stop the server. Raises LocalchatError."""
        return msgspec.msgpack.decode(self._post("stop", StopCall(model)), type=Stopped)

    def query(self, request: QueryCall, kind: type[Reply]) -> Reply:
        """Send a query and return the reply of this type. Raises LocalchatError."""
        body = self._post("query", request)
        answer = msgspec.msgpack.decode(body, type=protocol.FromChild)
        if isinstance(answer, protocol.Failed):
            raise answer.error()
        assert isinstance(answer, kind), f"{type(answer).__name__} for {kind.__name__}"
        return answer

    def _post(self, route: str, request: msgspec.Struct) -> bytes:
        content = protocol.encode(request)
        try:
            with closing(self._connection(None)) as connection:
                connection.request("POST", f"{PREFIX}/{route}", content, self._headers)
                response = connection.getresponse()
                body = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._connection_lost(error) from error
        if response.status == 409:
            raise msgspec.msgpack.decode(body, type=protocol.Failed).error()
        if response.status != 200:
            raise self._rejected(response.status, body)
        return body

    def stream_events(self, request: GenerateCall, stream: "Stream", call: OpenCall) -> None:
        """Put the events of a request into its stream, until the end or a cancel."""
        try:
            body = protocol.encode(request)
            with closing(self._connection(None)) as connection:
                assert connection.sock is not None
                call.begin(connection.sock)
                if call.cancelled.is_set():
                    return
                connection.request("POST", f"{PREFIX}/generate", body, self._headers)
                response = connection.getresponse()
                if response.status != 200:
                    raise self._rejected(response.status, response.read())
                _read_events(response, stream)
        except (OSError, ValueError, http.client.HTTPException, protocol.FrameError) as error:
            stream.put(self._connection_lost(error))
        except LocalchatError as error:
            stream.put(error)
        finally:
            call.end()

    def _connection(self, timeout_s: float | None) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        connection.connect()
        assert connection.sock is not None
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _connection_lost(self, error: Exception) -> EngineDied:
        lost = EngineDied(
            f"the connection to the server at {self.url} was lost: {error or type(error).__name__}",
            hint="start it again with `localchat serve`, or run this command again to load the model here",
            signal="",
            phase="serve",
            attached=True,
        )
        lost.__cause__ = error
        return lost

    def _rejected(self, status: int, body: bytes) -> LocalchatError:
        body_text = body.decode("utf-8", "replace")[:200]
        return LocalchatError(
            f"the server at {self.url} rejected the request ({status}): {body_text}",
            hint="restart it, or use --no-attach",
        )


class AttachedEngine(FrameQueries):
    """See Engine. `close` closes the connections, and the model stays loaded on the server."""

    def __init__(self, server: ServerClient, spec: AttachSpec, user: str) -> None:
        """user: name of the client, for `ps`."""
        self._server = server
        self._spec = spec
        self._user = user
        self._lock = threading.Lock()
        self._calls: set[OpenCall] = set()
        self._closed = False

    def generate(self, request: GenerateRequest) -> Stream:
        call = OpenCall()
        stream = Stream(call.cancel)
        with self._lock:
            if self._closed:
                stream.put(EngineClosed("the model was unloaded"))
                return stream
            self._calls.add(call)
        request = msgspec.structs.replace(request, user=request.user or self._user)
        threading.Thread(
            target=self._stream_events,
            args=(GenerateCall(self._spec, request), stream, call),
            daemon=True,
        ).start()
        return stream

    def _stream_events(self, request: GenerateCall, stream: Stream, call: OpenCall) -> None:
        self._server.stream_events(request, stream, call)
        with self._lock:
            self._calls.discard(call)

    def close(self, deadline_s: float = 2.0) -> None:
        with self._lock:
            self._closed = True
            calls = list(self._calls)
        for call in calls:
            call.cancel()

    def _query(self, make_query: Callable[[int], protocol.Query], kind: type[Reply]) -> Reply:
        if self._closed:
            raise EngineClosed("the model was unloaded")
        # The server replies to one query per connection, so ids have no meaning.
        return self._server.query(QueryCall(self._spec, make_query(0), self._user), kind)


def _read_events(response: http.client.HTTPResponse, stream: Stream) -> None:
    """Put the events of a response into a stream, until the end or a failure. Raises FrameError."""
    for frame in protocol.read_frames(response, protocol.FromChild):
        match frame:
            case protocol.Events(items):
                stream.put(*(event for _, event in items))
                if items and isinstance(items[-1][1], Done):
                    return
            case protocol.Failed():
                stream.put(frame.error())
                return
            case _:
                raise protocol.FrameError(f"a {type(frame).__name__} in a stream")
    raise protocol.FrameError("the stream ended early")
