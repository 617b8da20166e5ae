"""Store of results: numbered JSON files in one folder of the data directory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec

from localchat.atomic import write_text
from localchat.config.paths import expand_home
from localchat.errors import LocalchatError, UsageError, reason
from localchat.measure.records import BenchRecord, QualityRecord, StoredRecord

LAST: Final = "last"
"""Name of the newest record on the command line."""

_Record = TypeVar("_Record", bound=StoredRecord)


class RecordStore(Generic[_Record]):
    """Records of one kind on this machine, numbered from 1."""

    def __init__(self, folder: Path, kind: type[_Record], noun: str, usage: str) -> None:
        """`noun` names a record in messages, `usage` is the command that makes one: `bench MODEL`."""
        self.noun = noun
        self._folder = folder
        self._kind = kind
        self._usage = usage

    def add(self, record: _Record) -> _Record:
        """Store a record under the next number, and return it with its number.

        Raises LocalchatError if the folder cannot be written.
        """
        from filelock import FileLock

        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self._folder / ".lock"):
                number = max(self._numbers(), default=0) + 1
                record = msgspec.structs.replace(record, id=number)
                text = msgspec.json.format(msgspec.json.encode(record)).decode()
                write_text(self._path(number), f"{text}\n")
        except OSError as problem:
            raise LocalchatError(
                f"the {self.noun} cannot be stored in {self._folder}: {reason(problem)}",
                hint="--no-keep measures without storing",
            ) from problem
        return record

    def __iter__(self) -> Iterator[_Record]:
        """Iterate over all records, oldest first, and skip damaged files."""
        for number in self._numbers():
            try:
                yield self._read(self._path(number))
            except UsageError:
                continue

    def find(self, name: str) -> _Record:
        """Load a record by its number, `last`, or the path of a file. Raises UsageError."""
        numbers = self._numbers()
        if name == LAST and numbers:
            return self._read(self._path(numbers[-1]))
        if name.isascii() and name.isdecimal() and int(name) in numbers:
            return self._read(self._path(int(name)))
        path = expand_home(name)
        if path.is_file():
            return self._read(path)
        if numbers:
            command = self._usage.split()[0]
            choices = f"choose one of 1 to {numbers[-1]}, see localchat {command} --list"
        else:
            choices = f"none is stored yet, localchat {self._usage} makes one"
        raise UsageError(
            f"no {self.noun} {name!r}", hint=f"{choices}; or name the file of a record"
        )

    def _numbers(self) -> list[int]:
        """Return the numbers of all records, rising."""
        stems = (path.stem for path in self._folder.glob("*.json"))
        return sorted(int(stem) for stem in stems if stem.isascii() and stem.isdecimal())

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:04}.json"

    def _read(self, path: Path) -> _Record:
        try:
            return msgspec.json.decode(path.read_bytes(), type=self._kind)
        except (OSError, msgspec.DecodeError) as problem:
            raise UsageError(f"{path} is not a {self.noun}: {problem}") from problem


def bench_store(data_dir: Path) -> RecordStore[BenchRecord]:
    """Return the store of benchmarks."""
    return RecordStore(data_dir / "benchmarks", BenchRecord, "benchmark", "bench MODEL")


def quality_store(data_dir: Path) -> RecordStore[QualityRecord]:
    """Return the store of quality results."""
    return RecordStore(data_dir / "quality", QualityRecord, "quality result", "quality A B")
