"""PartialFile: a download in progress, `NAME.part`, with `NAME.part.json` that identifies the remote file.

Both survive a kill of the program. The length of the part is the only record of progress, because bytes are
written in order. The hash of the whole file catches what a crash of the machine corrupted. It is checked
before the file gets its name.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple

import msgspec

from localchat.atomic import write_text
from localchat.errors import LocalchatError, reason
from localchat.models.hub.hashes import FileHash
from localchat.units import size

_READ_BYTES: Final = 1 << 20
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class RemoteFile(NamedTuple):
    """A file as the hub lists it."""

    path: str
    size: int
    sha256: str | None
    git_sha1: str | None
    """Blob id in git, if the hub has no sha256 (small text files)."""

    @property
    def hash(self) -> str:
        """Expected hash. Empty if the hub lists none."""
        return self.sha256 or self.git_sha1 or ""


class _State(msgspec.Struct, frozen=True):
    hash: str
    size: int
    etag: str = ""


def kept_bytes(target: Path, file: RemoteFile) -> int:
    """Return the bytes of this file from an earlier download. 0 if the part is of another file."""
    part, state = _part_paths(target)
    try:
        length = 0 if part.is_symlink() else part.stat().st_size
        written = msgspec.json.decode(state.read_bytes(), type=_State)
    except (OSError, msgspec.DecodeError):
        return 0
    same = (written.hash, written.size) == (file.hash, file.size)
    if same and length <= file.size:
        return length
    return 0


def _part_paths(target: Path) -> tuple[Path, Path]:
    return target.with_name(f"{target.name}.part"), target.with_name(f"{target.name}.part.json")


class PartialFile:
    """The part of one file, open for writing. Raises LocalchatError if the disk refuses."""

    def __init__(self, target: Path, file: RemoteFile) -> None:
        self._target = target
        self._file = file
        self._path, self._state_path = _part_paths(target)
        self.restarts = 0
        self._state = _State(file.hash, file.size)
        self._open()

    def __enter__(self) -> "PartialFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._handle)
        if problem is not None and not self._length:
            self._remove_empty()

    def _remove_empty(self) -> None:
        """Remove an empty part, and the folders that were created for it."""
        with suppress(OSError):
            self._path.unlink()
            self._state_path.unlink(missing_ok=True)
            for folder in (self._target.parent, self._target.parent.parent):
                folder.rmdir()  # raises OSError unless it is empty

    @property
    def length(self) -> int:
        """Bytes on disk."""
        return self._length

    @property
    def etag(self) -> str:
        """ETag of these bytes. Empty without a strong one."""
        return self._state.etag

    def set_etag(self, etag: str) -> None:
        """Record the ETag before the first byte is written."""
        if etag != self._state.etag:
            self._state = _State(self._file.hash, self._file.size, etag)
            self._save()

    def write(self, data: bytes) -> None:
        """Append bytes and hash them."""
        remaining = memoryview(data)
        while remaining:
            with self._write_errors():
                written = os.write(self._handle, remaining)
            self._hash.update(remaining[:written])
            self._length += written
            remaining = remaining[written:]

    def hash_existing(self) -> None:
        """Hash the bytes of an earlier download."""
        self._begin_hash()
        os.lseek(self._handle, 0, os.SEEK_SET)
        left = self._length
        while left and (piece := os.read(self._handle, min(_READ_BYTES, left))):
            self._hash.update(piece)
            left -= len(piece)
        if left:  # another program truncated the file
            self._length -= left
        os.lseek(self._handle, self._length, os.SEEK_SET)

    def restart(self) -> None:
        """Discard the bytes on disk, and count the restart."""
        self.restarts += 1
        with self._write_errors():
            os.ftruncate(self._handle, 0)
        os.lseek(self._handle, 0, os.SEEK_SET)
        self._length = 0
        self._state = _State(self._file.hash, self._file.size)
        self._begin_hash()
        self._save()

    @property
    def found_hash(self) -> str:
        """Hash of the bytes received so far, of the kind that the hub lists."""
        if self._by_git:
            return self._hash.git_sha1
        return self.sha256

    @property
    def sha256(self) -> str:
        """SHA-256 of the bytes received so far."""
        return self._hash.sha256

    @property
    def matches(self) -> bool:
        """Whether the file is complete and matches the hub's hash, if there is one."""
        right = not self._file.hash or self.found_hash == self._file.hash
        return self._length == self._file.size and right

    def finish(self) -> None:
        """Flush the bytes to disk, then give the file its name."""
        with self._write_errors():
            os.fsync(self._handle)
            self._path.replace(self._target)
            self._state_path.unlink(missing_ok=True)

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        with self._write_errors():
            self._target.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self._path, flags, 0o644)
        self._begin_hash()
        try:
            self._length = kept_bytes(self._target, self._file)
            if self._length:
                self._state = msgspec.json.decode(self._state_path.read_bytes(), type=_State)
            else:
                self.restart()  # nothing here, or the part of another file
        except BaseException:
            os.close(self._handle)
            raise

    def _save(self) -> None:
        with self._write_errors():
            if self._state_path.is_symlink():
                self._state_path.unlink()
            write_text(self._state_path, msgspec.json.encode(self._state).decode())

    @contextmanager
    def _write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            if problem.errno in _FULL:
                kept = getattr(self, "_length", 0)
                raise LocalchatError(
                    f"the disk is full: {self._target.name} needs {size(self._file.size)}, and {size(kept)} "
                    "of it are kept",
                    hint="free some space and run the same command again; it resumes where it stopped",
                ) from problem
            raise LocalchatError(f"{self._path} cannot be written: {reason(problem)}") from problem

    @property
    def _by_git(self) -> bool:
        return self._file.sha256 is None and self._file.git_sha1 is not None

    def _begin_hash(self) -> None:
        self._hash = FileHash(self._file.size, git=self._by_git)
