"""The line of metrics below an answer."""

from typing import Final

from localchat.engine.events import Done
from localchat.units import brief_seconds, decimal, used_of

_MIN_LOAD_S: Final = 0.1
"""Shorter loads are not shown."""


def stats_line(done: Done) -> str:
    """Format the reported metrics: load, TTFT, decode rate, KV cache, drafts, tokens loaded from disk."""
    timings = done.timings
    drafts = done.speculation
    parts: list[str] = []
    # TTFT excludes the load, but the user waited for it too.
    if timings.load_s >= _MIN_LOAD_S:
        parts.append(f"load {decimal(timings.load_s, 2)} s")
    parts.append(brief_stats_line(done))
    if done.kv_used_tokens or done.kv_total_tokens:
        parts.append(f"KV {used_of(done.kv_used_tokens, done.kv_total_tokens)}")
    if drafts.drafted:
        parts.append(f"drafts {drafts.accepted:,}/{drafts.drafted:,}")
    if done.read_back_tokens:
        parts.append(read_back(done.read_back_tokens, done.usage.prompt_tokens, done.read_back_s))
    return " · ".join(parts)


def brief_stats_line(done: Done) -> str:
    """Format TTFT and decode rate, as the screen shows them below an answer."""
    timings = done.timings
    speed = f"{decimal(timings.decode_tokens_per_s, 1)} tok/s"
    if timings.ttft_s is None:
        # An answer of tool calls has no text.
        return speed
    return f"TTFT {decimal(timings.ttft_s, 2)} s · {speed}"


def read_back(loaded: int, prompt: int, elapsed_s: float) -> str:
    """Return `19,412 of 20,100 tokens read back, 0.4 s`."""
    return f"{loaded:,} of {prompt:,} tokens read back, {brief_seconds(elapsed_s)}"
