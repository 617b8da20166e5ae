"""Timings of an answer, under llama.cpp's names and our own."""

from typing import Any

import msgspec

from localchat.engine.events import Done, Usage


def answer_timings(usage: Usage, done: Done | None, *, own: bool = False) -> dict[str, Any] | None:
    """Return the timings of a complete answer, None without measurements of the engine.

    own: add the metrics of the request, by their names in localchat/metrics.py.
    """
    if done is None:
        return None
    prompt_rate = done.timings.prefill_tokens_per_s or 0.0
    decode_rate = done.timings.decode_tokens_per_s or 0.0
    prompt_tokens = usage.prompt_tokens - usage.cached_tokens
    timings = llamacpp_timings(
        usage,
        1e3 * prompt_tokens / prompt_rate if prompt_rate else 0.0,
        1e3 * usage.completion_tokens / decode_rate if decode_rate else 0.0,
    )
    if done.speculation.drafted:
        timings["draft_n"] = done.speculation.drafted
        timings["draft_n_accepted"] = done.speculation.accepted
    if done.why_missed:
        timings["why_missed"] = done.why_missed
    if own:
        timings |= _own_timings(done)
    return timings


def llamacpp_timings(usage: Usage, prompt_ms: float, predicted_ms: float) -> dict[str, Any]:
    """Return times in milliseconds and rates under llama.cpp's names."""
    prompt_tokens = usage.prompt_tokens - usage.cached_tokens
    return {
        "cache_n": usage.cached_tokens,
        "prompt_n": prompt_tokens,
        **_rates("prompt", prompt_tokens, prompt_ms),
        "predicted_n": usage.completion_tokens,
        **_rates("predicted", usage.completion_tokens, predicted_ms),
    }


def _own_timings(done: Done) -> dict[str, Any]:
    timings: dict[str, Any] = msgspec.structs.asdict(done.timings)
    timings |= {
        "kv_used_tokens": done.kv_used_tokens,
        "kv_total_tokens": done.kv_total_tokens,
        "drafted": done.speculation.drafted,
        "accepted": done.speculation.accepted,
        "speedup": done.speculation.speedup,
        "speculation_off": done.speculation.off,
        "why_missed": done.why_missed,
        "fingerprint": done.fingerprint,
    }
    return timings


def _rates(phase: str, tokens: int, elapsed_ms: float) -> dict[str, float]:
    return {
        f"{phase}_ms": elapsed_ms,
        f"{phase}_per_token_ms": elapsed_ms / tokens if tokens else 0.0,
        f"{phase}_per_second": 1e3 * tokens / elapsed_ms if elapsed_ms > 0 else 0.0,
    }
