"""Detects other programs that used the CPU during a run, which distorts its speed."""

import math
import os
from pathlib import Path
from typing import Final, NamedTuple

import psutil

_PRESSURE_WINDOW_S: Final = 10.0
"""Averaging window of the kernel's `avg10`."""
_LOAD_WINDOW_S: Final = 60.0
"""Averaging window of the first load average."""
_WAITING_SHARE: Final = 0.5
"""A run is disturbed if threads waited for this share of the time. A run alone stays below 0.2."""
BUSY_SHARE: Final = 0.15
"""A benchmark is disturbed if other programs use this share of the CPU."""
_OTHER_THREADS: Final = 0.5
"""A run is disturbed by more runnable threads than this beyond the idle cores."""


def cpu_was_contended(elapsed_s: float, threads: int, cores: int, root: Path = Path("/")) -> bool:
    """Return True if threads waited for a core during the run that just ended.

    elapsed_s: duration of the run. root: the folder with /proc (for tests). False if the system reports
    neither the kernel's pressure nor a load average.
    """
    waiting_share = _waiting_share(root)
    if waiting_share is not None:
        return waiting_share >= _WAITING_SHARE * _weight_of(elapsed_s, _PRESSURE_WINDOW_S)
    load = _load_average()
    if load is None:
        return False
    others = load - threads * _weight_of(elapsed_s, _LOAD_WINDOW_S)
    return others > max(cores - threads, 0) + _OTHER_THREADS


class CpuWatch:
    """Measures how much of the CPU other programs use, from its creation on.

    Counts this process and the children that it has waited for as its own.
    """

    def __init__(self) -> None:
        self._start = _cpu_times()
        self._own_start_s = _own_cpu_s()

    def others_share(self) -> float:
        """Return the share of all cores that other programs used. 0 if the system does not report it."""
        end = _cpu_times()
        total_s = end.total_s - self._start.total_s
        if total_s <= 0:
            return 0.0
        busy_s = end.busy_s - self._start.busy_s
        return max(busy_s - (_own_cpu_s() - self._own_start_s), 0.0) / total_s


class _CpuTimes(NamedTuple):
    """Time of all cores since boot."""

    busy_s: float
    total_s: float


def _own_cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _cpu_times() -> _CpuTimes:
    """Return the times of this machine. Zeros if the system does not report them."""
    try:
        times = psutil.cpu_times()._asdict()
    except (OSError, ValueError):
        return _CpuTimes(0.0, 0.0)
    # Time of guests is part of the user's.
    total_s = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)
    return _CpuTimes(total_s - times["idle"] - times.get("iowait", 0.0), total_s)


def _weight_of(elapsed_s: float, window_s: float) -> float:
    """Return the share of an exponential average that the last `elapsed_s` seconds contribute."""
    return 1 - math.exp(-max(elapsed_s, 1.0) / window_s)


def _waiting_share(root: Path) -> float | None:
    """Return the share of ten seconds in which a runnable thread waited. None without Linux pressure."""
    try:
        text = (root / "proc/pressure/cpu").read_text()
    except OSError:
        return None
    for line in text.splitlines():
        kind, *fields = line.split()
        values = dict(field.partition("=")[::2] for field in fields)
        if kind == "some":
            try:
                return float(values["avg10"]) / 100
            except (KeyError, ValueError):
                return None
    return None


def _load_average() -> float | None:
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None
