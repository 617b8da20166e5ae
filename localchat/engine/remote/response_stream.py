"""One answer of a remote server: its chunks become events, and its times are measured as they arrive."""

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal

import msgspec

from localchat import metrics
from localchat.engine.events import (
    Done,
    Event,
    Finished,
    FinishReason,
    MetricsSnapshot,
    Reasoning,
    Text,
    Timings,
    TokenLogprob,
    ToolCall,
    Usage,
)
from localchat.engine.remote.errors import broken_off, is_error
from localchat.engine.remote.server_timings import ServerTimings
from localchat.engine.request import GenerateRequest
from localchat.errors import LocalchatError, NetworkError

_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "eos": "stop",
    "word": "stop",
    "limit": "length",
}
"""Those of OpenAI's protocol, and the last three of llama.cpp's."""
_ENDED_EARLY: Final = {
    "content_filter": "its filter stopped it",
    "abort": "it was aborted there",
    "error": "it failed there",
}
_MANY_PER_CHUNK: Final = 1.5
"""Tokens in a chunk from which on the gaps between chunks say nothing of the time of a token."""


class ResponseStream:
    """Chunks in, events out. `arrived_s`: when the request came, by time.perf_counter. accepted: whether its
    reader was told so; figures_due_s: when it should be told figures next."""

    def __init__(self, request: GenerateRequest, arrived_s: float) -> None:
        self.request = request
        self.complete = False
        self.accepted = False
        self.figures_due_s = 0.0
        self.finished = 0
        self._arrived_s = arrived_s
        self._times: list[float] = []
        self._own = ServerTimings()
        self._open: set[int] = set(range(request.n))
        self._fingerprint = ""
        self._calls: dict[tuple[int, int], tuple[str, int]] = {}

    @property
    def begun(self) -> bool:
        """Whether something of the answer has come. Heartbeats, roles and empty pieces are nothing of it."""
        return bool(self._times)

    @property
    def own(self) -> ServerTimings:
        """What the server told of itself."""
        return self._own

    def shortened(self, refusal: LocalchatError) -> bool:
        """Whether the longest answer was all that did not fit; then it is as long from now on as there is room
        for. Who asks for more than there is gets what there is, here as from an engine of our own."""
        room, wanted = refusal.details.get("room_tokens"), self.request.max_tokens
        if not isinstance(room, int) or wanted is None or not 0 < room < wanted:
            return False
        self.request = msgspec.structs.replace(self.request, max_tokens=room)
        return True

    def take(self, data: str, base: str) -> Iterator[Event]:
        """Events of one `data:` line. Raises what the server says in place of an answer."""
        if data == "[DONE]":
            self.complete = True
            return
        try:
            chunk = json.loads(data)
        except ValueError as problem:
            raise NetworkError(f"{base} sent a chunk that is no JSON: {data[:80]!r}") from problem
        if not isinstance(chunk, dict):
            raise NetworkError(f"{base} sent a chunk that is no JSON object: {data[:80]!r}")
        yield from self.take_chunk(chunk, base)

    def take_chunk(self, chunk: dict[str, Any], base: str) -> Iterator[Event]:
        """Events of one object, of a stream or of a whole answer. Raises what `take` raises."""
        if is_error(chunk):
            raise broken_off(chunk, base, begun=self.begun)
        self._own = self._own.updated(chunk)
        self._fingerprint = str(chunk.get("system_fingerprint") or self._fingerprint)
        try:
            for choice in chunk.get("choices") or ():
                yield from self._choice(choice, base)
            if "choices" not in chunk and isinstance(chunk.get("content"), str):
                yield from self._native(chunk, base)
        except (AttributeError, KeyError, TypeError, ValueError) as problem:
            raise NetworkError(
                f"{base} sent a chunk of an odd shape ({type(problem).__name__}): {str(chunk)[:80]}"
            ) from problem

    def _native(self, chunk: dict[str, Any], base: str) -> Iterator[Event]:
        """A piece of llama.cpp's own stream, whose last one says so."""
        ended = chunk.get("stop") is True
        reason = str(chunk.get("stop_type") or "eos") if ended else None
        choice = {
            "text": chunk["content"],
            "finish_reason": reason,
            "stop_reason": chunk.get("stopping_word"),
        }
        yield from self._choice(choice, base)
        self.complete = self.complete or ended

    def _choice(self, choice: dict[str, Any], base: str) -> Iterator[Event]:
        number = int(choice.get("index") or 0)
        if not 0 <= number < self.request.n:
            raise NetworkError(f"{base} sent a choice {number} that nobody asked for")
        delta = choice.get("delta", choice.get("message"))
        delta = delta if isinstance(delta, dict) else {"content": choice.get("text")}
        told: list[Event] = []
        if thought := _words(delta.get("reasoning_content")) or _words(delta.get("reasoning")):
            told.append(Reasoning(number, thought))
        if text := _words(delta.get("content")):
            told.append(Text(number, text, _logprobs(choice)))
        for place, call in enumerate(delta.get("tool_calls") or ()):
            told.append(self._call(number, place, call))
        if told:
            self._times.append(time.perf_counter())
        yield from told
        if (reason := choice.get("finish_reason")) and number in self._open:
            if early := _ENDED_EARLY.get(str(reason)):
                raise NetworkError(f"{base} ended its answer early: {early}")
            self._open.discard(number)
            self.finished += 1
            stop = choice.get("stop_reason")
            yield Finished(
                number,
                _REASONS.get(str(reason), "stop"),
                stop if isinstance(stop, str) else "",
            )

    def _call(self, choice: int, place: int, call: dict[str, Any]) -> ToolCall:
        """A piece of a tool call. In a whole answer calls have no index and stand in their order; arguments
        that are an object become the text that they should have been."""
        function = call.get("function") or {}
        arguments = function.get("arguments") or ""
        id_, name = str(call.get("id") or ""), str(function.get("name") or "")
        index = call.get("index")
        return ToolCall(
            choice,
            self._number(choice, place if index is None else int(index), id_, name),
            id_,
            name,
            arguments if isinstance(arguments, str) else json.dumps(arguments),
        )

    def _number(self, choice: int, index: int, id_: str, name: str) -> int:
        """The number of a call. Some servers give every call the same index, or none: another name with another
        id is another call."""
        known, number = self._calls.get((choice, index), ("", -1))
        taken = [each for (other, _), (_, each) in self._calls.items() if other == choice]
        if number < 0:
            number = index if index not in taken else max(taken) + 1
        elif name and id_ and known and id_ != known:
            number = max(taken) + 1
        self._calls[(choice, index)] = (id_ or known, number)
        return number

    # ------------------------------------------------------------------------ figures

    def _tokens(self) -> int:
        """As the server counts, or the pieces that came. A count of nothing beside a text counts nothing."""
        return self._own.completion_tokens or len(self._times)

    def _rate(self) -> float | None:
        if not self._times:
            return None
        return metrics.decode_rate(self._tokens(), self._times[0], self._times[-1])

    def figures(self, running: int) -> MetricsSnapshot:
        """The figures now, as far as our edge sees them."""
        phase: Literal["prefill", "decode"] = "decode" if self._times else "prefill"
        return MetricsSnapshot(
            phase=phase,
            ttft_s=self._times[0] - self._arrived_s if self._times else None,
            decode_tokens_per_s=self._rate(),
            completion_tokens=self._tokens(),
            running=running,
        )

    def end(self, now_s: float) -> Iterator[Event]:
        """The last events. Raises ConnectionError where the stream ended without any, NetworkError where it
        ended without saying how."""
        if self._open and not self.complete:
            if not self.begun:
                raise ConnectionError("the server ended the answer before its first word")
            raise NetworkError(
                "the server ended the answer without saying that it is whole; what came is kept",
                hint="the server, or something on the way, cut the connection",
            )
        for choice in sorted(self._open):  # it said that it is done, and not why
            self.finished += 1
            yield Finished(choice, "stop")
        yield self._done(now_s)

    def _done(self, now_s: float) -> Done:
        gaps = [1e3 * (b - a) for a, b in zip(self._times, self._times[1:], strict=False)]
        if self._tokens() > _MANY_PER_CHUNK * len(self._times):
            gaps = []
        own = self._own
        ttft_s = self._times[0] - self._arrived_s if self._times else None
        prefill = metrics.prefill_rate(own.prompt_tokens, own.cached_tokens, ttft_s or 0.0)
        return Done(
            usage=Usage(own.prompt_tokens, own.cached_tokens, self._tokens()),
            timings=Timings(
                load_s=own.load_s,
                queue_s=own.queue_s,
                ttft_s=ttft_s,
                prefill_tokens_per_s=own.prefill_tokens_per_s or prefill,
                decode_tokens_per_s=self._rate(),
                tpot_ms_p50=metrics.percentile(gaps, 0.5),
                tpot_ms_p95=metrics.percentile(gaps, 0.95),
                tpot_ms_p99=metrics.percentile(gaps, 0.99),
                total_s=now_s - self._arrived_s,
            ),
            kv_used_tokens=own.kv_used_tokens,
            kv_total_tokens=own.kv_total_tokens,
            speculation=own.speculation,
            fingerprint=own.fingerprint or self._fingerprint,
        )


def _words(value: object) -> str:
    """A text, or the texts of a list of parts."""
    if isinstance(value, list):
        parts = [one.get("text") for one in value if isinstance(one, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    return value if isinstance(value, str) else ""


def _logprobs(choice: dict[str, Any]) -> tuple[TokenLogprob, ...]:
    found = choice.get("logprobs")
    if not isinstance(found, dict):
        return ()
    if isinstance(found.get("tokens"), list):
        return _listed_logprobs(found)
    entries = found.get("content")
    if not isinstance(entries, list):
        return ()
    return tuple(
        _logprob(
            one.get("token", ""),
            one.get("logprob"),
            [(top.get("token", ""), top["logprob"]) for top in one.get("top_logprobs") or ()],
        )
        for one in entries
        if isinstance(one, dict)
    )


def _listed_logprobs(found: dict[str, Any]) -> tuple[TokenLogprob, ...]:
    """Those of a plain completion: a list of each kind."""
    tokens = found["tokens"]
    logprobs = found.get("token_logprobs") or [None] * len(tokens)
    tops = found.get("top_logprobs") or [None] * len(tokens)
    return tuple(
        _logprob(token, logprob, (top or {}).items())
        for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
    )


def _logprob(token: object, logprob: Any, top: Iterable[tuple[object, Any]]) -> TokenLogprob:  # noqa: ANN401
    return TokenLogprob(
        token=-1,
        text=str(token).encode("utf-8", "replace"),
        logprob=float(logprob or 0.0),
        top=tuple((-1, str(one).encode("utf-8", "replace"), float(each)) for one, each in top),
    )
