"""Detects other programs that used the CPU during a run, which distorts its speed."""

import math
import os
from pathlib import Path
from typing import Final

_ROOT: Final = Path("/")
_PRESSURE_WINDOW_S: Final = 10.0
"""Averaging window of the kernel's `avg10`."""
_LOAD_WINDOW_S: Final = 60.0
"""Averaging window of the first load average."""
_WAITING_SHARE: Final = 0.5
"""A run is disturbed if threads waited for this share of the time. A run alone stays below 0.2."""
BUSY_SHARE: Final = 0.15
"""A benchmark is disturbed if other programs use this share of the CPU."""
_TICKS_PER_S: Final = 100
"""Unit of /proc/stat."""
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

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._start = _busy_and_total_ticks(root)
        self._own_start_s = _own_cpu_s()

    def others_share(self) -> float:
        """Return the share of all cores that other programs used. 0 if the system does not report it."""
        end = _busy_and_total_ticks(self._root)
        if self._start is None or end is None or end[1] <= self._start[1]:
            return 0.0
        total_s = (end[1] - self._start[1]) / _TICKS_PER_S
        busy_s = (end[0] - self._start[0]) / _TICKS_PER_S
        return max(busy_s - (_own_cpu_s() - self._own_start_s), 0.0) / total_s


def _own_cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _busy_and_total_ticks(root: Path) -> tuple[int, int] | None:
    """Return the busy and total ticks of all cores since boot. None if the system does not report them."""
    if root == _ROOT and not (root / "proc/stat").exists():
        import psutil

        times = psutil.cpu_times()
        total = round(sum(times) * _TICKS_PER_S)
        return total - round(times.idle * _TICKS_PER_S), total
    try:
        fields = (root / "proc/stat").read_text().partition("\n")[0].split()[1:9]
        ticks = [int(field) for field in fields]
    except (OSError, ValueError):
        return None
    if len(ticks) < 5:
        return None
    # The fourth and fifth field are idle time and waiting for disks.
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


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
