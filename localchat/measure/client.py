"""HTTP client of a benchmark: streams chat completions and records when each piece arrives.

It must cost little, because it often shares a machine with the server that it measures: one event loop, one
connection per request, and a typed decoder for the few fields that it reads. Times count from the moment the
request was sent, after the connection was made.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from localchat.engine.remote.client import base_url
from localchat.engine.remote.errors import error_from_status, error_from_stream
from localchat.errors import LocalchatError, NetworkError

_SILENCE_S: Final = 300.0
_CONNECT_S: Final = 10.0
_MAX_BODY_BYTES: Final = 64 << 20
_LINE_BYTES: Final = 1 << 22
_REFUSALS: Final = ("usage", "context_exceeded", "model_missing", "template")
"""Codes of errors that every request of the same kind would get."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None

    def has_text(self) -> bool:
        return bool(self.content or self.reasoning_content or self.reasoning or self.tool_calls)


class _StreamChoice(msgspec.Struct):
    delta: _Delta | None = None


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _CachedTokens | None = None


class _Timings(msgspec.Struct):
    """Extensions of localchat and llama-server."""

    drafted: int | None = None
    accepted: int | None = None
    draft_n: int | None = None
    draft_n_accepted: int | None = None
    kv_used_tokens: int = 0
    kv_total_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_StreamChoice] = []
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class RequestSample(msgspec.Struct, frozen=True, omit_defaults=True):
    """Times and counts of an answered request. All times are readings of one monotonic clock."""

    began_s: float
    """Time at which the request was sent."""
    arrivals_s: tuple[float, ...]
    """Time of each event with text. Several tokens may share an event."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted: int | None = None
    """Draft tokens; None if the server does not report them."""
    accepted: int | None = None
    kv_used_tokens: int = 0
    kv_total_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.arrivals_s[0] - self.began_s

    @property
    def latency_s(self) -> float:
        """Time from the request to its last text."""
        return self.arrivals_s[-1] - self.began_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None below two tokens."""
        if self.completion_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.completion_tokens - 1)


@dataclass(frozen=True, slots=True)
class BenchClient:
    """Streams chat completions from one server."""

    url: str
    """Address with or without /v1."""
    key: str = ""
    """Bearer token, which is never shown."""

    async def ask(
        self, body: dict[str, Any], on_text: Callable[[], None] = lambda: None
    ) -> RequestSample:
        """Stream one answer, and call `on_text` after each event with text.

        Raises NetworkError, UsageError, ContextExceeded, ModelMissing.
        """
        base = base_url(self.url)
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await self._connect(base)
        except (OSError, TimeoutError) as error:
            raise NetworkError(
                f"{base} cannot be reached: {error or 'no answer'}",
                hint="is the server running, and is its address right?",
            ) from error
        try:
            began_s = time.perf_counter()
            writer.write(self._request(base, msgspec.json.encode(body)))
            return await _read_sample(reader, began_s, base, on_text)
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError) as error:
            raise NetworkError(
                f"{base} closed the connection in mid-answer", hint="see the log of the server"
            ) from error
        except ValueError as error:
            raise NetworkError(
                f"{base} did not answer with a stream of events: {error}",
                hint="is it an OpenAI-compatible server?",
            ) from error
        finally:
            writer.close()

    async def _connect(self, base: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = urlsplit(base)
        context = None
        port = parts.port or 80
        if parts.scheme == "https":
            context = ssl.create_default_context()
            port = parts.port or 443
        return await asyncio.open_connection(parts.hostname, port, ssl=context, limit=_LINE_BYTES)

    def _request(self, base: str, content: bytes) -> bytes:
        parts = urlsplit(base)
        key = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        head = (
            f"POST {parts.path}/v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n{key}"
            "User-Agent: localchat\r\nContent-Type: application/json\r\nAccept-Encoding: identity\r\n"
            f"Connection: close\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content


async def _read_sample(
    reader: asyncio.StreamReader, began_s: float, base: str, on_text: Callable[[], None]
) -> RequestSample:
    """Read a response. Raises LocalchatError, OSError, EOFError, ValueError."""
    head = await _with_timeout(reader.readuntil(b"\r\n\r\n"))
    status_line, *header_lines = head.decode("latin-1").split("\r\n")
    status = int(status_line.partition(" ")[2][:3])
    pieces = _body_pieces(reader, header_lines)
    if status != 200:
        text = b"".join([piece async for piece in pieces]).decode("utf-8", "replace")
        raise error_from_status(status, text, base)
    arrivals: list[float] = []
    usage = _Usage()
    timings = _Timings()
    async for data, arrived_s in _events(pieces):
        chunk = _decode_chunk(data)
        if chunk.error:
            raise error_from_stream(msgspec.json.decode(data), base, partial=bool(arrivals))
        if any(choice.delta is not None and choice.delta.has_text() for choice in chunk.choices):
            arrivals.append(arrived_s)
            on_text()
        usage = chunk.usage or usage
        timings = chunk.timings or timings
    if not arrivals:
        raise NetworkError(
            f"{base} answered without any text", hint="is it an OpenAI-compatible server?"
        )
    details = usage.prompt_tokens_details or _CachedTokens()
    drafted = timings.drafted
    accepted = timings.accepted
    if drafted is None:
        # llama-server has other names for the same counts.
        drafted = timings.draft_n
        accepted = timings.draft_n_accepted
    return RequestSample(
        began_s=began_s,
        arrivals_s=tuple(arrivals),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=details.cached_tokens or 0,
        completion_tokens=usage.completion_tokens or len(arrivals),
        drafted=drafted,
        accepted=accepted,
        kv_used_tokens=timings.kv_used_tokens,
        kv_total_tokens=timings.kv_total_tokens,
    )


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[tuple[bytes, float]]:
    """Yield the JSON of each event, and its time of arrival."""
    partial_line = b""
    async for piece in pieces:
        arrived_s = time.perf_counter()
        *lines, partial_line = (partial_line + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data.startswith(b"{"):  # skips [DONE]
                    yield data, arrived_s


async def _body_pieces(
    reader: asyncio.StreamReader, header_lines: list[str]
) -> AsyncIterator[bytes]:
    """Yield the body of a response as it arrives, without the framing of HTTP."""
    headers = {
        name.strip().lower(): value.strip().lower()
        for name, _, value in (line.partition(":") for line in header_lines)
    }
    if "chunked" in headers.get("transfer-encoding", ""):
        while size := int((await _with_timeout(reader.readuntil(b"\n"))).split(b";")[0], 16):
            yield (await _with_timeout(reader.readexactly(size + 2)))[:size]
        return
    left = int(headers.get("content-length", _MAX_BODY_BYTES))
    while left > 0 and (piece := await _with_timeout(reader.read(min(left, 1 << 16)))):
        left -= len(piece)
        yield piece


async def _with_timeout(read: Awaitable[bytes]) -> bytes:
    """Await a read. Raises TimeoutError if the server is silent for too long."""
    async with asyncio.timeout(_SILENCE_S):
        return await read


def is_refusal(problem: LocalchatError) -> bool:
    """Return True if the server would reject every request like this one."""
    return problem.code in _REFUSALS
