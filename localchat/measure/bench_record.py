"""Records of benchmarks: dated JSON files with machine, models, settings and everything measured."""

import datetime
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from localchat import __version__
from localchat.atomic import write_text
from localchat.config.paths import expand_home
from localchat.errors import LocalchatError, UsageError, reason
from localchat.fit.contention import BUSY_SHARE
from localchat.fit.hardware import Machine
from localchat.measure.sweep import Point, ServedVariant, SweepSpec

FOLDER: Final = "benchmarks"
LAST: Final = "last"
"""The word for the newest record."""


class MachineRecord(msgspec.Struct, frozen=True):
    """The machine of a benchmark."""

    cpu: str
    cores: int
    ram_bytes: int
    gpus: tuple[str, ...]
    system: str

    @classmethod
    def of(cls, machine: Machine) -> "MachineRecord":
        """What of a machine decides its speed."""
        gpus = tuple(gpu.name for gpu in machine.gpus)
        system = f"{platform.system()} {platform.machine()}"
        return cls(machine.cpu_name, machine.cores, machine.ram_total_bytes, gpus, system)


class BenchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark."""

    version: Literal[1] = 1
    id: int = 0
    """Its number on this machine; 0: it is not kept."""
    at: str
    """When it began, ISO 8601."""
    localchat: str = __version__
    machine: MachineRecord
    spec: SweepSpec
    served: tuple[ServedVariant, ...]
    points: tuple[Point, ...]
    energy: tuple[str, ...] = ()
    """What the joules are counted of."""
    complete: bool = True
    """False: it was interrupted."""
    others_share: float = 0.0
    """Share of the CPU that other programs used meanwhile; 0 where it is unknown."""

    @property
    def disturbed(self) -> bool:
        """True if other programs used much of the CPU."""
        return self.others_share >= BUSY_SHARE

    @property
    def models(self) -> tuple[str, ...]:
        """The models that were measured."""
        return tuple(dict.fromkeys(one.variant.model for one in self.served))


def now() -> str:
    """The date of a record that begins now."""
    return datetime.datetime.now(datetime.UTC).astimezone().isoformat(timespec="seconds")


class BenchStore:
    """Records of this machine, numbered from 1."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir / FOLDER

    def keep(self, record: BenchRecord) -> BenchRecord:
        """Store a record under the next number. Raises LocalchatError where it cannot be written."""
        from filelock import FileLock

        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self._folder / ".lock"):
                kept = msgspec.structs.replace(record, id=max(self._numbers(), default=0) + 1)
                text = msgspec.json.format(msgspec.json.encode(kept)).decode()
                write_text(self._path(kept.id), f"{text}\n")
        except OSError as problem:
            raise LocalchatError(
                f"the benchmark cannot be kept in {self._folder}: {reason(problem)}",
                hint="--no-keep measures without keeping",
            ) from problem
        return kept

    def records(self) -> Iterator[BenchRecord]:
        """All records, oldest first; damaged files are left out."""
        for number in sorted(self._numbers()):
            try:
                yield _read(self._path(number))
            except UsageError:
                continue

    def find(self, word: str) -> BenchRecord:
        """The record with this number, the `last` one, or the one in a file. Raises UsageError."""
        numbers = sorted(self._numbers())
        if word == LAST and numbers:
            return _read(self._path(numbers[-1]))
        if word.isascii() and word.isdecimal() and int(word) in numbers:
            return _read(self._path(int(word)))
        path = expand_home(word)
        if path.is_file():
            return _read(path)
        kept = f"there are 1 to {numbers[-1]}: localchat bench --list" if numbers else ""
        none = "there is none yet: localchat bench MODEL makes one"
        raise UsageError(
            f"there is no benchmark {word!r}",
            hint=f"{kept or none}; or give the file of a record",
        )

    def _numbers(self) -> list[int]:
        stems = [path.stem for path in self._folder.glob("*.json")]
        return [int(stem) for stem in stems if stem.isascii() and stem.isdecimal()]

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:04}.json"


def _read(path: Path) -> BenchRecord:
    try:
        return msgspec.json.decode(path.read_bytes(), type=BenchRecord)
    except (OSError, msgspec.DecodeError) as problem:
        raise UsageError(f"{path} is no record of a benchmark: {problem}") from problem


def differing_facts(one: BenchRecord, other: BenchRecord) -> list[str]:
    """What besides the measured settings differs between two records, as phrases."""
    pairs: list[tuple[str, Any, Any]] = [
        ("machine", _machine(one), _machine(other)),
        ("version", one.localchat, other.localchat),
        ("models", ", ".join(one.models), ", ".join(other.models)),
        ("temperature", one.spec.temperature, other.spec.temperature),
    ]
    return [f"{name}: {first} and {second}" for name, first, second in pairs if first != second]


def _machine(record: BenchRecord) -> str:
    machine = record.machine
    return " + ".join([f"{machine.cpu} ({machine.cores} cores)", *machine.gpus])
