"""What an engine answers, in order: `Accepted` first, `Done` last, a failure as an exception of errors.py.

Consumed with `match`; times are seconds of one monotonic clock, counted from the arrival of the request.
"""

from typing import Literal, TypeAlias

import msgspec

FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


class TokenLogprob(msgspec.Struct, frozen=True, omit_defaults=True):
    """A token with its log probability (raw logits, natural log), and the best alternatives."""

    token: int
    text: bytes
    logprob: float
    top: tuple[tuple[int, bytes, float], ...] = ()


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The request is valid and fits. `max_tokens` is what may be generated, `seed` what is drawn with."""

    prompt_tokens: int
    max_tokens: int
    seed: int


class Queued(msgspec.Struct, frozen=True, tag="queued"):
    """Waits; `ahead` requests come before it."""

    ahead: int


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """The model is being read."""

    done_bytes: int
    total_bytes: int


class Prefill(msgspec.Struct, frozen=True, tag="prefill", omit_defaults=True):
    """The prompt is being computed: `done` of `total` tokens, `cached` of them came from the prefix cache.
    `why_missed`: one phrase, where the cache could have helped and did not."""

    done: int
    cached: int
    total: int
    why_missed: str = ""


class PromptLogprobs(msgspec.Struct, frozen=True, tag="prompt_logprobs"):
    """One entry per prompt token after the first; sent once, before the first text."""

    tokens: tuple[TokenLogprob, ...]


class Text(msgspec.Struct, frozen=True, tag="text", omit_defaults=True):
    """A piece of the answer: always whole code points."""

    choice: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class Reasoning(msgspec.Struct, frozen=True, tag="reasoning"):
    """A piece of what the model thinks before it answers."""

    choice: int
    text: str


class ToolCall(msgspec.Struct, frozen=True, tag="tool_call", omit_defaults=True):
    """A piece of a tool call: `name` with the first piece, `arguments` as JSON text in pieces."""

    choice: int
    call: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class MetricsSnapshot(msgspec.Struct, frozen=True, tag="figures", omit_defaults=True):
    """The engine's figures now; names, units and meaning stand in figures.py."""

    phase: Literal["queued", "loading", "prefill", "decode"]
    ttft_s: float | None = None
    decode_tokens_per_s: float | None = None
    completion_tokens: int = 0
    kv_used_tokens: int = 0
    kv_shared_tokens: int = 0
    kv_cached_tokens: int = 0
    kv_parked_tokens: int = 0
    kv_total_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    speculation_off: str = ""
    running: int = 0
    waiting: int = 0


class Finished(msgspec.Struct, frozen=True, tag="finished", omit_defaults=True):
    """One choice is complete. `stop`: the stop string that ended it, where one did."""

    choice: int
    reason: FinishReason
    stop: str = ""


class Usage(msgspec.Struct, frozen=True):
    """Tokens of the whole request, all choices together."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class Timings(msgspec.Struct, frozen=True):
    """Measured beside the engine; None where there was nothing to measure. Load is apart from TTFT."""

    load_s: float
    queue_s: float
    ttft_s: float | None
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    tpot_ms_p50: float | None
    tpot_ms_p95: float | None
    tpot_ms_p99: float | None
    total_s: float


class Speculation(msgspec.Struct, frozen=True, omit_defaults=True):
    """Drafted and accepted tokens; `speedup`: net gain against measured plain steps; `off`: why it is off."""

    drafted: int = 0
    accepted: int = 0
    speedup: float | None = None
    off: str = ""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The end of the request. `fingerprint`: hash of model file, template, quantization, KV type, versions."""

    usage: Usage
    timings: Timings
    kv_used_tokens: int
    kv_total_tokens: int
    speculation: Speculation
    fingerprint: str


class RunningRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request that the engine holds now. `user`: who asks, as its door names it; `age_s`: since it came."""

    phase: Literal["queued", "prefill", "decode"]
    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    age_s: float = 0.0
    user: str = ""


class EngineStats(msgspec.Struct, frozen=True, omit_defaults=True):
    """The engine as a whole: `now`, and counts since its load (figures.py has their sentences).

    failed: requests ended by an error, by its code. tpot_ms: of the last tokens told, oldest first, 512 at
    most. requests: what it holds now. late_rows: steps that still computed a request after the one in which
    its cancel arrived (0 is the promise). process_bytes: resident memory of the engine's process.
    """

    now: MetricsSnapshot
    finished: int = 0
    cancelled: int = 0
    failed: dict[str, int] = {}
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_steps: int = 0
    preemptions: int = 0
    evictions: int = 0
    late_rows: int = 0
    tpot_ms: tuple[float, ...] = ()
    requests: tuple[RunningRequest, ...] = ()
    process_bytes: int = 0


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
