"""An HTTP client that costs little itself: streams of chat completions, timed as they arrive."""

import asyncio
import json
import re
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

_TEXT = re.compile(rb'"(?:reasoning_)?content":"[^"]')
_USAGE = re.compile(rb'"usage":\{')
Body = dict[str, Any]


class Answer(NamedTuple):
    """One streamed answer. Seconds count from the moment the request was sent."""

    first_s: float
    """To the first text; to the end of a stream that has none."""
    end_s: float
    """To the end of the stream."""
    tokens: int
    prompt_tokens: int
    text: str

    @property
    def tokens_per_s(self) -> float:
        """Rate after the first token."""
        return (self.tokens - 1) / (self.end_s - self.first_s)


def chat(text: str, tokens: int, **fields: object) -> Body:
    """A streamed chat completion of one message, as long as asked for."""
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }


def together(port: int, bodies: Sequence[Body]) -> tuple[float, list[Answer]]:
    """Send all requests at once. Returns the seconds until the last answer ended, and the answers."""

    async def run() -> tuple[float, list[Answer]]:
        began_s = time.perf_counter()
        answers = await asyncio.gather(*[_ask(port, body) for body in bodies])
        return time.perf_counter() - began_s, answers

    return asyncio.run(run())


def alone(port: int, body: Body, key: str = "") -> Answer:
    """One request, with nothing else running. `key`: API key of the client."""
    return asyncio.run(_ask(port, body, key))


class Stream(NamedTuple):
    """One streamed answer that was not looked at while it arrived."""

    first_s: float
    """From the request to the first text."""
    tokens: int
    events: int
    """Events with text."""


def crowd(port: int, clients: Sequence[Sequence[Body]]) -> tuple[float, list[Stream]]:
    """Run all clients at once, each with one request after the other, and only collect bytes.

    Returns the seconds in all, and the answers.
    """

    async def client(bodies: Sequence[Body]) -> list[_Collector]:
        loop = asyncio.get_running_loop()
        collectors = [_Collector(_request(port, body), loop.create_future()) for body in bodies]
        for collector in collectors:
            await loop.create_connection(partial(_same, collector), "127.0.0.1", port)
            await collector.ended
        return collectors

    async def run() -> tuple[float, list[list[_Collector]]]:
        began_s = time.perf_counter()
        collectors = await asyncio.gather(*map(client, clients))
        return time.perf_counter() - began_s, collectors

    spent_s, collectors = asyncio.run(run())
    return spent_s, [one.stream() for of_client in collectors for one in of_client]


def _same(collector: "_Collector") -> "_Collector":
    return collector


class _Collector(asyncio.Protocol):
    """A connection that sends a request and collects what comes back. Costs less than an asyncio stream."""

    def __init__(self, request: bytes, ended: "asyncio.Future[None]") -> None:
        self.ended = ended
        self._request = request
        self._pieces: list[tuple[float, bytes]] = []
        self._sent_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._sent_s = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._pieces.append((time.perf_counter(), data))

    def connection_lost(self, _error: Exception | None) -> None:
        self.ended.set_result(None)

    def stream(self) -> Stream:
        """Return the answer. Raises RuntimeError if there is none."""
        raw = b"".join(piece for _, piece in self._pieces)
        counts = re.findall(rb'"completion_tokens":(\d+)', raw)
        if not counts:
            raise RuntimeError(f"no answer: {raw[:300]!r}")
        first_s = next((at_s for at_s, piece in self._pieces if _TEXT.search(piece)), 0.0)
        return Stream(first_s - self._sent_s, int(counts[-1]), len(_TEXT.findall(raw)))


async def _ask(port: int, body: Body, key: str = "") -> Answer:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    asked_s = time.perf_counter()
    writer.write(_request(port, body, key))
    pieces: list[bytes] = []
    first_s = 0.0
    tail = b""
    while piece := await reader.read(1 << 16):
        if not first_s and _TEXT.search(tail + piece):
            first_s = time.perf_counter() - asked_s
        tail = piece[-len(b'"reasoning_content":"') :]
        pieces.append(piece)
    end_s = time.perf_counter() - asked_s
    writer.close()
    return _answer(b"".join(pieces), first_s or end_s, end_s)


def _request(port: int, body: Body, key: str = "") -> bytes:
    """Return the bytes of a request."""
    raw = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n"
        f"Authorization: Bearer {key}\r\n\r\n"
    )
    return head.encode() + raw


def _answer(raw: bytes, first_s: float, end_s: float) -> Answer:
    events = [line[6:] for line in raw.splitlines() if line.startswith(b"data: {")]
    usage = [json.loads(event)["usage"] for event in events if _USAGE.search(event)]
    if not usage:
        raise RuntimeError(f"no answer: {raw[:300]!r}")
    text = "".join(
        choice["delta"].get("content") or ""
        for event in events
        for choice in json.loads(event)["choices"]
    )
    counts = usage[-1]
    return Answer(first_s, end_s, counts["completion_tokens"], counts["prompt_tokens"], text)
