"""Events of a request, in order: `Accepted` first, `Done` last; a failure is an exception of errors.py.

Consumers use `match`. Times are seconds of one monotonic clock, counted from the arrival of the request.
"""

from typing import Literal, TypeAlias

import msgspec

from localchat.engine.repetition import Repetition

FinishReason = Literal["stop", "length", "repetition", "tool_calls", "cancelled"]
Limit = Literal["", "max_tokens", "default", "context"]
"""What ended an answer: the request's own limit, the engine's default one, or a full context."""


class TokenLogprob(msgspec.Struct, frozen=True, omit_defaults=True):
    """A token with its log probability (raw logits, natural log)."""

    token: int
    text: bytes
    logprob: float
    top: tuple[tuple[int, bytes, float], ...] = ()
    """The likeliest alternatives."""


class Accepted(msgspec.Struct, frozen=True, tag="accepted", omit_defaults=True):
    """The request is valid and fits."""

    prompt_tokens: int
    max_tokens: int
    """Most tokens that may be generated."""
    seed: int
    """Seed that the tokens are drawn with."""
    relaxed: tuple[str, ...] = ()
    """Keywords of its JSON schemas that the grammar does not hold the answer to."""


class Queued(msgspec.Struct, frozen=True, tag="queued"):
    """The request waits."""

    ahead: int
    """Requests before it."""


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """The model is being loaded."""

    done_bytes: int
    total_bytes: int


class Prefill(msgspec.Struct, frozen=True, tag="prefill", omit_defaults=True):
    """The prompt is being computed."""

    done: int
    """Prompt tokens ready, cached ones included."""
    cached: int
    """Tokens that came from the prefix cache."""
    total: int
    why_missed: str = ""
    """One phrase, where the cache could have helped and did not."""
    read_back: int = 0
    """Of the cached tokens those that were read from the disk."""
    read_s: float = 0.0
    """Time that this took."""


class AnswerProgress(msgspec.Struct, frozen=True, tag="progress"):
    """Progress of an answer that takes several requests, such as a vote."""

    phrase: str
    """Text of a progress line."""


class PromptLogprobs(msgspec.Struct, frozen=True, tag="prompt_logprobs"):
    """One entry for each prompt token after the first; sent once, before the first text."""

    tokens: tuple[TokenLogprob, ...]


class Text(msgspec.Struct, frozen=True, tag="text", omit_defaults=True):
    """A piece of the answer: always whole code points."""

    choice: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class Reasoning(msgspec.Struct, frozen=True, tag="reasoning"):
    """A piece of the model's reasoning."""

    choice: int
    text: str


class ToolCall(msgspec.Struct, frozen=True, tag="tool_call", omit_defaults=True):
    """A piece of a tool call."""

    choice: int
    call: int
    id: str = ""
    name: str = ""
    """Set in the first piece."""
    arguments: str = ""
    """JSON text in pieces."""


class MetricsSnapshot(msgspec.Struct, frozen=True, tag="figures", omit_defaults=True):
    """The engine's metrics now; names, units and meaning stand in metrics.py."""

    phase: Literal["queued", "loading", "prefill", "decode"]
    ttft_s: float | None = None
    decode_tokens_per_s: float | None = None
    completion_tokens: int = 0
    kv_used_tokens: int = 0
    kv_shared_tokens: int = 0
    kv_cached_tokens: int = 0
    kv_swapped_tokens: int = 0
    kv_total_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    speculation_off: str = ""
    running: int = 0
    waiting: int = 0


class Finished(msgspec.Struct, frozen=True, tag="finished", omit_defaults=True):
    """One choice is complete."""

    choice: int
    reason: FinishReason
    stop: str = ""
    """The stop string that ended it, where one did."""
    limit: Limit = ""
    """Which limit ended or shortened it, where the reason is `length`."""
    repetition: Repetition | None = None
    """What it repeated, where the reason is `repetition`."""


class Usage(msgspec.Struct, frozen=True):
    """Tokens of the whole request, all choices together."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    """Of the completion tokens those of reasoning, with the tag that ends it."""


class Timings(msgspec.Struct, frozen=True):
    """Times of a request, measured at the engine; None where there was nothing to measure."""

    load_s: float
    """Not part of TTFT."""
    queue_s: float
    ttft_s: float | None
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    tpot_ms_p50: float | None
    tpot_ms_p95: float | None
    tpot_ms_p99: float | None
    total_s: float


class Speculation(msgspec.Struct, frozen=True, omit_defaults=True):
    """Results of speculative decoding."""

    drafted: int = 0
    """Tokens drafted."""
    accepted: int = 0
    """Drafted tokens that were accepted."""
    speedup: float | None = None
    """Net gain against measured plain steps."""
    off: str = ""
    """Why it is off."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The end of the request."""

    usage: Usage
    timings: Timings
    kv_used_tokens: int
    kv_total_tokens: int
    speculation: Speculation
    fingerprint: str
    """Hash of model file, template, quantization, KV type and versions."""
    read_back_tokens: int = 0
    """Of the cached tokens of the prompt those that were read from the disk."""
    read_back_s: float = 0.0
    """Time that this took."""
    why_missed: str = ""
    """Why the prefix cache helped less than it could have."""


class RunningRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request that the engine holds now."""

    phase: Literal["queued", "prefill", "decode"]
    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    age_s: float = 0.0
    """Time since it arrived."""
    user: str = ""
    """Who asks, as the front end names them."""


class EngineStats(msgspec.Struct, frozen=True, omit_defaults=True):
    """The engine as a whole: metrics now, and counts since its load (metrics.py explains them)."""

    now: MetricsSnapshot
    finished: int = 0
    cancelled: int = 0
    failed: dict[str, int] = {}
    """Requests that ended with an error, by its code."""
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_steps: int = 0
    preemptions: int = 0
    evictions: int = 0
    tpot_ms: tuple[float, ...] = ()
    """Of the last tokens generated, oldest first, 512 at most."""
    requests: tuple[RunningRequest, ...] = ()
    """Requests that it holds now."""
    process_bytes: int = 0
    """Resident memory of the engine process."""
    routed: dict[str, int] = {}
    """Of a route: answers and tokens of the small and the large model (tries/route_engine.py)."""


Event: TypeAlias = (
    Accepted
    | Queued
    | Loading
    | Prefill
    | AnswerProgress
    | PromptLogprobs
    | Text
    | Reasoning
    | ToolCall
    | MetricsSnapshot
    | Finished
    | Done
)
