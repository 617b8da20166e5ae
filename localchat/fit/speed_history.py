"""Speeds of past runs on this machine, and a cache of benchmarks: both feed the estimate of `fit`.

Two small JSON files in the state folder. Runs: one entry for each model file and way of running it, the
oldest go first; written under a lock, so that no process loses another's runs. Benchmarks: numbers by name,
kept for a day; what cannot be read or written is measured again.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from localchat.errors import LocalchatError
from localchat.model_files.checkpoint import ModelSummary, read_summary
from localchat.state_file import StateFile

# ---------------------------------------------------------------------------- benchmark results

MEASURES_FILE: Final = "measures.json"
_KEPT_S: Final = 24 * 3600.0
"""A laptop may be on battery tomorrow, or its fan clean."""
_MOST: Final = 512
BENCHMARK_S: Final = 5.0
"""Longest time that a command waits for an estimate."""


class Estimate(NamedTuple):
    """Expected tokens a second."""

    tokens_per_s: float
    disturbed: bool = False
    """Other programs were busy during the measurement, so the true value is higher."""
    untried: bool = False
    """The backend has never run on such a GPU, here or anywhere that is known."""


class Measurement(msgspec.Struct, frozen=True):
    """A number, and when it was taken (seconds of the epoch)."""

    value: Annotated[float, Meta(gt=0)]
    at_s: float


class _MeasuresFile(msgspec.Struct, frozen=True, kw_only=True):
    version: Literal[1]
    measures: dict[str, Measurement] = {}


class MeasurementCache:
    """Benchmark results of this machine, and how long a benchmark may take.

    state_dir: None remembers nothing. benchmark_s: limit for the benchmark of missing results; 0: use cached
    results only.
    """

    def __init__(self, state_dir: Path | None, benchmark_s: float = BENCHMARK_S) -> None:
        self.benchmark_s = benchmark_s
        path = state_dir / MEASURES_FILE if state_dir is not None else None
        self._file = StateFile(path, _MeasuresFile, _MeasuresFile(version=1))

    def known(self, now_s: float | None = None) -> dict[str, float]:
        """Every number that is recent enough, by name."""
        now = time.time() if now_s is None else now_s
        return {
            name: one.value
            for name, one in self._file.read().measures.items()
            if -60 <= now - one.at_s <= _KEPT_S  # a clock that was put back makes nothing eternal
        }

    def keep(self, found: Mapping[str, float]) -> None:
        """Store numbers, replacing those of the same names; the oldest go where there are many."""
        if not found:
            return
        now = time.time()
        fresh = {name: Measurement(value, now) for name, value in found.items()}
        latest = sorted(
            {**self._file.read().measures, **fresh}.items(), key=lambda pair: pair[1].at_s
        )
        with suppress(OSError):
            self._file.write(_MeasuresFile(version=1, measures=dict(latest[-_MOST:])))


NO_MEASUREMENTS: Final = MeasurementCache(None)
"""A cache that stays empty."""


# ---------------------------------------------------------------------------- past runs

PACES_FILE: Final = "paces.json"
MOST_RUNS: Final = 64
_KEPT_RATES: Final = 10
_MOST_PAST: Final = 4
"""Other models whose headers are read for a correction: 30 ms each."""
_LOCK_PATIENCE_S: Final = 10.0


class PastRun(NamedTuple):
    """A model that ran here, its KV type, and its tokens a second."""

    model: ModelSummary
    tokens_per_s: float
    kv_type: str = "f16"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One way in which a file ran."""

    path: str
    file_bytes: Annotated[int, Meta(ge=0)]
    quantization: str
    backend: str
    threads: Annotated[int, Meta(ge=0)]
    """As counted, never 0."""
    gpu_layers: Annotated[int, Meta(ge=0)]
    kv_type: str
    safe_mode: bool
    rates: Annotated[tuple[Annotated[float, Meta(gt=0)], ...], Meta(min_length=1)]
    """Tokens a second of the last runs, oldest first."""
    at: str
    experts_on_cpu: Annotated[int, Meta(ge=0)] = 0

    @property
    def tokens_per_s(self) -> float:
        """Best of the last rates. Other programs only ever make a run slower."""
        return max(self.rates)

    @property
    def basis(self) -> str:
        """How and when the rate was measured: `measured here on 2026-11-28, the best of 4 runs`."""
        best = "" if len(self.rates) == 1 else f", the best of {len(self.rates)} runs"
        return f"measured here on {self.at[:10]}{best}"

    def _identity(self) -> tuple[str | int | bool, ...]:
        return (
            *(self.path, self.file_bytes, self.backend, self.threads, self.gpu_layers),
            *(self.kv_type, self.safe_mode, self.experts_on_cpu),
        )

    def same(self, other: "Run") -> bool:
        """True if both are the same file run in the same way."""
        return self._identity() == other._identity()


class _RunsFile(msgspec.Struct, frozen=True, kw_only=True):
    version: Literal[1]
    runs: tuple[Run, ...] = ()


class SpeedHistory:
    """Runs of this machine. A file that cannot be read counts as empty."""

    def __init__(self, state_dir: Path, benchmark_s: float = BENCHMARK_S) -> None:
        """benchmark_s: see MeasurementCache."""
        self._file = StateFile(state_dir / PACES_FILE, _RunsFile, _RunsFile(version=1))
        self.measures = MeasurementCache(state_dir, benchmark_s)
        """Benchmark results, in a file of their own."""

    def runs(self) -> tuple[Run, ...]:
        """All runs, oldest first."""
        return self._file.read().runs

    def record(self, run: Run) -> None:
        """Add a run; several processes may do so at once. Raises OSError where it cannot be written.

        Gives up without a word where another process holds the file for long: it is one measurement of many.
        """

        def with_run(file: _RunsFile) -> _RunsFile:
            before = tuple(rate for one in file.runs if one.same(run) for rate in one.rates)
            rates = (*before, *run.rates)[-_KEPT_RATES:]
            others = tuple(one for one in file.runs if not one.same(run))
            kept = (*others, msgspec.structs.replace(run, rates=rates))[-MOST_RUNS:]
            return _RunsFile(version=1, runs=kept)

        self._file.update(with_run, _LOCK_PATIENCE_S)

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
        """Find the runs of this file with these options. None if there are none, or the file has changed."""
        placed = (gpu_layers, experts_on_cpu, kv_type)
        found = [
            one
            for one in self.runs()
            if one.path == str(path)
            and (one.backend, one.threads) == (backend, threads)
            and (one.gpu_layers, one.experts_on_cpu, one.kv_type) == placed
            and one.file_bytes == _file_bytes(path)
        ]
        return found[-1] if found else None

    def past(self, *, backend: str, threads: int, whole_gpu: bool) -> tuple[PastRun, ...]:
        """Last models that ran with this backend and thread count, as far as their files still exist.

        whole_gpu: all layers on the GPU; otherwise all on the CPU.
        """
        found: list[PastRun] = []
        for run in reversed(self.runs()):
            fits = (run.backend, run.threads) == (backend, threads)
            mixed = run.safe_mode or run.experts_on_cpu
            if not fits or bool(run.gpu_layers) is not whole_gpu or mixed:
                continue
            found.extend(_opened(run))
            if len(found) == _MOST_PAST:
                break
        return tuple(found)


def _opened(run: Run) -> Iterator[PastRun]:
    path = Path(run.path)
    try:
        model = read_summary(path)
    except LocalchatError:
        return  # it is gone since
    if model.file_bytes == run.file_bytes:
        yield PastRun(model, run.tokens_per_s, run.kv_type)


def _file_bytes(path: Path) -> int:
    try:
        return read_summary(path).file_bytes
    except LocalchatError:
        return -1
