"""A file on its way: `NAME.part` with what came so far, and `NAME.part.json` that says of what.

Both survive whatever ends the program. The length of the part is the only count of what is here: bytes are
written as they come, in order, and what a crash of the machine may have garbled is caught by the hash of the
whole, which is known before the file gets its name.
"""

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple

import msgspec

from localchat.atomic import write_text
from localchat.errors import LocalchatError
from localchat.units import size

_READ_BYTES: Final = 1 << 20
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class RemoteFile(NamedTuple):
    """A file as the hub lists it. `sha256` of its bytes, or where the hub has none (small text files)
    `git_sha1`, the name of its blob in git."""

    path: str
    size: int
    sha256: str | None
    git_sha1: str | None

    @property
    def hash(self) -> str:
        """What its bytes must add up to; empty where the hub says nothing."""
        return self.sha256 or self.git_sha1 or ""


class _State(msgspec.Struct, frozen=True):
    hash: str
    size: int
    etag: str = ""


def kept_bytes(target: Path, file: RemoteFile) -> int:
    """Bytes of this file that are here from before. A part of another file, or one that is longer than the
    file, counts as none."""
    part, state = _part_paths(target)
    try:
        length = 0 if part.is_symlink() else part.stat().st_size
        written = msgspec.json.decode(state.read_bytes(), type=_State)
    except (OSError, msgspec.DecodeError):
        return 0
    same = (written.hash, written.size) == (file.hash, file.size)
    return length if same and length <= file.size else 0


def _part_paths(target: Path) -> tuple[Path, Path]:
    return target.with_name(f"{target.name}.part"), target.with_name(f"{target.name}.part.json")


class PartialFile:
    """The part of one file, open for writing. Raises LocalchatError where the disk does not allow it."""

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

    @property
    def length(self) -> int:
        """Bytes that are here."""
        return self._length

    @property
    def etag(self) -> str:
        """The ETag under which they came; empty where the server gave none that compares."""
        return self._state.etag

    def came_under(self, etag: str) -> None:
        """Remember the ETag before the first byte is written."""
        if etag != self._state.etag:
            self._state = _State(self._file.hash, self._file.size, etag)
            self._save()

    def write(self, data: bytes) -> None:
        """Append."""
        rest = memoryview(data)
        while rest:
            try:
                written = os.write(self._handle, rest)
            except OSError as problem:
                raise self._unwritable(problem) from problem
            self._add(rest[:written])
            self._length += written
            rest = rest[written:]

    def hash_existing(self, read: Callable[[int], None]) -> None:
        """Read what is here from before, so that the digest covers it. `read` gets the bytes of each step."""
        self._begin_hash()
        os.lseek(self._handle, 0, os.SEEK_SET)
        left = self._length
        while left and (piece := os.read(self._handle, min(_READ_BYTES, left))):
            self._add(piece)
            left -= len(piece)
            read(len(piece))
        if left:  # somebody cut the file under us; what is there counts
            self._length -= left
        os.lseek(self._handle, self._length, os.SEEK_SET)

    def restart(self) -> None:
        """Throw away what is here. `restarts` counts how often."""
        self.restarts += 1
        try:
            os.ftruncate(self._handle, 0)
        except OSError as problem:
            raise self._unwritable(problem) from problem
        os.lseek(self._handle, 0, os.SEEK_SET)
        self._length = 0
        self._state = _State(self._file.hash, self._file.size)
        self._begin_hash()
        self._save()

    @property
    def found_hash(self) -> str:
        """Of what is here, of the kind that the hub gave."""
        return self._git.hexdigest() if self._by_git else self.sha256

    @property
    def sha256(self) -> str:
        """Of what is here."""
        return self._sha256.hexdigest()

    @property
    def matches(self) -> bool:
        """Whether it is the file, whole and byte for byte as far as the hub can tell."""
        right = not self._file.hash or self.found_hash == self._file.hash
        return self._length == self._file.size and right

    def finish(self) -> None:
        """Give the file its name, once its bytes are on the disk."""
        try:
            os.fsync(self._handle)
            self._path.replace(self._target)
            self._state_path.unlink(missing_ok=True)
        except OSError as problem:
            raise self._unwritable(problem) from problem

    # ------------------------------------------------------------------ files

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        try:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self._path, flags, 0o644)
        except OSError as problem:
            raise self._unwritable(problem) from problem
        self._begin_hash()
        try:
            self._length = kept_bytes(self._target, self._file)
            if self._length:
                self._state = msgspec.json.decode(self._state_path.read_bytes(), type=_State)
            else:
                self.restart()  # a new file, or the part of another one
        except BaseException:
            os.close(self._handle)
            raise

    def _save(self) -> None:
        try:
            if self._state_path.is_symlink():
                self._state_path.unlink()
            write_text(self._state_path, msgspec.json.encode(self._state).decode())
        except OSError as problem:
            raise self._unwritable(problem) from problem

    def _unwritable(self, problem: OSError) -> LocalchatError:
        if problem.errno in _FULL:
            kept = getattr(self, "_length", 0)
            return LocalchatError(
                f"the disk is full: {self._target.name} wants {size(self._file.size)}, and {size(kept)} "
                "of it are kept",
                hint="make room and run the same command again; it goes on where it stopped",
            )
        return LocalchatError(f"{self._path} cannot be written: {problem.strerror or problem}")

    # ------------------------------------------------------------------ hashes

    @property
    def _by_git(self) -> bool:
        return self._file.sha256 is None and self._file.git_sha1 is not None

    def _begin_hash(self) -> None:
        self._sha256 = hashlib.sha256()
        self._git = hashlib.sha1(f"blob {self._file.size}\0".encode(), usedforsecurity=False)

    def _add(self, data: bytes | memoryview) -> None:
        self._sha256.update(data)
        if self._by_git:
            self._git.update(data)
