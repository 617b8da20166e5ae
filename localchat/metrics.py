"""Table of all metrics that localchat reports, and the formulas behind them.

The screen, `--stats`, `--json`, `/metrics`, the help and the glossary read this table. `units.py` formats
the values. The module imports nothing of localchat.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Final, Literal, NamedTuple

Kind = Literal["gauge", "counter", "histogram", "text"]


class Metric(NamedTuple):
    """A metric and its explanation."""

    name: str
    unit: str
    """Empty for counts and text. A `share` runs from 0 to 1."""
    kind: Kind
    about: str
    """One sentence: the panel, the help and docs/glossary.md show it."""
    label: str = ""
    """Label in the panel. Empty if the panel does not show the metric."""


_TABLE: Final = (
    Metric("load_s", "s", "gauge", "Time to load and warm up the model. Not part of TTFT."),
    Metric("load_done_bytes", "B", "gauge", "Bytes of the model loaded so far."),
    Metric("load_total_bytes", "B", "gauge", "Size of the model in bytes."),
    Metric("queue_s", "s", "histogram", "Time a request waited in the queue."),
    Metric(
        "ttft_s",
        "s",
        "histogram",
        "Time to first token: from the arrival of a request at a loaded engine to its first visible or "
        "reasoning token, queue time included.",
        "TTFT",
    ),
    Metric("total_s", "s", "histogram", "Time from the arrival of a request to its last token."),
    Metric(
        "tpot_ms",
        "ms",
        "histogram",
        "Time per output token after the first. A step that accepted drafts is shared among its tokens.",
        "TPOT",
    ),
    Metric("tpot_ms_p50", "ms", "gauge", "Median time per output token.", "TPOT p50"),
    Metric(
        "tpot_ms_p95", "ms", "gauge", "95 of 100 output tokens took at most this long.", "TPOT p95"
    ),
    Metric(
        "tpot_ms_p99", "ms", "gauge", "99 of 100 output tokens took at most this long.", "TPOT p99"
    ),
    Metric(
        "decode_tokens_per_s",
        "tok/s",
        "gauge",
        "Decode rate: tokens after the first, divided by the time from the first to the last.",
        "decode",
    ),
    Metric(
        "prefill_tokens_per_s",
        "tok/s",
        "gauge",
        "Prefill rate: computed prompt tokens, without cached ones, divided by the time of the prefill.",
        "prefill",
    ),
    Metric(
        "prefill_done_tokens",
        "tok",
        "gauge",
        "Prompt tokens ready so far, cached ones included.",
        "prefill done",
    ),
    Metric("prefill_total_tokens", "tok", "gauge", "Prompt tokens in all."),
    Metric("prompt_tokens", "tok", "counter", "Prompt tokens."),
    Metric(
        "cached_tokens",
        "tok",
        "counter",
        "Prompt tokens reused from the prefix cache.",
        "prefix cache",
    ),
    Metric("why_missed", "", "text", "Why the prefix cache reused less than it could have."),
    Metric("completion_tokens", "tok", "counter", "Generated tokens of all choices."),
    Metric("reasoning_tokens", "tok", "counter", "Generated tokens that are reasoning."),
    Metric(
        "context_tokens",
        "tok",
        "gauge",
        "Longest conversation that this engine can process.",
        "context",
    ),
    Metric("kv_used_tokens", "tok", "gauge", "KV cache that running requests use.", "used"),
    Metric(
        "kv_shared_tokens",
        "tok",
        "gauge",
        "Part of the used KV cache that several requests share.",
        "shared",
    ),
    Metric(
        "kv_cached_tokens",
        "tok",
        "gauge",
        "KV cache of earlier prompts, kept for a prefix that returns.",
        "cached",
    ),
    Metric(
        "kv_swapped_tokens",
        "tok",
        "gauge",
        "KV swapped to RAM, outside the cache.",
        "swapped to RAM",
    ),
    Metric("kv_total_tokens", "tok", "gauge", "Size of the KV cache in tokens.", "KV cache"),
    Metric("evictions", "", "counter", "Cached prefixes evicted to make room.", "evictions"),
    Metric(
        "preemptions",
        "",
        "counter",
        "Running requests that were preempted and computed again, mostly because the KV cache was full.",
    ),
    Metric("drafted", "tok", "counter", "Draft tokens proposed by speculative decoding."),
    Metric("accepted", "tok", "counter", "Draft tokens that the model accepted."),
    Metric(
        "acceptance",
        "share",
        "gauge",
        "Draft acceptance: accepted draft tokens as a share of the proposed ones.",
        "accepted",
    ),
    Metric(
        "accepted_length",
        "tok",
        "gauge",
        "Draft tokens that a step with drafts accepts on average.",
        "mean accepted",
    ),
    Metric(
        "speedup",
        "times",
        "gauge",
        "Speedup of speculative decoding over plain steps of the same request. 1 means none.",
        "speedup",
    ),
    Metric("speculation_off", "", "text", "Why speculative decoding is off."),
    Metric(
        "fingerprint",
        "",
        "text",
        "Identifies what determines a text besides the request: model file, template, quantization, KV type "
        "and library versions.",
        "model",
    ),
    Metric("running", "", "gauge", "Requests that the engine computes now.", "running"),
    Metric("waiting", "", "gauge", "Requests in the queue.", "waiting"),
    Metric("cancelled", "", "counter", "Requests cancelled because the client disconnected."),
    Metric("threads", "", "gauge", "Compute threads.", "threads"),
    Metric("gpu_layers", "", "gauge", "Layers computed on the GPU.", "layers on the GPU"),
    Metric("weights_bytes", "B", "gauge", "Memory of the weights.", "weights"),
    Metric("kv_bytes", "B", "gauge", "Memory of the KV cache.", "KV"),
    Metric("compute_bytes", "B", "gauge", "Memory of the compute buffers.", "compute"),
    Metric("overhead_bytes", "B", "gauge", "Memory of the runtime and its libraries.", "overhead"),
    Metric(
        "predicted_bytes",
        "B",
        "gauge",
        "Memory that the plan predicted before the load.",
        "planned",
    ),
    Metric("actual_bytes", "B", "gauge", "Memory that the loaded engine uses.", "actual"),
    Metric("others_bytes", "B", "gauge", "Memory that other processes use."),
    Metric("free_bytes", "B", "gauge", "Free memory.", "free"),
)

NOT_REPORTED: Final = "the server does not report drafts"
"""`Speculation.off` of a remote server that reports nothing about drafts."""

METRICS: Final[Mapping[str, Metric]] = {metric.name: metric for metric in _TABLE}

SHOWN: Final = tuple(metric for metric in _TABLE if metric.label)
"""Metrics of the panel, which the help and the glossary explain too."""


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the nearest-rank percentile, which is always one of the values. None if there are no values.

    `share` runs from 0 to 1.
    """
    if not values:
        return None
    ranked = sorted(values)
    rank = ceil(share * len(ranked))
    return ranked[min(len(ranked), max(1, rank)) - 1]


def decode_rate(tokens: int, first_s: float, last_s: float) -> float | None:
    """Return tokens per second after the first token, which belongs to the prefill. None below two tokens."""
    if tokens > 1 and last_s > first_s:
        return (tokens - 1) / (last_s - first_s)
    return None


def prefill_rate(prompt_tokens: int, cached_tokens: int, elapsed_s: float) -> float | None:
    """Return computed prompt tokens per second. None if nothing was computed or no time passed."""
    computed = prompt_tokens - cached_tokens
    if computed > 0 and elapsed_s > 0:
        return computed / elapsed_s
    return None


def shared_tpot_ms(elapsed_s: float, tokens: int) -> list[float]:
    """Divide the time of a step equally among its tokens, one entry per token."""
    return [elapsed_s * 1000 / tokens] * tokens


def acceptance(drafted: int, accepted: int) -> float | None:
    """Return the accepted share of the draft tokens. None without drafts."""
    return accepted / drafted if drafted else None


def speedup(tokens: int, elapsed_s: float, plain_step_s: float) -> float | None:
    """Return the time of `tokens` plain steps divided by the elapsed time. None if either is unknown."""
    if elapsed_s > 0 and plain_step_s > 0:
        return tokens * plain_step_s / elapsed_s
    return None
