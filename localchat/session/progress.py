"""Progress of a request before its first token, as a phrase."""

from typing import Final

from localchat.session.engine_status import EngineStatus
from localchat.units import percent, rate, size, sizes, used_of

_NO_BREAK_SPACE: Final = "\u00a0"


def progress_words(status: EngineStatus, now_s: float) -> str:
    """Describe the progress of the running request. Empty while there is nothing to wait for.

    `now_s` is a time of the monotonic clock.
    """
    match status.state:
        case "sent":
            return f"waiting for the model, {now_s - status.sent_s:.0f} s"
        case "queued" if status.queued is not None:
            if status.queued.ahead == 1:
                return "waiting: 1 request ahead"
            return f"waiting: {status.queued.ahead} requests ahead"
        case "loading":
            return _loading(status)
        case "prefill":
            return _prefill(status, now_s)
        case _:
            return ""


def _loading(status: EngineStatus) -> str:
    loading = status.loading
    if loading is None or not loading.total_bytes:
        return "loading the model"
    done = loading.done_bytes
    total = loading.total_bytes
    if done >= total:
        return "warming up the model"
    if not done:
        return f"loading the model, {size(total)}"
    return f"loading the model, {percent(done, total)}, {sizes(done, total)}"


def _prefill(status: EngineStatus, now_s: float) -> str:
    prefill = status.prefill
    if prefill is None or not prefill.total or prefill.done >= prefill.total:
        return ""
    parts = [f"prefill {used_of(prefill.done, prefill.total)}"]
    if (speed := status.prefill_tokens_per_s) is not None:
        parts.append(rate(speed).replace(" ", _NO_BREAK_SPACE))
    if left := time_left(status, now_s):
        parts.append(left)
    return ", ".join(parts)


def time_left(status: EngineStatus, now_s: float) -> str:
    """Return `about 1 min left` or `about 20 s left`. Empty if unknown.

    `now_s` is a time of the monotonic clock.
    """
    left_s = status.prefill_left_s(now_s)
    if left_s is None or status.prefill is None or status.prefill.done >= status.prefill.total:
        return ""
    if left_s < 7.5:
        return "a few seconds left"
    if left_s < 57.5:
        return f"about {5 * round(left_s / 5)} s left"
    if left_s < 295:
        minutes, seconds = divmod(10 * round(left_s / 10), 60)
        return f"about {minutes} min {seconds:02} s left"
    if left_s < 3570:
        return f"about {max(1, round(left_s / 60))} min left"
    return f"about {left_s / 3600:.1f} h left"
