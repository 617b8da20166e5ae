"""The one-line summary of an answer that `--stats`, `/stats`, exports and the screen show."""

from localchat.engine.events import Done
from localchat.metrics import NOT_REPORTED, kv_share, number


def stats_line(done: Done) -> str:
    """TTFT, decode rate, KV cache and drafts of one answer; values that a remote server does not report
    are left out."""
    timings, drafts = done.timings, done.speculation
    parts = [
        f"TTFT {number(timings.ttft_s, 2)} s",
        f"{number(timings.decode_tokens_per_s, 1)} tok/s",
    ]
    if done.kv_used_tokens or done.kv_total_tokens:
        parts.append(f"KV {kv_share(done.kv_used_tokens, done.kv_total_tokens)}")
    if drafts.off != NOT_REPORTED:
        parts.append(f"drafts {drafts.accepted}/{drafts.drafted}")
    return " · ".join(parts)
