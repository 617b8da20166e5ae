"""Progress of a request before its first words, as a block of the transcript."""

from typing import Final

from localchat.session.blocks import ProgressBlock
from localchat.session.engine_status import EngineStatus
from localchat.units import percent, rate, sizes

PROGRESS_ID: Final = "progress"
_SHOWN_AFTER_S: Final = 0.4
"""Shorter waits show nothing: a row that comes and goes at once is noise."""
_UNBROKEN: Final = "\u00a0"
"""A space where no row ends."""


def progress_block(status: EngineStatus, now_s: float) -> ProgressBlock | None:
    """Progress of the running request; None while there is nothing to wait for. `now_s`: of the monotonic
    clock."""
    waited_s = now_s - status.sent_s
    if status.task or waited_s < _SHOWN_AFTER_S:
        return None
    match status.state:
        case "sent":
            return ProgressBlock(PROGRESS_ID, f"waiting for the model, {waited_s:.0f} s")
        case "queued" if status.queued is not None:
            ahead = status.queued.ahead
            words = f"waiting: {ahead} request{'' if ahead == 1 else 's'} ahead"
            return ProgressBlock(PROGRESS_ID, words)
        case "loading":
            return _loading(status)
        case "prefill":
            return _prefill(status, now_s)
        case _:
            return None


def _loading(status: EngineStatus) -> ProgressBlock:
    loading = status.loading
    if loading is None or not loading.total_bytes:
        return ProgressBlock(PROGRESS_ID, "loading the model")
    done, total = loading.done_bytes, loading.total_bytes
    words = f"loading the model, {percent(done, total)}, {sizes(done, total)}"
    return ProgressBlock(PROGRESS_ID, words, done / total)


def _prefill(status: EngineStatus, now_s: float) -> ProgressBlock | None:
    prefill = status.prefill
    if prefill is None or not prefill.total:
        return None
    words = [f"reading your prompt, {percent(prefill.done, prefill.total)}"]
    if (speed := status.prefill_tokens_per_s) is not None:
        words.append(rate(speed).replace(" ", _UNBROKEN))
    if left := time_left(status, now_s):
        words.append(left)
    return ProgressBlock(PROGRESS_ID, ", ".join(words), prefill.done / prefill.total)


def time_left(status: EngineStatus, now_s: float) -> str:
    """`about 1 min left`, `about 20 s left`; empty if that is not known. `now_s`: of the monotonic clock."""
    left_s = status.prefill_left_s(now_s)
    if left_s is None or status.prefill is None or status.prefill.done >= status.prefill.total:
        return ""
    if left_s < 7.5:
        return "a few seconds left"
    if left_s < 57.5:
        return f"about {5 * round(left_s / 5)} s left"
    if left_s < 3570:
        return f"about {max(1, round(left_s / 60))} min left"
    return f"about {left_s / 3600:.1f} h left"
