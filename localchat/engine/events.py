"""Events of a request. `Accepted` is first and `Done` is last. A failure is an exception of errors.py.

Consumers use `match`. Times are in seconds since the arrival of the request, on one monotonic clock.
"""

from typing import Literal, TypeAlias

import msgspec

from localchat.engine.repetition import Repetition

FinishReason = Literal["stop", "length", "repetition", "tool_calls", "cancelled"]
Limit = Literal["", "max_tokens", "default", "context"]
"""Limit that ended an answer: the request's own, the engine's default, or a full context."""


class TokenLogprob(msgspec.Struct, frozen=True, omit_defaults=True):
    """A token with its log probability (raw logits, natural log)."""

    token: int
    text: bytes
    logprob: float
    top: tuple[tuple[int, bytes, float], ...] = ()
    """Most probable alternatives."""


class Accepted(msgspec.Struct, frozen=True, tag="accepted", omit_defaults=True):
    """The request is valid and fits."""

    prompt_tokens: int
    max_tokens: int
    """Maximum number of generated tokens."""
    seed: int
    """Seed of the sampling."""
    relaxed: tuple[str, ...] = ()
    """JSON schema keywords that the grammar cannot enforce."""


class Queued(msgspec.Struct, frozen=True, tag="queued"):
    """The request waits."""

    ahead: int
    """Number of requests before it."""


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """The model is being loaded."""

    done_bytes: int
    total_bytes: int


class Prefill(msgspec.Struct, frozen=True, tag="prefill", omit_defaults=True):
    """The prompt is being computed."""

    done: int
    """Computed prompt tokens, including cached ones."""
    cached: int
    """Tokens from the prefix cache."""
    total: int
    why_missed: str = ""
    """Reason why the cache did not help, as a phrase."""
    read_back: int = 0
    """Cached tokens that were loaded from disk."""
    read_s: float = 0.0
    """Time to load them."""


class PromptLogprobs(msgspec.Struct, frozen=True, tag="prompt_logprobs"):
    """Log probabilities of the prompt tokens after the first. Sent once, before any text."""

    tokens: tuple[TokenLogprob, ...]


class Text(msgspec.Struct, frozen=True, tag="text", omit_defaults=True):
    """A piece of the answer, which consists of complete code points."""

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
    """Piece of the JSON text."""


class MetricsSnapshot(msgspec.Struct, frozen=True, tag="figures", omit_defaults=True):
    """Current metrics of the engine. metrics.py explains names, units and meaning."""

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
    """A choice is complete."""

    choice: int
    reason: FinishReason
    stop: str = ""
    """Stop string that ended it, if any."""
    limit: Limit = ""
    """Limit that ended or shortened it, if the reason is `length`."""
    repetition: Repetition | None = None
    """Repeated text, if the reason is `repetition`."""


class Usage(msgspec.Struct, frozen=True):
    """Token counts of the whole request, for all choices together."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    """Completion tokens of reasoning, including the closing tag."""


class Timings(msgspec.Struct, frozen=True):
    """Times of a request, measured at the engine. None if there was nothing to measure."""

    load_s: float
    """Time to load the model, which is not part of TTFT."""
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
    """Draft tokens."""
    accepted: int = 0
    """Accepted draft tokens."""
    speedup: float | None = None
    """Net gain over measured steps without drafts."""
    off: str = ""
    """Reason why it is off."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The end of the request."""

    usage: Usage
    timings: Timings
    kv_used_tokens: int
    kv_total_tokens: int
    speculation: Speculation
    fingerprint: str
    """Hash of the model file, template, quantization, KV type and versions."""
    read_back_tokens: int = 0
    """Cached prompt tokens that were loaded from disk."""
    read_back_s: float = 0.0
    """Time to load them."""
    why_missed: str = ""
    """Reason why the prefix cache did not help more."""


class RunningRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request in the engine."""

    phase: Literal["queued", "prefill", "decode"]
    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    age_s: float = 0.0
    """Time since its arrival."""
    user: str = ""
    """Name of the client, from the front end."""


class EngineStats(msgspec.Struct, frozen=True, omit_defaults=True):
    """Current metrics of the engine, and counts since its load (metrics.py explains them).

    Size: each field is a figure of the panel and of Prometheus.
    """

    now: MetricsSnapshot
    finished: int = 0
    cancelled: int = 0
    failed: dict[str, int] = {}
    """Failed requests by error code."""
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
    """Times of the last 512 tokens, oldest first."""
    requests: tuple[RunningRequest, ...] = ()
    """Current requests."""
    process_bytes: int = 0
    """Resident memory of the engine process."""


Event: TypeAlias = (
    Accepted
    | Queued
    | Loading
    | Prefill
    | PromptLogprobs
    | Text
    | Reasoning
    | ToolCall
    | MetricsSnapshot
    | Finished
    | Done
)
