"""The line of metrics after an answer: in the terms of the field, as `--stats` prints it, or in plain words."""

from typing import Final

from localchat.engine.events import Done
from localchat.units import brief_seconds, decimal, percent, used_of

_SHOWN_LOAD_S: Final = 0.1
_MIN_TOKENS: Final = 8
"""Fewer tokens say nothing about words per second."""


def stats_line(done: Done) -> str:
    """Load, TTFT, decode rate, KV cache, accepted of drafted tokens; without what was not reported."""
    timings = done.timings
    drafts = done.speculation
    # TTFT leaves out the load, for which the user has waited too.
    parts = [f"load {decimal(timings.load_s, 2)} s"] if timings.load_s >= _SHOWN_LOAD_S else []
    parts += [
        f"TTFT {decimal(timings.ttft_s, 2)} s",
        f"{decimal(timings.decode_tokens_per_s, 1)} tok/s",
    ]
    if done.kv_used_tokens or done.kv_total_tokens:
        parts.append(f"KV {used_of(done.kv_used_tokens, done.kv_total_tokens)}")
    if drafts.drafted:
        parts.append(f"drafts {drafts.accepted:,}/{drafts.drafted:,}")
    if done.read_back_tokens:
        parts.append(read_back(done.read_back_tokens, done.usage.prompt_tokens, done.read_back_s))
    return " · ".join(parts)


def brief_stats_line(done: Done) -> str:
    """TTFT and decode rate, as the screen shows them below an answer. The panel has the rest."""
    timings = done.timings
    ttft = decimal(timings.ttft_s, 2)
    speed = decimal(timings.decode_tokens_per_s, 1)
    return f"TTFT {ttft} s · {speed} tok/s"


def plain_stats_line(done: Done, words: int) -> str:
    """The same in plain words. `words`: of the answer and its reasoning."""
    timings = done.timings
    rate = timings.decode_tokens_per_s
    count = done.usage.completion_tokens
    parts = [
        plain_ttft(timings.ttft_s) if timings.ttft_s is not None else "",
        plain_rate(rate, words, count),
    ]
    return " · ".join(filter(None, parts))


def read_back(found: int, prompt: int, elapsed_s: float) -> str:
    """`19,412 of 20,100 tokens read back, 0.4 s`."""
    return f"{found:,} of {prompt:,} tokens read back, {brief_seconds(elapsed_s)}"


def plain_ttft(seconds: float) -> str:
    """`first word 0.4 s`."""
    return f"first word {brief_seconds(seconds)}"


def plain_rate(tokens_per_s: float | None, words: int, tokens: int) -> str:
    """`49 words/s`, by the words and tokens so far; empty where they are too few."""
    if tokens_per_s is None or tokens < _MIN_TOKENS or not words:
        return ""
    speed = tokens_per_s * words / tokens
    return f"{_brief(speed)} words/s"


def plain_prefill_rate(tokens_per_s: float) -> str:
    """`21 tokens/s`."""
    return f"{_brief(tokens_per_s)} tokens/s"


def _brief(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 9.5 else f"{speed:.1f}"


def plain_kv(used: int, total: int) -> str:
    """`context 5% full`."""
    return f"context {percent(used, total)} full"


def plain_drafts(accepted: int, drafted: int) -> str:
    """`34 of 51 guesses right`."""
    return f"{accepted:,} of {drafted:,} guesses right"
