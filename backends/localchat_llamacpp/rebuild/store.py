"""Folder of the native build: one build at a time, taken and taken back whole.

The record names the folder of the build that is in use, and is the only file that decides. It is replaced by a
rename, so a process that ends at any moment leaves the build before it or the new one; whatever the record does
not name is removed by the next run.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from localchat.atomic import write_text
from localchat.errors import LocalchatError
from localchat_llamacpp.library_source import RECORD, native_build_folder

LOG: Final = "build.log"
"""In the folder: output of the last build."""
_LOCK: Final = "build.lock"
_WORK: Final = "work-"
_KEPT: Final = "build-"


class BuildRecord(msgspec.Struct, frozen=True):
    """The build in use, as the record has it."""

    library: str
    """Its file, relative to the folder."""
    version: str
    """Of llama-cpp-python."""
    kind: str


class BuildStore:
    """The folder of the native build. Only the holder of the lock changes it."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or native_build_folder()
        self._record = self.folder / RECORD

    @property
    def log(self) -> Path:
        """Output of the last build."""
        return self.folder / LOG

    def current(self) -> BuildRecord | None:
        """The build in use; None if there is none, or its record cannot be read."""
        try:
            return msgspec.json.decode(self._record.read_bytes(), type=BuildRecord)
        except (OSError, msgspec.DecodeError):
            return None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder until the block ends, without what earlier runs left. Raises LocalchatError if
        another process holds it, OSError."""
        from filelock import FileLock, Timeout

        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.folder / _LOCK, timeout=0)
        try:
            lock.acquire()
        except Timeout as problem:
            raise LocalchatError(
                "another `localchat doctor --rebuild` is running", hint="wait for it, or stop it"
            ) from problem
        try:
            self._clean()
            yield
        finally:
            lock.release()

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """An empty folder on the same file system, removed at the end of the block. Raises OSError."""
        work = Path(tempfile.mkdtemp(prefix=_WORK, dir=self.folder))
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def take(self, libraries: Path, library: str, version: str, kind: str) -> None:
        """Make the folder `libraries` the build in use. library: the name of its file. Raises OSError."""
        kept = Path(tempfile.mkdtemp(prefix=_KEPT, dir=self.folder))
        libraries.rename(kept / "lib")
        record = BuildRecord(f"{kept.name}/lib/{library}", version, kind)
        write_text(self._record, msgspec.json.encode(record).decode() + "\n")
        self._clean()

    def remove(self) -> bool:
        """Take the build back; False if there was none. Raises OSError."""
        there = self._record.exists()
        self._record.unlink(missing_ok=True)
        self._clean()
        return there

    def _clean(self) -> None:
        """Remove all that the record does not name."""
        record = self.current()
        used = record.library.partition("/")[0] if record else ""
        for path in self.folder.iterdir():
            if path.name.startswith((_WORK, _KEPT)) and path.name != used:
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.startswith(f".{RECORD}."):  # a record that was being written
                path.unlink(missing_ok=True)
