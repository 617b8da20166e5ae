"""Predicts decode speeds, and stores those that runs on this machine measured.

A token reads every active weight once, so the memory bandwidth bounds the decode rate. A prediction is
therefore a range. A run of the same file with the same options replaces it.

The history is one small JSON file in the state folder, with one entry per model file and way of running it.
The oldest entries go first. Updates take a lock, so that no process loses another's runs.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from localchat.config.paths import find_paths
from localchat.errors import LocalchatError
from localchat.fit.contention import BUSY_SHARE, CpuWatch
from localchat.fit.hardware import read_cpu_name
from localchat.model_files.checkpoint import read_summary
from localchat.state_file import StateFile

PACES_FILE: Final = "paces.json"
MAX_RUNS: Final = 64
_MAX_RATES: Final = 10
_LOCK_TIMEOUT_S: Final = 10.0
_PROBE_BYTES: Final = 256 << 20
"""Larger than the last-level cache of any usual processor."""
DECODE_SHARE: Final = 0.6
"""Share of the RAM's bandwidth that decoding on a CPU reaches."""
_PROBE_REPEATS: Final = 6
_PROBE_ATTEMPTS: Final = 3
"""Attempts to measure between the turns of other programs."""
_CORE_BYTES_PER_S: Final = 12.5e9
_LAPTOP_BYTES_PER_S: Final = 25e9
"""Bandwidth of a usual laptop, and the share of it that a single core reaches."""
_BANDWIDTH_FILE: Final = "memory_bandwidth.json"


class Estimate(NamedTuple):
    """Expected tokens per second of one request with a short context."""

    tokens_per_s: float
    low: float
    high: float
    untried: bool = False
    """The backend has never run on such a GPU, as far as its authors know."""


class Spread(NamedTuple):
    """Factors between an expected rate and the ends of its range."""

    low: float
    high: float

    def around(self, tokens_per_s: float, *, untried: bool = False) -> Estimate:
        """Return the estimate with this range around `tokens_per_s`."""
        return Estimate(tokens_per_s, tokens_per_s * self.low, tokens_per_s * self.high, untried)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of a file that ran with one set of options."""

    path: str
    file_bytes: Annotated[int, Meta(ge=0)]
    backend: str
    threads: Annotated[int, Meta(ge=0)]
    """The number that computed, never 0."""
    gpu_layers: Annotated[int, Meta(ge=0)]
    kv_type: str
    safe_mode: bool
    rates: Annotated[tuple[Annotated[float, Meta(gt=0)], ...], Meta(min_length=1)]
    """Tokens per second of the last runs, oldest first."""
    at: str
    experts_on_cpu: Annotated[int, Meta(ge=0)] = 0

    @property
    def tokens_per_s(self) -> float:
        """Best of the last rates, because other programs only ever make a run slower."""
        return max(self.rates)

    @property
    def basis(self) -> str:
        """How and when the rate was measured: `measured here on 2026-11-28, the best of 4 runs`."""
        basis = f"measured here on {self.at[:10]}"
        if len(self.rates) > 1:
            basis += f", the best of {len(self.rates)} runs"
        return basis

    def is_same_way(self, other: "Run") -> bool:
        """Return True if both are the same file run in the same way."""
        return self._identity() == other._identity()

    def _identity(self) -> tuple[str | int | bool, ...]:
        return (
            *(self.path, self.file_bytes, self.backend, self.threads, self.gpu_layers),
            *(self.kv_type, self.safe_mode, self.experts_on_cpu),
        )


class _RunsFile(msgspec.Struct, frozen=True, kw_only=True):
    version: Literal[1]
    runs: tuple[Run, ...] = ()


class SpeedHistory:
    """Runs of this machine. A file that cannot be read counts as empty."""

    def __init__(self, state_dir: Path) -> None:
        self._file = StateFile(state_dir / PACES_FILE, _RunsFile, _RunsFile(version=1))

    def runs(self) -> tuple[Run, ...]:
        """Return all runs, oldest first."""
        return self._file.read().runs

    def record(self, run: Run) -> None:
        """Add a run. Several processes may call this at once. Raises OSError if it cannot be written.

        Drops the run if another process locks the file for long: one measurement of many is lost.
        """

        def with_run(file: _RunsFile) -> _RunsFile:
            earlier = [entry for entry in file.runs if entry.is_same_way(run)]
            others = [entry for entry in file.runs if not entry.is_same_way(run)]
            rates = (*(rate for entry in earlier for rate in entry.rates), *run.rates)
            merged = msgspec.structs.replace(run, rates=rates[-_MAX_RATES:])
            return _RunsFile(version=1, runs=(*others, merged)[-MAX_RUNS:])

        self._file.update(with_run, _LOCK_TIMEOUT_S)

    def measured(
        self,
        path: Path,
        *,
        backend: str,
        threads: int,
        gpu_layers: int,
        kv_type: str,
        experts_on_cpu: int = 0,
    ) -> Run | None:
        """Find the runs of this file with these options. None if the file never ran, or has changed."""
        options = (backend, threads, gpu_layers, experts_on_cpu, kv_type)
        for run in reversed(self.runs()):
            ran_with = (run.backend, run.threads, run.gpu_layers, run.experts_on_cpu, run.kv_type)
            if (
                run.path == str(path)
                and ran_with == options
                and run.file_bytes == _file_bytes(path)
            ):
                return run
        return None


def _file_bytes(path: Path) -> int:
    try:
        return read_summary(path).file_bytes
    except LocalchatError:
        return -1


class Bandwidth(msgspec.Struct, frozen=True):
    """Measured bandwidth of a processor's RAM."""

    cpu: str
    threads: int
    bytes_per_s: Annotated[float, Meta(gt=0)]
    quiet: bool
    """Whether no other program used much of the CPU meanwhile."""


class _BandwidthFile(msgspec.Struct, frozen=True, kw_only=True):
    version: Literal[1]
    measured: tuple[Bandwidth, ...] = ()


def ram_bandwidth(threads: int) -> float:
    """Return how many bytes per second the threads read from RAM.

    The first call on a machine measures it, in 0.2 s. Until a measurement was not disturbed by other programs,
    each process measures again, and the best one counts, because other programs only ever make it slower.
    Meanwhile it is at least that of a usual laptop.
    """
    bandwidth = _bandwidth(threads)
    if bandwidth.quiet:
        return bandwidth.bytes_per_s
    return max(bandwidth.bytes_per_s, min(_CORE_BYTES_PER_S * threads, _LAPTOP_BYTES_PER_S))


def is_bandwidth_disturbed(threads: int) -> bool:
    """Return True if other programs used the CPU during all measurements of `ram_bandwidth`."""
    return not _bandwidth(threads).quiet


@cache
def _bandwidth(threads: int) -> Bandwidth:
    """Cached per process, so that every model is compared with the same limit."""
    cpu = read_cpu_name()
    path = find_paths(os.environ).state_dir / _BANDWIDTH_FILE
    file = StateFile(path, _BandwidthFile, _BandwidthFile(version=1))
    stored = [
        entry for entry in file.read().measured if (entry.cpu, entry.threads) == (cpu, threads)
    ]
    if stored and stored[-1].quiet:
        return stored[-1]
    bandwidth = _measured_bandwidth(cpu, threads)
    if stored and not bandwidth.quiet:
        bandwidth = max(stored[-1], bandwidth, key=lambda entry: entry.bytes_per_s)

    def with_bandwidth(file: _BandwidthFile) -> _BandwidthFile:
        others = [entry for entry in file.measured if (entry.cpu, entry.threads) != (cpu, threads)]
        return _BandwidthFile(version=1, measured=(*others, bandwidth)[-MAX_RUNS:])

    with suppress(OSError):
        file.update(with_bandwidth, _LOCK_TIMEOUT_S)
    return bandwidth


def _measured_bandwidth(cpu: str, threads: int) -> Bandwidth:
    import numpy as np

    values = np.ones(_PROBE_BYTES // 4, dtype=np.float32)
    parts = np.array_split(values, threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_PROBE_ATTEMPTS):
            watch = CpuWatch()
            for _ in range(_PROBE_REPEATS):
                start_s = time.perf_counter()
                list(pool.map(lambda part: float(part @ part), parts))
                best = max(best, values.nbytes / (time.perf_counter() - start_s))
            if watch.others_share() < BUSY_SHARE:
                return Bandwidth(cpu, threads, best, quiet=True)
    return Bandwidth(cpu, threads, best, quiet=False)
