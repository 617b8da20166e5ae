"""Progress of a request before its first words, as a block of the transcript."""

from typing import Final

from localchat.session.blocks import ProgressBlock
from localchat.session.engine_status import EngineStatus
from localchat.session.progress import progress_words

PROGRESS_ID: Final = "progress"
_SHOWN_AFTER_S: Final = 0.4
"""Shorter waits show nothing, because a row that disappears at once is noise."""


def progress_block(status: EngineStatus, now_s: float) -> ProgressBlock | None:
    """Return the progress of the running request. None while there is nothing to wait for.

    `now_s` is a time of the monotonic clock.
    """
    if status.task or now_s - status.sent_s < _SHOWN_AFTER_S:
        return None
    words = progress_words(status, now_s)
    if words:
        return ProgressBlock(PROGRESS_ID, words, _share(status))
    return None


def _share(status: EngineStatus) -> float | None:
    """Return the share of the work that is done. None if it is unknown."""
    match status.state, status.loading, status.prefill:
        case ["loading", loading, _] if loading is not None and loading.total_bytes:
            return loading.done_bytes / loading.total_bytes
        case ["prefill", _, prefill] if prefill is not None:
            return prefill.done / prefill.total
        case _:
            return None
