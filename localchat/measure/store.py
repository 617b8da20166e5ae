"""Store of benchmarks, which `localchat plan` reads: numbered JSON files in one folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from localchat.atomic import write_text
from localchat.config.paths import expand_home
from localchat.errors import LocalchatError, UsageError, reason
from localchat.measure.records import BenchRecord

LAST: Final = "last"
"""Name of the newest benchmark on the command line."""


class BenchStore:
    """Benchmarks on this machine, numbered from 1."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir / "benchmarks"

    def add(self, record: BenchRecord) -> BenchRecord:
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
                f"the benchmark cannot be stored in {self._folder}: {reason(problem)}",
                hint="--no-keep measures without storing",
            ) from problem
        return record

    def __iter__(self) -> Iterator[BenchRecord]:
        """Iterate over all records, oldest first, and skip damaged files."""
        for number in self._numbers():
            try:
                yield _read(self._path(number))
            except UsageError:
                continue

    def find(self, name: str) -> BenchRecord:
        """Load a record by its number, `last`, or the path of a file. Raises UsageError."""
        numbers = self._numbers()
        if name == LAST and numbers:
            return _read(self._path(numbers[-1]))
        if name.isascii() and name.isdecimal() and int(name) in numbers:
            return _read(self._path(int(name)))
        path = expand_home(name)
        if path.is_file():
            return _read(path)
        choices = "none is stored yet, localchat bench MODEL makes one"
        if numbers:
            choices = f"choose one of 1 to {numbers[-1]}"
        raise UsageError(f"no benchmark {name!r}", hint=f"{choices}; or name the file of a record")

    def _numbers(self) -> list[int]:
        """Return the numbers of all records, rising."""
        stems = (path.stem for path in self._folder.glob("*.json"))
        return sorted(int(stem) for stem in stems if stem.isascii() and stem.isdecimal())

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:04}.json"


def _read(path: Path) -> BenchRecord:
    try:
        return msgspec.json.decode(path.read_bytes(), type=BenchRecord)
    except (OSError, msgspec.DecodeError) as problem:
        raise UsageError(f"{path} is not a benchmark: {problem}") from problem
