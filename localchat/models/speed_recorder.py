"""Records the decode speed of answers. Front ends call it after a request that ran alone.

It connects the engine's events with fit/speed.py, which may not import each other.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from localchat.engine.events import Done
from localchat.engine.interface import EngineInfo
from localchat.fit.contention import cpu_was_contended
from localchat.fit.hardware import read_cores
from localchat.fit.speed import Run, SpeedHistory

_MIN_TOKENS: Final = 24
"""A shorter answer measures too little."""
_MAX_KV_TOKENS: Final = 2048
"""A longer context measures attention too, and predictions are for a short one."""


def measured_run(info: EngineInfo, done: Done) -> Run | None:
    """Return the run that an answer measured, without the gain of speculation. None if it measured nothing.

    Answers that are too short, far into a long context, with drafts of unknown gain, or computed by several
    GPUs measure nothing.
    """
    rate = done.timings.decode_tokens_per_s
    gain = 1.0
    if done.speculation.accepted:
        gain = done.speculation.speedup or 0.0
    if (
        rate is None
        or min(rate, gain) <= 0
        or done.usage.completion_tokens < _MIN_TOKENS
        or done.kv_used_tokens > _MAX_KV_TOKENS
        or info.gpus > 1
    ):
        return None
    return Run(
        path=info.path,
        file_bytes=info.file_bytes,
        backend=info.backend,
        threads=info.threads or read_cores(),
        gpu_layers=info.gpu_layers,
        experts_on_cpu=info.experts_on_cpu,
        kv_type=info.kv_type,
        safe_mode=info.safe_mode,
        rates=(rate / gain,),
        at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def record_speed(info: EngineInfo, done: Done, state_dir: Path) -> None:
    """Add the speed of an answer to the history. Raises OSError.

    Answers that measured nothing, or that competed with other programs for the CPU, are left out.
    """
    run = measured_run(info, done)
    if run is None or _was_disturbed(info, run, done.timings.total_s):
        return
    SpeedHistory(state_dir).record(run)


def _was_disturbed(info: EngineInfo, run: Run, elapsed_s: float) -> bool:
    """Return True if the run computed on a CPU that other programs were using."""
    if info.gpu_layers >= info.layers > 0:
        return False
    return cpu_was_contended(elapsed_s, run.threads, read_cores())
