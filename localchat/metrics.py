"""Table of all metrics that localchat shows (name, unit, kind, one sentence), and how they are computed.

The terminal, `--stats`, `--json`, `/metrics`, the documentation and the guide's facts all read this table.
`units.py` formats the values. Nothing of localchat is imported.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Final, Literal, NamedTuple

Kind = Literal["gauge", "counter", "histogram", "text"]


class Metric(NamedTuple):
    """One metric."""

    name: str
    unit: str
    """Empty for plain counts and text; a `share` runs from 0 to 1."""
    kind: Kind
    about: str


_TABLE: Final = (
    Metric("load_s", "s", "gauge", "Time to read the model and warm up; apart from TTFT."),
    Metric("load_done_bytes", "B", "gauge", "Bytes of the model read so far."),
    Metric("load_total_bytes", "B", "gauge", "Bytes of the model in all."),
    Metric("queue_s", "s", "histogram", "Time a request waited for its turn."),
    Metric(
        "ttft_s",
        "s",
        "histogram",
        "Time to first token: from the request's arrival at a loaded engine to its first visible or "
        "reasoning token, waiting included.",
    ),
    Metric("total_s", "s", "histogram", "From the request's arrival to its last token."),
    Metric(
        "tpot_ms",
        "ms",
        "histogram",
        "Time per output token; a step that accepted drafts is shared among its tokens.",
    ),
    Metric("tpot_ms_p50", "ms", "gauge", "Half of the output tokens took at most this long."),
    Metric("tpot_ms_p95", "ms", "gauge", "95 of 100 output tokens took at most this long."),
    Metric("tpot_ms_p99", "ms", "gauge", "99 of 100 output tokens took at most this long."),
    Metric(
        "decode_tokens_per_s",
        "tok/s",
        "gauge",
        "Decode rate: tokens after the first, over the time from the first to the last.",
    ),
    Metric(
        "prefill_tokens_per_s",
        "tok/s",
        "gauge",
        "Prefill rate: prompt tokens computed, cached ones not counted, over the time it took.",
    ),
    Metric("prefill_done_tokens", "tok", "gauge", "Prompt tokens ready, cached ones included."),
    Metric("prefill_total_tokens", "tok", "gauge", "Prompt tokens in all."),
    Metric("prompt_tokens", "tok", "counter", "Tokens of the prompt."),
    Metric("cached_tokens", "tok", "counter", "Prompt tokens that came from the prefix cache."),
    Metric("why_missed", "", "text", "Why the prefix cache helped less than it could have."),
    Metric("completion_tokens", "tok", "counter", "Tokens generated, all choices together."),
    Metric("reasoning_tokens", "tok", "counter", "Generated tokens that are reasoning."),
    Metric("context_tokens", "tok", "gauge", "The longest conversation that this engine can hold."),
    Metric("kv_used_tokens", "tok", "gauge", "KV cache that running requests hold."),
    Metric("kv_shared_tokens", "tok", "gauge", "Part of the used KV that several requests share."),
    Metric("kv_cached_tokens", "tok", "gauge", "KV kept for a prefix that may come again."),
    Metric("kv_parked_tokens", "tok", "gauge", "KV put aside in RAM, outside the cache."),
    Metric("kv_total_tokens", "tok", "gauge", "Room for KV, in tokens."),
    Metric("evictions", "", "counter", "Cached prefixes lost to make room."),
    Metric(
        "preemptions",
        "",
        "counter",
        "Running requests set back and computed again because KV ran out.",
    ),
    Metric("drafted", "tok", "counter", "Tokens guessed ahead by speculation."),
    Metric(
        "accepted", "tok", "counter", "Guessed tokens that were right, and so came for nothing."
    ),
    Metric("acceptance", "share", "gauge", "Accepted drafts of all drafts."),
    Metric("accepted_length", "tok", "gauge", "Tokens that an average drafting step accepted."),
    Metric(
        "speedup",
        "times",
        "gauge",
        "Net gain of speculation against plain steps measured in the same request; 1 is none.",
    ),
    Metric("speculation_off", "", "text", "Why speculation is off."),
    Metric(
        "fingerprint",
        "",
        "text",
        "Names what decides a text besides the request: model file, template, quantization, KV type, "
        "library versions.",
    ),
    Metric("running", "", "gauge", "Requests that take part in the steps now."),
    Metric("waiting", "", "gauge", "Requests in the queue."),
    Metric("cancelled", "", "counter", "Requests that their reader gave up."),
    Metric("threads", "", "gauge", "Threads that compute."),
    Metric("gpu_layers", "", "gauge", "Layers of the model computed on the GPU."),
    Metric("weights_bytes", "B", "gauge", "Memory of the weights."),
    Metric("kv_bytes", "B", "gauge", "Memory of the KV cache."),
    Metric("compute_bytes", "B", "gauge", "Memory of the compute buffers."),
    Metric("overhead_bytes", "B", "gauge", "Memory of the runtime and its libraries."),
    Metric("predicted_bytes", "B", "gauge", "Memory that was planned before the load."),
    Metric("actual_bytes", "B", "gauge", "Memory that the loaded engine takes."),
    Metric("others_bytes", "B", "gauge", "Memory that other processes hold."),
    Metric("free_bytes", "B", "gauge", "Memory free now."),
)

NOT_REPORTED: Final = "the server does not say"
"""Value of `Speculation.off` where a remote server reports nothing about drafts."""

METRICS: Final[Mapping[str, Metric]] = {metric.name: metric for metric in _TABLE}


def percentile(values: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile, always a measured value; None of nothing. share: from 0 to 1."""
    if not values:
        return None
    ranked = sorted(values)
    rank = ceil(share * len(ranked))
    return ranked[min(len(ranked), max(1, rank)) - 1]


def decode_rate(tokens: int, first_s: float, last_s: float) -> float | None:
    """Tokens a second after the first one, whose time is prefill's. None for fewer than two tokens."""
    if tokens > 1 and last_s > first_s:
        return (tokens - 1) / (last_s - first_s)
    return None


def prefill_rate(prompt_tokens: int, cached_tokens: int, elapsed_s: float) -> float | None:
    """Computed prompt tokens a second; None where nothing was computed or no time passed."""
    computed = prompt_tokens - cached_tokens
    if computed > 0 and elapsed_s > 0:
        return computed / elapsed_s
    return None


def shared_tpot_ms(elapsed_s: float, tokens: int) -> list[float]:
    """The time of a step, shared equally among its tokens: one entry for each."""
    return [elapsed_s * 1000 / tokens] * tokens


def acceptance(drafted: int, accepted: int) -> float | None:
    """Accepted share of the drafted tokens; None without drafts."""
    return accepted / drafted if drafted else None


def speedup(tokens: int, elapsed_s: float, plain_step_s: float) -> float | None:
    """Time that `tokens` would take in plain steps, over the time they took; None where it is unknown."""
    if elapsed_s > 0 and plain_step_s > 0:
        return tokens * plain_step_s / elapsed_s
    return None
