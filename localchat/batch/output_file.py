"""Output of a batch: a line for each answer, appended as they end, and read again to go on.

A line is that of OpenAI's batches. Its `id` holds the number of the input line and the hash of its content:
from it a later run knows what is answered, and that the input is the same.
"""

import fcntl
import os
import re
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from localchat.errors import LocalchatError, UsageError, reason

_ID: Final = re.compile(r"batch_req_(\d+)_([0-9a-f]{16})")
_OK: Final = 200


class BatchResponse(msgspec.Struct):
    """What the server answered."""

    status_code: int
    request_id: str
    body: Any


class BatchProblem(msgspec.Struct):
    """Why there is no answer of a server."""

    code: str
    message: str


class BatchAnswer(msgspec.Struct):
    """A line of the output."""

    id: str
    custom_id: str
    response: BatchResponse | None = None
    error: BatchProblem | None = None

    @property
    def failed(self) -> bool:
        """Whether it is an error instead of an answer."""
        return self.response is None or self.response.status_code != _OK


class _Status(msgspec.Struct):
    status_code: int


class _Head(msgspec.Struct):
    """The part of a line that tells what it answers; the rest is skipped."""

    id: str
    response: _Status | None = None

    @property
    def failed(self) -> bool:
        return self.response is None or self.response.status_code != _OK


def answer_id(number: int, content_hash: int) -> str:
    """The id of the output line for an input line."""
    return f"batch_req_{number}_{content_hash:016x}"


class BatchOutput:
    """An output file, locked while it is open. A context manager."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    def __enter__(self) -> "BatchOutput":
        try:
            self._file = self._path.open("a+b", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as problem:
            self.__exit__()
            raise UsageError(
                f"another localchat batch is writing {self._path}",
                hint="wait for its end, or name another output",
            ) from problem
        except OSError as problem:
            raise LocalchatError(f"{self._path} cannot be written: {reason(problem)}") from problem
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with suppress(OSError):
                os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def answered(
        self, hashes: "array[int]", *, retry_errors: bool = False
    ) -> tuple[bytearray, int]:
        """Which lines of the input have an answer, and how many of those are errors.

        hashes: of the input, by the number of the line. The first result is 1 at the numbers of lines that are
        done. Cuts off a last line that a kill left unfinished; retry_errors: takes error lines out of the file,
        so that their lines count as not done. Raises UsageError for the output of another input."""
        self._cut_torn_line()
        done, failed = self._read(hashes)
        if retry_errors and failed:
            self._drop_errors()
            done, failed = self._read(hashes)
        return done, failed

    def _read(self, hashes: "array[int]") -> tuple[bytearray, int]:
        done = bytearray(len(hashes))
        failed = 0
        for at, (_, head) in enumerate(self._heads(), 1):
            number = self._input_line(at, head, hashes)
            if done[number]:
                raise self._refusal(f"its line {at} answers line {number} of the input once more")
            done[number] = 1
            failed += head.failed
        return done, failed

    def append(self, answer: BatchAnswer) -> None:
        """Write a line in whole. Raises LocalchatError, for instance where the disk is full."""
        assert self._file is not None
        left = memoryview(msgspec.json.encode(answer) + b"\n")
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as problem:
            raise LocalchatError(
                f"{self._path} cannot be written: {reason(problem)}",
                hint="what is answered so far is kept; the same command goes on",
            ) from problem

    def _heads(self) -> Iterator[tuple[bytes, _Head]]:
        decode = msgspec.json.Decoder(_Head).decode
        with self._path.open("rb") as file:
            for at, line in enumerate(file, 1):
                try:
                    yield line, decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as problem:
                    raise self._refusal(f"its line {at} is no answer of a batch") from problem

    def _input_line(self, at: int, head: _Head, hashes: "array[int]") -> int:
        """The number of the input line that a line of the output answers. Raises UsageError."""
        found = _ID.fullmatch(head.id)
        if found is None:
            raise self._refusal(f"its line {at} is no answer of a batch")
        number = int(found[1])
        if number >= len(hashes) or hashes[number] != int(found[2], 16):
            raise self._refusal(f"its line {at} answers another line {number} than the input has")
        return number

    def _refusal(self, what: str) -> UsageError:
        return UsageError(
            f"{self._path} is the output of another input: {what}",
            hint="name another output with -o, or remove this one",
        )

    def _cut_torn_line(self) -> None:
        """Remove what stands behind the last line end."""
        assert self._file is not None
        size = end = self._file.seek(0, os.SEEK_END)
        while end:
            begin = max(0, end - (1 << 16))
            self._file.seek(begin)
            at = self._file.read(end - begin).rfind(b"\n")
            if at >= 0:
                end = begin + at + 1
                break
            end = begin
        if end and end < size:
            self._file.truncate(end)
        elif size and not end:
            self._refuse_foreign(size)
            self._file.truncate(0)

    def _refuse_foreign(self, size: int) -> None:
        """Keep a file of one line that is none of ours: the first answer of a batch begins with its id."""
        assert self._file is not None
        self._file.seek(0)
        start = b'{"id":"batch_req_'
        if not start.startswith(self._file.read(min(size, len(start)))):
            raise self._refusal("its line 1 is no answer of a batch")

    def _drop_errors(self) -> None:
        """Rewrite the file without its error lines, in place of the old one at once."""
        assert self._file is not None
        folder = self._path.resolve().parent
        handle, name = tempfile.mkstemp(prefix=f".{self._path.name}.", dir=folder)
        kept = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                for line, head in self._heads():
                    if not head.failed:
                        file.write(line)
                file.flush()
                os.fsync(file.fileno())
            kept.chmod(self._path.stat().st_mode & 0o777)
            replacement = kept.open("a+b", buffering=0)
            fcntl.flock(replacement, fcntl.LOCK_EX | fcntl.LOCK_NB)
            kept.replace(self._path.resolve())
        except OSError as problem:
            raise LocalchatError(f"{self._path} cannot be written: {reason(problem)}") from problem
        finally:
            kept.unlink(missing_ok=True)
        self._file.close()
        self._file = replacement
