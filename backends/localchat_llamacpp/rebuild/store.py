"""Stores the native build: one build at a time, installed and removed as a whole.

Only the record decides which build is in use. A rename replaces it, so a process that ends at any moment leaves
either the old or the new build. The next run removes everything that the record does not name.
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
"""File in the folder with the output of the last build."""
_LOCK: Final = "build.lock"
_WORK: Final = "work-"
_KEPT: Final = "build-"


class BuildRecord(msgspec.Struct, frozen=True):
    """Record of the build in use."""

    library: str
    """File of the library, relative to the folder."""
    version: str
    """Version of llama-cpp-python."""
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
        """Return the build in use. None without a readable record."""
        try:
            return msgspec.json.decode(self._record.read_bytes(), type=BuildRecord)
        except (OSError, msgspec.DecodeError):
            return None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder during the block, and remove what earlier runs left.

        Raises LocalchatError if another process has the lock, OSError.
        """
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
        """Provide an empty folder on the same file system during the block. Raises OSError."""
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
        """Remove the build. False without one. Raises OSError."""
        existed = self._record.exists()
        self._record.unlink(missing_ok=True)
        self._clean()
        return existed

    def _clean(self) -> None:
        """Remove everything that the record does not name."""
        record = self.current()
        used = ""
        if record:
            used = record.library.partition("/")[0]
        for path in self.folder.iterdir():
            if path.name.startswith((_WORK, _KEPT)) and path.name != used:
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.startswith(f".{RECORD}."):  # a record that was being written
                path.unlink(missing_ok=True)
