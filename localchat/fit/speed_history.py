"""How fast models wrote on this machine, remembered between runs: what corrects the estimate of `fit`.

A small JSON file in the state folder, one entry a model file and way of running it; the oldest go first.
Written under a lock, so that two processes lose nothing of each other's.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from localchat.errors import LocalchatError
from localchat.model_files.checkpoint import ModelSummary, read_summary
from localchat.state_file import StateFile

# What probes measured on this machine, remembered for a day: the next verdict need not measure again.
#
# A small JSON file in the state folder, numbers by name. It is a cache: what cannot be read or written is
# measured again.


MEASURES_FILE: Final = "measures.json"
_KEPT_S: Final = 24 * 3600.0
"""A laptop is on battery tomorrow, or its fan is clean."""
_MOST: Final = 512


class Estimate(NamedTuple):
    """Tokens a second. disturbed: other programs were busy while it was measured, and it is rather more."""

    tokens_per_s: float
    disturbed: bool = False


class Measurement(msgspec.Struct, frozen=True):
    """A number and when it was taken, in seconds of the epoch."""

    value: Annotated[float, Meta(gt=0)]
    at_s: float


class _MeasuresFile(msgspec.Struct, frozen=True, kw_only=True):
    version: Literal[1]
    measures: dict[str, Measurement] = {}


class MeasurementCache:
    """`state_dir`: None remembers nothing."""

    def __init__(self, state_dir: Path | None) -> None:
        path = state_dir / MEASURES_FILE if state_dir is not None else None
        self._file = StateFile(path, _MeasuresFile, _MeasuresFile(version=1))

    def known(self, now_s: float | None = None) -> dict[str, float]:
        """Every number that is not too old, by name."""
        now = time.time() if now_s is None else now_s
        return {
            name: one.value
            for name, one in self._file.read().measures.items()
            if -60 <= now - one.at_s <= _KEPT_S  # a clock that was put back makes nothing eternal
        }

    def keep(self, found: Mapping[str, float]) -> None:
        """Remember numbers, over those of the same names; the oldest go where there are many."""
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
"""Knows nothing and remembers nothing."""


PACES_FILE: Final = "paces.json"
MOST_RUNS: Final = 64
_KEPT_RATES: Final = 8
_MOST_PAST: Final = 4
"""Other models whose headers are read for a correction: 30 ms each."""
_LOCK_PATIENCE_S: Final = 10.0


class PastRun(NamedTuple):
    """A model that ran here, with which KV cache, and its tokens a second."""

    model: ModelSummary
    tokens_per_s: float
    kv_type: str = "f16"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One way in which a file ran. threads: as counted, never 0. rates: the last ones, oldest first."""

    path: str
    file_bytes: Annotated[int, Meta(ge=0)]
    quantization: str
    backend: str
    threads: Annotated[int, Meta(ge=0)]
    gpu_layers: Annotated[int, Meta(ge=0)]
    kv_type: str
    safe_mode: bool
    rates: Annotated[tuple[Annotated[float, Meta(gt=0)], ...], Meta(min_length=1)]
    at: str

    @property
    def tokens_per_s(self) -> float:
        """The middle one of the last rates: one disturbed run does not decide."""
        return median(self.rates)

    def _way(self) -> tuple[str | int | bool, ...]:
        return (
            *(self.path, self.file_bytes, self.backend, self.threads, self.gpu_layers),
            *(self.kv_type, self.safe_mode),
        )

    def same(self, other: "Run") -> bool:
        """Whether both are the same file run in the same way."""
        return self._way() == other._way()


class _RunsFile(msgspec.Struct, frozen=True, kw_only=True):
    version: Literal[1]
    runs: tuple[Run, ...] = ()


class SpeedHistory:
    """The runs of this machine. A file that cannot be read counts as empty."""

    def __init__(self, state_dir: Path) -> None:
        self._file = StateFile(state_dir / PACES_FILE, _RunsFile, _RunsFile(version=1))
        self.measures = MeasurementCache(state_dir)
        """What probes found, kept beside."""

    def runs(self) -> tuple[Run, ...]:
        """Oldest first."""
        return self._file.read().runs

    def record(self, run: Run) -> None:
        """Remember a run. Two processes may do so at once. Raises OSError where it cannot be written; gives
        up, silently, where another process holds the file for long: it is one measurement of many."""

        def with_run(file: _RunsFile) -> _RunsFile:
            before = tuple(rate for one in file.runs if one.same(run) for rate in one.rates)
            rates = (*before, *run.rates)[-_KEPT_RATES:]
            others = tuple(one for one in file.runs if not one.same(run))
            kept = (*others, msgspec.structs.replace(run, rates=rates))[-MOST_RUNS:]
            return _RunsFile(version=1, runs=kept)

        self._file.update(with_run, _LOCK_PATIENCE_S)

    def measured(
        self, path: Path, *, backend: str, threads: int, gpu_layers: int, kv_type: str
    ) -> float | None:
        """Tokens a second of this very file run in this way; None where it never was, or has changed."""
        found = [
            one
            for one in self.runs()
            if one.path == str(path)
            and (one.backend, one.threads, one.gpu_layers) == (backend, threads, gpu_layers)
            and one.kv_type == kv_type
            and one.file_bytes == _file_bytes(path)
        ]
        return found[-1].tokens_per_s if found else None

    def past(self, *, backend: str, threads: int, whole_gpu: bool) -> tuple[PastRun, ...]:
        """The last models that ran with this backend and as many threads, all on the CPU or (`whole_gpu`) all
        on the GPU, as far as their files are still there."""
        found: list[PastRun] = []
        for run in reversed(self.runs()):
            fits = (run.backend, run.threads) == (backend, threads)
            if not fits or bool(run.gpu_layers) is not whole_gpu or run.safe_mode:
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
