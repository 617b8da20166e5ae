"""A server on loopback whose answers a test writes, and what a test reads of them."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from localchat.engine.events import Event, Text
from localchat.engine.remote.engine import RemoteEngine
from localchat.engine.request import GenerateRequest, Message, Messages

Handler = Callable[["Exchange"], None]


class Exchange(BaseHTTPRequestHandler):
    """One request; the test's function answers it."""

    protocol_version = "HTTP/1.1"
    answer: Handler
    seen: list[tuple[str, Any, dict[str, str]]]

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        self.seen.append((self.path, body, dict(self.headers)))
        try:
            type(self).answer(self)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_GET = do_POST = _serve

    def send(self, status: int, body: object, **headers: str) -> None:
        """A whole JSON answer."""
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, *chunks: object, end: bool = True) -> None:
        """Event lines; afterwards the connection closes."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(b": keep-alive\n\n")
        for chunk in chunks:
            text = chunk if isinstance(chunk, str) else json.dumps(chunk)
            self.wfile.write(f"data: {text}\n\n".encode())
            self.wfile.flush()
        if end:
            self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Silent."""


class Server:
    """A server on loopback whose answers the test writes."""

    def __init__(self, answer: Handler) -> None:
        self.seen: list[tuple[str, Any, dict[str, str]]] = []
        kind = type("OneExchange", (Exchange,), {"answer": staticmethod(answer), "seen": self.seen})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


Open = Callable[..., tuple[RemoteEngine, Server]]
"""Opens an engine on a server that answers so."""


def piece(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


ASK = GenerateRequest(Messages((Message("user", "hi"),)))


def events(engine: RemoteEngine, request: GenerateRequest = ASK) -> list[Event]:
    return list(engine.generate(request))


def text_of(found: list[Event]) -> str:
    return "".join(event.text for event in found if isinstance(event, Text))
