"""The line that `--stats` prints after an answer."""

from localchat.engine.events import Done
from localchat.units import decimal, used_of


def stats_line(done: Done) -> str:
    """TTFT, decode rate, KV cache, accepted of drafted tokens; without what was not, or is not reported."""
    timings, drafts = done.timings, done.speculation
    parts = [
        f"TTFT {decimal(timings.ttft_s, 2)} s",
        f"{decimal(timings.decode_tokens_per_s, 1)} tok/s",
    ]
    if done.kv_used_tokens or done.kv_total_tokens:
        parts.append(f"KV {used_of(done.kv_used_tokens, done.kv_total_tokens)}")
    if drafts.drafted:
        parts.append(f"drafts {drafts.accepted}/{drafts.drafted}")
    return " · ".join(parts)
