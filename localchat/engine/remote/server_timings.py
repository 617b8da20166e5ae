"""Timings that a remote server reports with an answer: usage, and metrics of llama-server and localchat.

Unreported values stay unknown.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

from localchat import metrics
from localchat.engine.events import Speculation

_NOT_REPORTED: Final = Speculation(off=metrics.NOT_REPORTED)


@dataclass(frozen=True, slots=True)
class ServerTimings:
    """Values that the server measured. Unreported values are zero, None or empty."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    load_s: float = 0.0
    queue_s: float = 0.0
    prefill_tokens_per_s: float | None = None
    kv_used_tokens: int = 0
    kv_total_tokens: int = 0
    speculation: Speculation = _NOT_REPORTED
    fingerprint: str = ""

    def updated(self, chunk: dict[str, Any]) -> "ServerTimings":
        """Return the timings with the values of a chunk."""
        timings = self
        if isinstance(reported := chunk.get("timings"), dict):
            if "ttft_s" in reported or "prompt_n" not in reported:
                timings = _from_localchat(timings, reported)
            else:
                timings = _from_llamacpp(timings, reported)
        if isinstance(usage := chunk.get("usage"), dict):
            timings = _usage(timings, usage)
        return timings


def count(value: object) -> int:
    """Return a positive integer, 0 for other values."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    return 0


def _time(value: object) -> float | None:
    """Return a time in seconds or a rate, None for other values."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and 0 <= value < 1e12 else None  # type: ignore[arg-type, operator]


def _usage(timings: ServerTimings, usage: dict[str, Any]) -> ServerTimings:
    prompt = count(usage.get("prompt_tokens")) or timings.prompt_tokens
    cached = _detail(usage.get("prompt_tokens_details"), "cached_tokens")
    completion = count(usage.get("completion_tokens")) or timings.completion_tokens
    reasoning = _detail(usage.get("completion_tokens_details"), "reasoning_tokens")
    return replace(
        timings,
        prompt_tokens=prompt,
        cached_tokens=min(cached or timings.cached_tokens, prompt),
        completion_tokens=completion,
        reasoning_tokens=min(reasoning or timings.reasoning_tokens, completion),
    )


def _detail(details: object, name: str) -> int:
    """Return a count of a usage's details, 0 without it."""
    if isinstance(details, dict):
        return count(details.get(name))
    return 0


def _from_llamacpp(timings: ServerTimings, reported: dict[str, Any]) -> ServerTimings:
    cached = count(reported.get("cache_n"))
    drafted = count(reported.get("draft_n"))
    off = "" if "draft_n" in reported else metrics.NOT_REPORTED
    return replace(
        timings,
        prompt_tokens=timings.prompt_tokens or cached + count(reported.get("prompt_n")),
        cached_tokens=timings.cached_tokens or cached,
        completion_tokens=timings.completion_tokens or count(reported.get("predicted_n")),
        prefill_tokens_per_s=_time(reported.get("prompt_per_second")) or None,
        speculation=Speculation(drafted, count(reported.get("draft_n_accepted")), off=off),
    )


def _from_localchat(timings: ServerTimings, reported: dict[str, Any]) -> ServerTimings:
    off = reported.get("speculation_off")
    is_reported = "drafted" in reported
    return replace(
        timings,
        load_s=_time(reported.get("load_s")) or 0.0,
        queue_s=_time(reported.get("queue_s")) or 0.0,
        prefill_tokens_per_s=_time(reported.get("prefill_tokens_per_s")),
        kv_used_tokens=count(reported.get("kv_used_tokens")),
        kv_total_tokens=count(reported.get("kv_total_tokens")),
        speculation=Speculation(
            count(reported.get("drafted")),
            count(reported.get("accepted")),
            _time(reported.get("speedup")),
            (off if isinstance(off, str) else "") if is_reported else metrics.NOT_REPORTED,
        ),
        fingerprint=str(reported.get("fingerprint") or ""),
    )
