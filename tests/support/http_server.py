"""A server on scripted answers, on a socket of its own, and a client that shows every byte."""

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from localchat.engine.events import Event
from localchat.engine.interface import Engine
from localchat.engine.request import GenerateRequest, Messages
from localchat.engine.request import TextPrompt as Prompt
from localchat.engine.stream import Stream
from localchat.errors import LocalchatError
from localchat.server.app import create_app
from localchat.server.config import ServerConfig, ServerLimits
from localchat.server.uvicorn_server import UvicornServer, bind_sockets
from tests.support.scripted_engine import ScriptedAnswer, ScriptedEngine
from tests.support.single_engine import SingleEngine

NAME = "scripted"


def said(request: GenerateRequest) -> str:
    """The text of the last message, or of the prompt."""
    match request.prompt:
        case Messages(messages):
            return messages[-1].content
        case Prompt(text):
            return text
    return ""


@dataclass(slots=True)
class StageEngine(ScriptedEngine):
    """Refuses before it accepts, where it is sent to: by the text of the last message, once for each entry."""

    refusals: dict[str, list[LocalchatError]] = field(default_factory=dict)

    def generate(self, request: GenerateRequest) -> Stream:
        waiting = self.refusals.get(said(request))
        if not waiting:
            return ScriptedEngine.generate(self, request)
        self.requests.append(request)
        stream = Stream(lambda: None)
        stream.put(waiting.pop(0))
        return stream


UNHURRIED = ServerConfig(
    heartbeat_s=600.0,
    event_s=600.0,
    limits=ServerLimits(header_s=600.0, body_s=600.0, idle_s=600.0, stall_s=600.0),
)
"""What tests that are about nothing of this need: a machine that does something else adds no heartbeat and
closes no connection."""


@dataclass
class Stage:
    """Parts of a running server; `scripts` answer by the text of the last message."""

    port: int
    engine: StageEngine
    server: UvicornServer
    scripts: dict[str, ScriptedAnswer | Callable[[GenerateRequest], ScriptedAnswer]]

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def last(self) -> GenerateRequest:
        return self.engine.requests[-1]

    @property
    def prompt(self) -> Messages:
        """The conversation that was last put to the engine."""
        asked = self.last.prompt
        assert isinstance(asked, Messages)
        return asked

    def plays(self, word: str, *events: Event, **answer: Any) -> str:
        """Let a prompt of this word be answered so; returns the word."""
        self.scripts[word] = ScriptedAnswer(events=events, **answer)
        return word


@contextmanager
def serving(config: ServerConfig | None = None, *, drain_s: float = 0.0) -> Iterator[Stage]:
    """A server in a thread, until the end of the block."""
    scripts: dict[str, ScriptedAnswer | Callable[[GenerateRequest], ScriptedAnswer]] = {}

    def script(request: GenerateRequest) -> ScriptedAnswer:
        found = scripts.get(said(request), ScriptedAnswer(("Hel", "lo", ".")))
        return found(request) if callable(found) else found

    engine = StageEngine(script=script, model=NAME)
    with running(engine, config, drain_s=drain_s) as (port, server):
        yield Stage(port, engine, server, scripts)


@contextmanager
def running(
    engine: Engine,
    config: ServerConfig | None = None,
    *,
    drain_s: float = 0.0,
    engines: type[SingleEngine] = SingleEngine,
) -> Iterator[tuple[int, UvicornServer]]:
    """The port of a server over any engine, until the end of the block."""
    sockets = bind_sockets("127.0.0.1", 0)
    app = create_app(engines(engine, NAME), config or UNHURRIED)
    server = UvicornServer(app, drain_s)
    thread = threading.Thread(target=server.run, args=(sockets,), daemon=True)
    thread.start()
    assert settled(lambda: server.started)
    try:
        yield sockets[0].getsockname()[1], server
    finally:
        server.stop()
        thread.join(90)
        assert not thread.is_alive()


@dataclass
class Reply:
    """A response, byte for byte. `chunks`: the pieces of a chunked body as they were framed."""

    status: int
    headers: dict[str, str]
    body: bytes
    chunks: list[bytes] = field(default_factory=list)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error of a refusal, whose shape is checked."""
        assert self.headers["content-type"] == "application/json"
        whole = json.loads(self.body)
        assert set(whole) == {"error"}
        error: dict[str, Any] = whole["error"]
        assert set(error) - {"x_localchat"} == {"message", "type", "param", "code"}
        assert error["message"] and isinstance(error["message"], str)
        assert isinstance(error["type"], str)
        return error

    @property
    def anthropic_error(self) -> dict[str, Any]:
        """The same where the request was one of Anthropic's API."""
        assert self.headers["content-type"] == "application/json"
        whole = json.loads(self.body)
        assert (set(whole), whole["type"]) == ({"type", "error", "request_id"}, "error")
        assert set(whole["error"]) == {"type", "message"} and whole["error"]["message"]
        assert whole["request_id"] == self.headers["request-id"] == self.headers["x-request-id"]
        error: dict[str, Any] = whole["error"]
        return error

    @property
    def events(self) -> list[str]:
        """The payloads behind `data: `, without comments."""
        lines = self.body.decode().split("\n\n")
        assert lines[-1] == ""
        return [line[6:] for line in lines if line.startswith("data: ")]

    @property
    def named_events(self) -> list[tuple[str, Any]]:
        """Events that have names, with their data; comments left out. Every rule of their framing is
        checked: two lines each, the same name twice."""
        blocks = self.body.decode().split("\n\n")
        assert blocks.pop() == "" and "\r" not in self.body.decode()
        made = []
        for block in blocks:
            if block.startswith(":"):
                continue
            found = re.fullmatch(r"event: (\S+)\ndata: (\S[^\n]*)", block)
            assert found is not None, block
            data = json.loads(found[2])
            assert json.dumps(data, separators=(",", ":"), ensure_ascii=False) == found[2]
            assert data["type"] == found[1]
            made.append((found[1], data))
        return made

    @property
    def chunks_json(self) -> list[Any]:
        return [json.loads(event) for event in self.events if event != "[DONE]"]


class Wire:
    """A connection of raw bytes."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.socket = socket.create_connection((host, port), timeout=90)
        self._buffer = b""

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def ask(
        self,
        path: str,
        body: Any = None,
        *,
        method: str | None = None,
        headers: dict[str, str] | None = None,
        host: str | None = "127.0.0.1",
    ) -> None:
        """Send a request. `body`: JSON, or bytes as they are."""
        raw = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        method = method or ("GET" if body is None else "POST")
        lines = [f"{method} {path} HTTP/1.1"]
        if host is not None:
            lines.append(f"host: {host}")
        given = {"content-type": "application/json"} if raw else {}
        given |= headers or {}
        if raw and "transfer-encoding" not in given:
            given.setdefault("content-length", str(len(raw)))
        lines += [f"{name}: {value}" for name, value in given.items()]
        self.send("\r\n".join([*lines, "", ""]).encode() + raw)

    def until(self, mark: bytes) -> bytes:
        """Bytes up to and with the mark."""
        while mark not in self._buffer:
            more = self.socket.recv(65536)
            if not more:
                raise EOFError(self._buffer)
            self._buffer += more
        at = self._buffer.index(mark) + len(mark)
        found, self._buffer = self._buffer[:at], self._buffer[at:]
        return found

    def exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            more = self.socket.recv(65536)
            if not more:
                raise EOFError(self._buffer)
            self._buffer += more
        found, self._buffer = self._buffer[:size], self._buffer[size:]
        return found

    def peek_status(self) -> int:
        """The status of the next response, which stays to be read."""
        first = self.until(b"\r\n")
        self._buffer = first + self._buffer
        return int(first.split()[1])

    def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers, whose names must be in small letters (some clients look them up so), but for
        the two that the HTTP library itself writes."""
        first, *lines = self.until(b"\r\n\r\n").decode().rstrip().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        capitals = {name for name in headers if name != name.lower()}
        assert capitals <= {"Transfer-Encoding", "Connection"}, headers
        return int(first.split()[1]), {name.lower(): value for name, value in headers.items()}

    def chunk(self) -> bytes:
        """The next chunk of a chunked body; empty at its end."""
        size = int(self.until(b"\r\n"), 16)
        piece = self.exactly(size)
        assert self.exactly(2) == b"\r\n"
        return piece

    def reply(self, *, bodiless: bool = False) -> Reply:
        """The whole response."""
        status, headers = self.head()
        if bodiless or status in (204, 304):
            return Reply(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            chunks = list(iter(self.chunk, b""))
            return Reply(status, headers, b"".join(chunks), chunks)
        return Reply(status, headers, self.exactly(int(headers["content-length"])))

    def reply_rest(self) -> list[str]:
        """The events that are left of a stream that was begun, to its end."""
        self.socket.settimeout(90)
        with self:
            body = b""
            while not body.endswith(b"0\r\n\r\n"):
                more = self._buffer or self.socket.recv(65536)
                assert more, body
                body, self._buffer = body + more, b""
        found = re.findall(rb"data: ([^\n]*)\n\n", body)
        return [event.decode() for event in found]

    def closed(self) -> bool:
        """Whether the other side has closed, once everything was read."""
        try:
            return not self._buffer and self.socket.recv(1) == b""
        except ConnectionError:
            return True


def ask(stage: Stage, path: str, body: Any = None, **how: Any) -> Reply:
    """One request on a connection of its own."""
    with Wire(stage.port) as wire:
        wire.ask(path, body, **how)
        return wire.reply(bodiless=how.get("method") == "HEAD")


def chat(stage: Stage, content: str = "hi", **fields: Any) -> Reply:
    """A chat of one message."""
    messages = fields.pop("messages", [{"role": "user", "content": content}])
    return ask(stage, "/v1/chat/completions", {"model": "m", "messages": messages, **fields})


def message(stage: Stage, content: Any = "hi", **fields: Any) -> Reply:
    """The same by Anthropic's API."""
    messages = fields.pop("messages", [{"role": "user", "content": content}])
    body = {"model": "m", "max_tokens": 50, "messages": messages, **fields}
    return ask(stage, "/v1/messages", body)


def respond(stage: Stage, said: Any = "hi", **fields: Any) -> Reply:
    """The same by the Responses API."""
    return ask(stage, "/v1/responses", {"model": "m", "input": said, **fields})


def heard_until(reply: Callable[[], Reply], enough: Callable[[Reply], bool]) -> Reply:
    """The same request again, until the server was quick enough in its silence: a machine that does something
    else does not let it speak in time."""
    for _ in range(20):
        found = reply()
        if enough(found):
            break
    return found


def settled(condition: Callable[[], bool], seconds: float = 90.0) -> bool:
    """Wait for what happens in another thread."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def contents(chunks: Sequence[Any]) -> str:
    """The text of a stream's chunks."""
    return "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
    )
