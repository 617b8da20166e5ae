"""Response stream of a remote server: converts chunks to events, and measures times at their arrival."""

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
from localchat.engine.local.protocol import sendable
from localchat.engine.loop_guard import LoopGuard
from localchat.engine.remote.errors import error_from_stream, is_error
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
    "repetition": "repetition",
}
"""OpenAI's reasons, then three of llama.cpp, then localchat's own."""
_ENDED_EARLY: Final = {
    "content_filter": "its content filter stopped it",
    "abort": "it was aborted by the server",
    "error": "it failed on the server",
}
_MAX_TOKENS_PER_CHUNK: Final = 1.5
"""Above this number, the gaps between chunks do not show the time per token."""


class ResponseStream:
    """Converts chunks to events."""

    def __init__(self, request: GenerateRequest, arrived_s: float) -> None:
        """arrived_s: arrival of the request, by time.perf_counter."""
        self.request = request
        self._guard = LoopGuard(request)
        self.complete = False
        self.accepted = False
        """Whether Accepted was sent."""
        self.metrics_due_s = 0.0
        """Time at which the next metrics are sent."""
        self.finished = 0
        self._arrived_s = arrived_s
        self._times: list[float] = []
        self._timings = ServerTimings()
        self._open: set[int] = set(range(request.n))
        self._fingerprint = ""
        self._calls: dict[tuple[int, int], tuple[str, int]] = {}

    @property
    def begun(self) -> bool:
        """Whether part of the answer was received. Heartbeats, roles and empty pieces do not count."""
        return bool(self._times)

    def shorten_answer(self, error: LocalchatError) -> bool:
        """Limit the answer to the room that the server reported. Return whether that helps.

        As with a local engine, a request for too many tokens gets as many as there is room for.
        """
        room = error.details.get("room_tokens")
        max_tokens = self.request.max_tokens
        if not isinstance(room, int) or max_tokens is None or not 0 < room < max_tokens:
            return False
        self.request = msgspec.structs.replace(self.request, max_tokens=room)
        return True

    def feed(self, data: str, base: str) -> Iterator[Event]:
        """Yield the events of a `data:` line. Raises the error that the server sends instead of an answer."""
        if data == "[DONE]":
            self.complete = True
            return
        try:
            chunk = json.loads(data)
        except ValueError as error:
            raise NetworkError(f"{base} sent a chunk that is not JSON: {data[:80]!r}") from error
        if not isinstance(chunk, dict):
            raise NetworkError(f"{base} sent a chunk that is not a JSON object: {data[:80]!r}")
        yield from self.feed_chunk(chunk, base)

    def feed_chunk(self, chunk: dict[str, Any], base: str) -> Iterator[Event]:
        """Yield the events of an object from a stream or of a complete answer. Raises like `feed`."""
        if is_error(chunk):
            raise error_from_stream(chunk, base, partial=self.begun)
        self._timings = self._timings.updated(chunk)
        self._fingerprint = str(chunk.get("system_fingerprint") or self._fingerprint)
        try:
            for choice in chunk.get("choices") or ():
                yield from self._choice(choice, base)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise NetworkError(
                f"{base} sent a malformed chunk ({type(error).__name__}): {str(chunk)[:80]}"
            ) from error

    def _choice(self, choice: dict[str, Any], base: str) -> Iterator[Event]:
        number = int(choice.get("index") or 0)
        if not 0 <= number < self.request.n:
            raise NetworkError(f"{base} sent choice {number}, which was not requested")
        if number in self._guard.ended:
            return
        delta = choice.get("delta", choice.get("message"))
        if not isinstance(delta, dict):
            delta = {"content": choice.get("text")}
        events: list[Event] = []
        if reasoning := _joined_text(delta.get("reasoning_content")) or _joined_text(
            delta.get("reasoning")
        ):
            events.append(Reasoning(number, reasoning))
        if text := _joined_text(delta.get("content")):
            events.append(Text(number, text, _logprobs(choice)))
        for position, call in enumerate(delta.get("tool_calls") or ()):
            events.append(self._call(number, position, call))
        if events:
            self._times.append(time.perf_counter())
        for event in events:
            yield event
            if end := self._guard.end(event):
                yield self._finish(end)
                self.complete = self.complete or not self._open
                return
        if (reason := choice.get("finish_reason")) and number in self._open:
            if early := _ENDED_EARLY.get(str(reason)):
                raise NetworkError(f"{base} ended its answer early: {early}")
            stop = choice.get("stop_reason")
            yield self._finish(_end(number, str(reason), stop if isinstance(stop, str) else ""))

    def _finish(self, end: Finished) -> Finished:
        self._open.discard(end.choice)
        self.finished += 1
        if end.reason != "length" or self.request.max_tokens is None:
            return end
        return msgspec.structs.replace(end, limit="max_tokens")

    def _call(self, choice: int, position: int, call: dict[str, Any]) -> ToolCall:
        """Return a piece of a tool call.

        Calls of a complete answer are in order and have no index. Arguments that are an object become JSON
        text.
        """
        function = call.get("function") or {}
        arguments = function.get("arguments") or ""
        id_ = sendable(str(call.get("id") or ""))
        name = sendable(str(function.get("name") or ""))
        index = call.get("index")
        return ToolCall(
            choice,
            self._number(choice, position if index is None else int(index), id_, name),
            id_,
            name,
            sendable(arguments) if isinstance(arguments, str) else json.dumps(arguments),
        )

    def _number(self, choice: int, index: int, id_: str, name: str) -> int:
        """Return the number of a call.

        Some servers give every call the same index or none. A different name with a different id is another
        call.
        """
        previous_id, number = self._calls.get((choice, index), ("", -1))
        numbers = [used for (owner, _), (_, used) in self._calls.items() if owner == choice]
        if number < 0:
            number = index if index not in numbers else max(numbers) + 1
        elif name and id_ and previous_id and id_ != previous_id:
            number = max(numbers) + 1
        self._calls[(choice, index)] = (id_ or previous_id, number)
        return number

    def _tokens(self) -> int:
        """Return the server's token count, or the number of received pieces without one."""
        return self._timings.completion_tokens or len(self._times)

    def _rate(self) -> float | None:
        if not self._times:
            return None
        return metrics.decode_rate(self._tokens(), self._times[0], self._times[-1])

    def snapshot(self, running: int) -> MetricsSnapshot:
        """Return the current metrics that this end can measure."""
        phase: Literal["prefill", "decode"] = "decode" if self._times else "prefill"
        return MetricsSnapshot(
            phase=phase,
            ttft_s=self._times[0] - self._arrived_s if self._times else None,
            decode_tokens_per_s=self._rate(),
            completion_tokens=self._tokens(),
            running=running,
        )

    def end(self, now_s: float) -> Iterator[Event]:
        """Yield the last events.

        Raises ConnectionError for an empty stream, NetworkError for an incomplete one.
        """
        if self._open and not self.complete:
            if not self.begun:
                raise ConnectionError("the server closed the connection before its first word")
            raise NetworkError(
                "the connection dropped mid-answer; the partial answer is kept",
                hint="the server, or something on the way, closed the connection",
            )
        # The stream may be complete without a finish reason.
        for choice in sorted(self._open):
            self.finished += 1
            yield Finished(choice, "stop")
        yield self._done(now_s)

    def _done(self, now_s: float) -> Done:
        gaps_ms = [1e3 * (b - a) for a, b in zip(self._times, self._times[1:], strict=False)]
        if self._tokens() > _MAX_TOKENS_PER_CHUNK * len(self._times):
            gaps_ms = []
        timings = self._timings
        ttft_s = self._times[0] - self._arrived_s if self._times else None
        prefill = metrics.prefill_rate(timings.prompt_tokens, timings.cached_tokens, ttft_s or 0.0)
        return Done(
            usage=Usage(
                timings.prompt_tokens,
                timings.cached_tokens,
                self._tokens(),
                timings.reasoning_tokens,
            ),
            timings=Timings(
                load_s=timings.load_s,
                queue_s=timings.queue_s,
                ttft_s=ttft_s,
                prefill_tokens_per_s=timings.prefill_tokens_per_s or prefill,
                decode_tokens_per_s=self._rate(),
                tpot_ms_p50=metrics.percentile(gaps_ms, 0.5),
                tpot_ms_p95=metrics.percentile(gaps_ms, 0.95),
                tpot_ms_p99=metrics.percentile(gaps_ms, 0.99),
                total_s=now_s - self._arrived_s,
            ),
            kv_used_tokens=timings.kv_used_tokens,
            kv_total_tokens=timings.kv_total_tokens,
            speculation=timings.speculation,
            fingerprint=timings.fingerprint or self._fingerprint,
        )


def _end(choice: int, reason: str, stop: str) -> Finished:
    """Return the end of a choice. A server with a loop guard of its own names it as the stop reason."""
    if reason == "length" and stop == "repetition":
        return Finished(choice, "repetition")
    return Finished(choice, _REASONS.get(reason, "stop"), stop)


def _joined_text(value: object) -> str:
    """Return a text, or the joined texts of a list of parts."""
    if isinstance(value, list):
        parts = [part.get("text") for part in value if isinstance(part, dict)]
        value = "".join(part for part in parts if isinstance(part, str))
    # An escape of JSON may be half of an emoji.
    return sendable(value) if isinstance(value, str) else ""


def _logprobs(choice: dict[str, Any]) -> tuple[TokenLogprob, ...]:
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        return ()
    if isinstance(logprobs.get("tokens"), list):
        return _completion_logprobs(logprobs)
    entries = logprobs.get("content")
    if not isinstance(entries, list):
        return ()
    return tuple(
        _logprob(
            entry.get("token", ""),
            entry.get("logprob"),
            [(top.get("token", ""), top["logprob"]) for top in entry.get("top_logprobs") or ()],
        )
        for entry in entries
        if isinstance(entry, dict)
    )


def _completion_logprobs(fields: dict[str, Any]) -> tuple[TokenLogprob, ...]:
    """Return the log probabilities of a text completion, which has a list per field."""
    tokens = fields["tokens"]
    logprobs = fields.get("token_logprobs") or [None] * len(tokens)
    tops = fields.get("top_logprobs") or [None] * len(tokens)
    return tuple(
        _logprob(token, logprob, (top or {}).items())
        for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
    )


def _logprob(token: object, logprob: Any, top: Iterable[tuple[object, Any]]) -> TokenLogprob:  # noqa: ANN401
    return TokenLogprob(
        token=-1,
        text=str(token).encode("utf-8", "replace"),
        logprob=float(logprob or 0.0),
        top=tuple((-1, str(text).encode("utf-8", "replace"), float(value)) for text, value in top),
    )
