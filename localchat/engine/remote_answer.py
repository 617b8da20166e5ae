"""One answer of a remote server: its chunks become events, and its times are measured as they arrive."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

from localchat import figures
from localchat.engine.events import (
    Done,
    Event,
    Figures,
    Finished,
    FinishReason,
    Reasoning,
    Speculation,
    Text,
    Timings,
    TokenLogprob,
    ToolCall,
    Usage,
)
from localchat.engine.remote_wire import error_of
from localchat.engine.request import GenerateRequest
from localchat.errors import NetworkError

_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "stop",
}


class RemoteAnswer:
    """Chunks in, events out. `arrived_s`: when the request came, by time.perf_counter."""

    def __init__(self, request: GenerateRequest, arrived_s: float) -> None:
        self.request = request
        self.complete = False
        self.finished = 0
        self._arrived_s = arrived_s
        self._times: list[float] = []
        self._usage: dict[str, Any] = {}
        self._open: set[int] = set(range(request.n))
        self._fingerprint = ""
        self._hang_up: Callable[[], None] | None = None

    @property
    def begun(self) -> bool:
        """Whether something of the answer has come."""
        return bool(self._times)

    def on_hang_up(self, close: Callable[[], None]) -> None:
        """What ends the connection."""
        self._hang_up = close

    def hang_up(self) -> None:
        """The reader has gone: the server sees the connection end."""
        if self._hang_up is not None:
            self._hang_up()

    def take(self, data: str, base: str) -> Iterator[Event]:
        """Events of one `data:` line. Raises NetworkError for an error that the server sends."""
        if data == "[DONE]":
            self.complete = True
            return
        try:
            chunk = json.loads(data)
        except ValueError as problem:
            raise NetworkError(f"{base} sent a chunk that is no JSON: {data[:80]!r}") from problem
        if not isinstance(chunk, dict):
            raise NetworkError(f"{base} sent a chunk that is no JSON object: {data[:80]!r}")
        if chunk.get("error"):
            raise error_of(chunk, base)
        if isinstance(chunk.get("usage"), dict):
            self._usage = chunk["usage"]
        self._fingerprint = str(chunk.get("system_fingerprint") or self._fingerprint)
        try:
            for choice in chunk.get("choices") or ():
                yield from self._choice(choice)
        except (AttributeError, KeyError, TypeError, ValueError) as problem:
            raise NetworkError(
                f"{base} sent a chunk of an odd shape ({type(problem).__name__}): {data[:80]!r}"
            ) from problem

    def _choice(self, choice: dict[str, Any]) -> Iterator[Event]:
        number = int(choice.get("index") or 0)
        delta = choice.get("delta")
        delta = delta if isinstance(delta, dict) else {"content": choice.get("text")}
        told: list[Event] = []
        if thought := delta.get("reasoning_content") or delta.get("reasoning"):
            told.append(Reasoning(number, str(thought)))
        if text := delta.get("content"):
            told.append(Text(number, str(text), _logprobs(choice)))
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            told.append(
                ToolCall(
                    number,
                    int(call.get("index") or 0),
                    str(call.get("id") or ""),
                    str(function.get("name") or ""),
                    str(function.get("arguments") or ""),
                )
            )
        if told:
            self._times.append(time.perf_counter())
        yield from told
        if choice.get("finish_reason") and number in self._open:
            self._open.discard(number)
            self.finished += 1
            stop = choice.get("stop_reason")
            yield Finished(
                number,
                _REASONS.get(str(choice["finish_reason"]), "stop"),
                stop if isinstance(stop, str) else "",
            )

    # ------------------------------------------------------------------------ figures

    def _tokens(self) -> int:
        found = self._usage.get("completion_tokens")
        return found if isinstance(found, int) else len(self._times)

    def _rate(self) -> float | None:
        if not self._times:
            return None
        return figures.decode_rate(self._tokens(), self._times[0], self._times[-1])

    def figures(self, running: int) -> Figures:
        """The figures now, as far as our edge sees them."""
        phase: Literal["prefill", "decode"] = "decode" if self._times else "prefill"
        return Figures(
            phase=phase,
            ttft_s=self._times[0] - self._arrived_s if self._times else None,
            decode_tokens_per_s=self._rate(),
            completion_tokens=self._tokens(),
            running=running,
        )

    def end(self, now_s: float) -> Iterator[Event]:
        """The last events. Raises NetworkError where the stream ended without saying how."""
        if self._open and not self.complete:
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
        details = self._usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else 0
        prompt = self._usage.get("prompt_tokens")
        tokens = prompt if isinstance(prompt, int) else 0
        ttft_s = self._times[0] - self._arrived_s if self._times else None
        cached = cached if isinstance(cached, int) else 0
        return Done(
            usage=Usage(tokens, cached, self._tokens()),
            timings=Timings(
                load_s=0.0,
                queue_s=0.0,
                ttft_s=ttft_s,
                prefill_tokens_per_s=figures.prefill_rate(tokens, cached, ttft_s)
                if ttft_s
                else None,
                decode_tokens_per_s=self._rate(),
                tpot_ms_p50=figures.percentile(gaps, 0.5),
                tpot_ms_p95=figures.percentile(gaps, 0.95),
                tpot_ms_p99=figures.percentile(gaps, 0.99),
                total_s=now_s - self._arrived_s,
            ),
            kv_used_tokens=tokens + self._tokens(),
            kv_total_tokens=0,
            speculation=Speculation(off="the server does not say"),
            fingerprint=self._fingerprint,
        )


def _logprobs(choice: dict[str, Any]) -> tuple[TokenLogprob, ...]:
    found = choice.get("logprobs")
    entries = found.get("content") if isinstance(found, dict) else None
    if not isinstance(entries, list):
        return ()
    return tuple(
        TokenLogprob(
            token=-1,
            text=str(one.get("token", "")).encode("utf-8", "replace"),
            logprob=float(one.get("logprob") or 0.0),
            top=tuple(
                (-1, str(top.get("token", "")).encode("utf-8", "replace"), float(top["logprob"]))
                for top in one.get("top_logprobs") or ()
            ),
        )
        for one in entries
        if isinstance(one, dict)
    )
