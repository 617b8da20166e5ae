"""HTTP client of a benchmark: streams chat completions and notes when each piece arrives.

Costs little itself, because it often shares a machine with the server that it measures: one event loop, one
connection per request, and a typed decoder for the few fields that are read. Seconds count from the moment
the request was sent, after the connection was made.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
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


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


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
    """One answered request. Seconds are of one monotonic clock."""

    began_s: float
    """The moment it was sent."""
    arrivals_s: tuple[float, ...]
    """The moment each event with text arrived; several tokens may share one."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted: int | None = None
    """None: the server does not say."""
    accepted: int | None = None
    kv_used_tokens: int = 0
    kv_total_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """From the request to its first text."""
        return self.arrivals_s[0] - self.began_s

    @property
    def latency_s(self) -> float:
        """From the request to its last text."""
        return self.arrivals_s[-1] - self.began_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for fewer than two tokens."""
        if self.completion_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.completion_tokens - 1)


@dataclass(frozen=True, slots=True)
class BenchClient:
    """Streams chat completions from one server."""

    url: str
    """With or without /v1."""
    key: str = ""
    """Sent as a bearer token, and shown nowhere."""

    async def ask(self, body: dict[str, Any]) -> RequestSample:
        """Stream one answer. Raises NetworkError, UsageError, ContextExceeded, ModelMissing."""
        base = base_url(self.url)
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await self._connected(base)
        except (OSError, TimeoutError) as error:
            raise NetworkError(
                f"{base} cannot be reached: {error or 'no answer'}",
                hint="is the server running, and is its address right?",
            ) from error
        try:
            began_s = time.perf_counter()
            writer.write(self._request(base, msgspec.json.encode(body)))
            return await _sample(reader, began_s, base)
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError) as error:
            raise NetworkError(
                f"{base} ended the connection within an answer",
                hint="see the log of the server",
            ) from error
        except ValueError as error:
            raise NetworkError(
                f"{base} answered with what is no stream of events: {error}",
                hint="is it an OpenAI-compatible server?",
            ) from error
        finally:
            writer.close()

    async def _connected(self, base: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = urlsplit(base)
        secure = parts.scheme == "https"
        return await asyncio.open_connection(
            parts.hostname,
            parts.port or (443 if secure else 80),
            ssl=ssl.create_default_context() if secure else None,
            limit=_LINE_BYTES,
        )

    def _request(self, base: str, content: bytes) -> bytes:
        parts = urlsplit(base)
        key = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        head = (
            f"POST {parts.path}/v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n{key}"
            "User-Agent: localchat\r\nContent-Type: application/json\r\nAccept-Encoding: identity\r\n"
            f"Connection: close\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content


async def _sample(reader: asyncio.StreamReader, began_s: float, base: str) -> RequestSample:
    """Read the response. Raises LocalchatError, OSError, EOFError, ValueError."""
    head = await _within_silence(reader.readuntil(b"\r\n\r\n"))
    status_line, *lines = head.decode("latin-1").split("\r\n")
    status = int(status_line.partition(" ")[2][:3])
    pieces = _pieces(reader, lines)
    if status != 200:
        text = b"".join([piece async for piece in pieces]).decode("utf-8", "replace")
        raise error_from_status(status, text, base)
    arrivals: list[float] = []
    usage = _Usage()
    timings = _Timings()
    async for line, at_s in _data_lines(pieces):
        chunk = _decode_chunk(line)
        if chunk.error:
            raise error_from_stream(msgspec.json.decode(line), base, partial=bool(arrivals))
        if any(_has_text(choice.delta) for choice in chunk.choices):
            arrivals.append(at_s)
        usage = chunk.usage or usage
        timings = chunk.timings or timings
    if not arrivals:
        raise NetworkError(
            f"{base} answered without any text", hint="is it an OpenAI-compatible server?"
        )
    cached = usage.prompt_tokens_details
    drafted = timings.drafted if timings.drafted is not None else timings.draft_n
    accepted = timings.accepted if timings.accepted is not None else timings.draft_n_accepted
    return RequestSample(
        began_s=began_s,
        arrivals_s=tuple(arrivals),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=(cached.cached_tokens or 0) if cached is not None else 0,
        completion_tokens=usage.completion_tokens or len(arrivals),
        drafted=drafted,
        accepted=accepted,
        kv_used_tokens=timings.kv_used_tokens,
        kv_total_tokens=timings.kv_total_tokens,
    )


def _has_text(delta: _Delta | None) -> bool:
    return delta is not None and bool(
        delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls
    )


async def _data_lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[tuple[bytes, float]]:
    """The JSON of each event, and when it arrived."""
    rest = b""
    async for piece in pieces:
        at_s = time.perf_counter()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data.startswith(b"{"):  # not [DONE]
                    yield data, at_s


async def _pieces(reader: asyncio.StreamReader, lines: list[str]) -> AsyncIterator[bytes]:
    """The body of a response as it arrives, without the framing of HTTP."""
    headers = {
        name.strip().lower(): value.strip().lower()
        for name, _, value in (line.partition(":") for line in lines)
    }
    if "chunked" in headers.get("transfer-encoding", ""):
        while size := int((await _within_silence(reader.readuntil(b"\n"))).split(b";")[0], 16):
            yield (await _within_silence(reader.readexactly(size + 2)))[:size]
        return
    left = int(headers.get("content-length", _MAX_BODY_BYTES))
    while left > 0 and (piece := await _within_silence(reader.read(min(left, 1 << 16)))):
        left -= len(piece)
        yield piece


async def _within_silence(read: Any) -> bytes:  # noqa: ANN401 - a coroutine of bytes
    """What a read gives. Raises TimeoutError after a long silence."""
    async with asyncio.timeout(_SILENCE_S):
        found: bytes = await read
        return found


def is_refusal(problem: LocalchatError) -> bool:
    """Whether the server refused the request itself, so that the next one would be refused too."""
    return problem.code in ("usage", "context_exceeded", "model_missing", "template")
