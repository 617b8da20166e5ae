"""Random access to the bytes of a header: a local file, or anything that answers range requests."""

import os
import struct
from typing import Protocol

_FIRST_BYTES = 256 << 10
_MOST_BYTES = 8 << 20
_LENGTH = struct.Struct("<Q")


class ByteSource(Protocol):
    """Random access to bytes."""

    name: str
    """For messages."""
    size: int
    """Bytes in all."""

    def read(self, offset: int, count: int) -> bytes:
        """At most `count` bytes from `offset`; fewer only at the end."""
        ...


class FileSource:
    """A file on disk, read by position. Close it, or use it in a `with`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises OSError."""
        self.name = os.fspath(path)
        self._file = open(path, "rb", buffering=0)  # noqa: PTH123, SIM115  unbuffered, closed by `close`
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
        """Idempotent."""
        self._file.close()

    def __enter__(self) -> "FileSource":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Truncated(Exception):
    """The bytes ended inside a value."""


class Cursor:
    """Reads little-endian values one after another through a window that forgets what was read.

    The window grows from 256 KiB to 8 MiB a read, so that a small header takes one request of a remote source
    and a vocabulary of millions of bytes takes few. Every method raises Truncated at the end.
    """

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._window = b""
        self._start = 0
        self._at = 0
        self._step = _FIRST_BYTES

    @property
    def position(self) -> int:
        """Bytes from the beginning of the source."""
        return self._start + self._at

    @property
    def remaining(self) -> int:
        """Bytes to the end of the source."""
        return self._source.size - self.position

    def take(self, count: int) -> bytes:
        """The next bytes."""
        self._need(count)
        at = self._at
        self._at = self._at + count
        return self._window[at : self._at]

    def value(self, format_: struct.Struct) -> int | float | bool:
        """The next value of a one-field struct."""
        self._need(format_.size)
        found: int | float | bool = format_.unpack_from(self._window, self._at)[0]
        self._at += format_.size
        return found

    def skip(self, count: int) -> None:
        """Skip bytes without reading them."""
        if count > self.remaining:
            raise Truncated
        self._at += count

    def skip_strings(self, count: int) -> None:
        """Skip strings (an 8-byte length, then the bytes): 80 ns each, no objects."""
        unpack = _LENGTH.unpack_from
        while True:
            window = self._window
            at = self._at
            done = 0
            try:
                for done in range(count):  # noqa: B007  read after the loop
                    at += 8 + unpack(window, at)[0]
                done = count
            except (struct.error, OverflowError):
                pass  # the window ends before this length: `done` strings are done
            if self._start + at > self._source.size:
                raise Truncated
            self._at = at
            count = count - done
            if not count:
                return
            self._need(8)

    def strings(self, most: int, longest: int) -> list[bytes]:
        """The next strings that are in the window as a whole, at most `most` of them, none longer than
        `longest`: often none."""
        unpack = _LENGTH.unpack_from
        window = self._window
        at = self._at
        found: list[bytes] = []
        try:
            while len(found) < most:
                length = unpack(window, at)[0]
                end = at + 8 + length
                if length > longest or end > len(window):
                    break
                found.append(window[at + 8 : end])
                at = end
        except struct.error:
            pass  # the window ends inside a length
        self._at = at
        return found

    def _need(self, count: int) -> None:
        if len(self._window) - self._at >= count:
            return
        if count > self.remaining:
            raise Truncated
        rest = self._window[self._at :]
        position = self.position
        missing = max(count - len(rest), min(self._step, self._source.size - position - len(rest)))
        read = self._source.read(position + len(rest), missing)
        self._window = rest + read
        self._start = position
        self._at = 0
        self._step = min(2 * self._step, _MOST_BYTES)
        if len(self._window) < count:
            raise Truncated
