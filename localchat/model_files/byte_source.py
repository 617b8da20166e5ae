"""Random access to the bytes of a local file, or over range requests."""

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from localchat.errors import ModelInvalid, ModelMissing, reason

_SAMPLES = 16
_SAMPLE_BYTES = 4096
_FIRST_BYTES = 256 << 10
_MAX_BYTES = 8 << 20
_SMALL_FILE_BYTES = 1 << 20
_LENGTH = struct.Struct("<Q")


class ByteSource(Protocol):
    """Random access to bytes."""

    name: str
    """Name for messages."""
    size: int
    """Size in bytes."""

    def read(self, offset: int, count: int) -> bytes:
        """Return `count` bytes from `offset`, fewer only at the end."""
        ...


class FileSource:
    """A file on disk, read by position. Close it, or use it as a context manager."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises OSError, or ModelInvalid for a pipe or a device."""
        self.name = os.fspath(path)
        # Opening a pipe would wait until somebody writes to it. Opening a folder raises OSError.
        path = Path(path)
        if not path.is_file() and not path.is_dir() and path.exists():
            raise ModelInvalid(
                f"{self.name} is not a regular file (it is a pipe or a device).",
                hint="Give the path of a file on a disk.",
                path=self.name,
            )
        self._file = open(path, "rb", buffering=0)  # noqa: PTH123, SIM115 - unbuffered, closed by `close`
        self.size = os.fstat(self._file.fileno()).st_size

    def read(self, offset: int, count: int) -> bytes:
        """See ByteSource."""
        self._file.seek(offset)
        pieces = []
        while count > 0 and (piece := self._file.read(count)):
            pieces.append(piece)
            count -= len(piece)
        return b"".join(pieces)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def __enter__(self) -> "FileSource":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def digest_of(settings: bytes, paths: Iterable[Path]) -> str:
    """Return a digest of settings and samples of the weights, because fine-tunes have equal headers."""
    digest = hashlib.blake2b(settings, digest_size=16)
    for path in paths:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for piece in range(_SAMPLES):
                file.seek(max(size - _SAMPLE_BYTES, 0) * piece // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def read_small(path: Path) -> bytes:
    """Read a file that should be small. Empty above 1 MiB. Raises OSError."""
    with path.open("rb") as file:
        data = file.read(_SMALL_FILE_BYTES + 1)
    if len(data) <= _SMALL_FILE_BYTES:
        return data
    return b""


@contextmanager
def file_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise errors of opening and reading a file as ModelMissing or ModelInvalid."""
    try:
        yield
    except FileNotFoundError as error:
        raise ModelMissing(
            f"There is no file {path}.", hint="Check the path.", path=str(path)
        ) from error
    except (OSError, ValueError) as error:
        # A name with a NUL raises ValueError.
        raise ModelInvalid(
            f"{path} cannot be read: {reason(error)}.",
            hint="Check the path and its permissions.",
            path=str(path),
        ) from error


class Truncated(Exception):
    """Raised if the bytes end inside a value."""


class Cursor:
    """Reads consecutive little-endian values through a window.

    Reads grow from 256 KiB to 8 MiB, so that a small header takes one request to a remote source and a
    vocabulary of many megabytes takes few. Every method raises Truncated at the end.
    """

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._window = b""
        self._start = 0
        self._offset = 0
        self._step = _FIRST_BYTES

    @property
    def position(self) -> int:
        """Offset from the start of the source."""
        return self._start + self._offset

    @property
    def remaining(self) -> int:
        """Bytes up to the end of the source."""
        return self._source.size - self.position

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        self._need(count)
        start = self._offset
        self._offset += count
        return self._window[start : self._offset]

    def value(self, format_: struct.Struct) -> int | float | bool:
        """Return the next value of a struct with one field."""
        self._need(format_.size)
        value: int | float | bool = format_.unpack_from(self._window, self._offset)[0]
        self._offset += format_.size
        return value

    def skip(self, count: int) -> None:
        """Skip bytes without reading them."""
        if count > self.remaining:
            raise Truncated
        self._offset += count

    def skip_strings(self, count: int) -> None:
        """Skip strings, which are an 8-byte length and the bytes. Takes 80 ns per string."""
        unpack = _LENGTH.unpack_from
        while True:
            window = self._window
            offset = self._offset
            done = 0
            try:
                for done in range(count):  # noqa: B007 - read after the loop
                    offset += 8 + unpack(window, offset)[0]
                done = count
            except (struct.error, OverflowError):
                # The window ends before this length, after `done` complete strings.
                pass
            if self._start + offset > self._source.size:
                raise Truncated
            self._offset = offset
            count -= done
            if not count:
                return
            self._need(8)

    def strings(self, limit: int, max_length: int) -> list[bytes]:
        """Return the next strings that lie completely in the window, which may be none.

        Stops after `limit` strings, and before a string longer than `max_length`.
        """
        unpack = _LENGTH.unpack_from
        window = self._window
        offset = self._offset
        result: list[bytes] = []
        try:
            while len(result) < limit:
                length = unpack(window, offset)[0]
                end = offset + 8 + length
                if length > max_length or end > len(window):
                    break
                result.append(window[offset + 8 : end])
                offset = end
        except struct.error:
            # The window ends inside a length.
            pass
        self._offset = offset
        return result

    def _need(self, count: int) -> None:
        if len(self._window) - self._offset >= count:
            return
        if count > self.remaining:
            raise Truncated
        unread = self._window[self._offset :]
        position = self.position
        end = position + len(unread)
        missing = max(count - len(unread), min(self._step, self._source.size - end))
        self._window = unread + self._source.read(end, missing)
        self._start = position
        self._offset = 0
        self._step = min(2 * self._step, _MAX_BYTES)
        if len(self._window) < count:
            raise Truncated
