"""Output of a batch: one line per answer, appended as answers arrive, and read again to resume.

Lines have the format of OpenAI's batches. The `id` contains the number of the input line and the hash of its
content, so that a later run can check which lines have answers and whether the input is the same.
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

from localchat.errors import LocalchatError, UsageError, os_errors_as, reason

_ID: Final = re.compile(r"batch_req_(\d+)_([0-9a-f]{16})")
_OK: Final = 200


class BatchResponse(msgspec.Struct):
    """Response of the server."""

    status_code: int
    request_id: str
    body: Any


class BatchProblem(msgspec.Struct):
    """Error if there is no response."""

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
        """Whether the line has no successful response."""
        return self.response is None or self.response.status_code != _OK


class _Status(msgspec.Struct):
    status_code: int


class _Head(msgspec.Struct):
    """The fields of a line that identify its input line. Other fields are skipped."""

    id: str
    response: _Status | None = None

    @property
    def failed(self) -> bool:
        return self.response is None or self.response.status_code != _OK


def answer_id(number: int, content_hash: int) -> str:
    """Return the id of the output line for an input line."""
    return f"batch_req_{number}_{content_hash:016x}"


class BatchOutput:
    """An output file, which is locked while open. Use it as a context manager."""

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
                hint="wait until it ends, or choose another output",
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
        """Return which input lines have an answer, and how many answers are errors.

        hashes: hashes of the input lines by line number. The first result is 1 at the numbers of completed
        lines. An incomplete last line, which a kill may leave, is removed. retry_errors: remove error lines,
        so that they run again. Raises UsageError for the output of another input.
        """
        self._remove_incomplete_line()
        done, failed = self._read(hashes)
        if retry_errors and failed:
            self._drop_errors()
            done, failed = self._read(hashes)
        return done, failed

    def _read(self, hashes: "array[int]") -> tuple[bytearray, int]:
        done = bytearray(len(hashes))
        failed = 0
        for line_number, (_, head) in enumerate(self._heads(), 1):
            number = self._input_line(line_number, head, hashes)
            if done[number]:
                raise self._mismatch(
                    f"its line {line_number} answers line {number} of the input again"
                )
            done[number] = 1
            failed += head.failed
        return done, failed

    def append(self, answer: BatchAnswer) -> None:
        """Append a line. Raises LocalchatError, for example if the disk is full."""
        assert self._file is not None
        remaining = memoryview(msgspec.json.encode(answer) + b"\n")
        with os_errors_as(
            LocalchatError,
            f"{self._path} cannot be written",
            hint="completed answers are stored; run the same command again to resume",
        ):
            while remaining:
                remaining = remaining[self._file.write(remaining) :]

    def _heads(self) -> Iterator[tuple[bytes, _Head]]:
        decode = msgspec.json.Decoder(_Head).decode
        with self._path.open("rb") as file:
            for line_number, line in enumerate(file, 1):
                try:
                    yield line, decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as problem:
                    raise self._mismatch(
                        f"its line {line_number} is not a batch answer"
                    ) from problem

    def _input_line(self, line_number: int, head: _Head, hashes: "array[int]") -> int:
        """Return the number of the input line that an output line answers. Raises UsageError."""
        match = _ID.fullmatch(head.id)
        if match is None:
            raise self._mismatch(f"its line {line_number} is not a batch answer")
        number = int(match[1])
        answered = f"its line {line_number} answers line {number}"
        if number >= len(hashes):
            raise self._mismatch(f"{answered}, which the input does not have")
        if hashes[number] != int(match[2], 16):
            raise self._mismatch(f"{answered}, which has changed")
        return number

    def _mismatch(self, cause: str) -> UsageError:
        return UsageError(
            f"{self._path} is the output of another input: {cause}",
            hint="choose another output with -o, or remove this one",
        )

    def _remove_incomplete_line(self) -> None:
        """Remove an incomplete last line."""
        assert self._file is not None
        size = end = self._file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - (1 << 16))
            self._file.seek(start)
            index = self._file.read(end - start).rfind(b"\n")
            if index >= 0:
                end = start + index + 1
                break
            end = start
        if end and end < size:
            self._file.truncate(end)
        elif size and not end:
            self._check_own_file(size)
            self._file.truncate(0)

    def _check_own_file(self, size: int) -> None:
        """Raise UsageError unless the file starts like the first answer of a batch."""
        assert self._file is not None
        self._file.seek(0)
        start = b'{"id":"batch_req_'
        if not start.startswith(self._file.read(min(size, len(start)))):
            raise self._mismatch("its line 1 is not a batch answer")

    def _drop_errors(self) -> None:
        """Replace the file atomically by a copy without error lines."""
        assert self._file is not None
        folder = self._path.resolve().parent
        handle, name = tempfile.mkstemp(prefix=f".{self._path.name}.", dir=folder)
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                for line, head in self._heads():
                    if not head.failed:
                        file.write(line)
                file.flush()
                os.fsync(file.fileno())
            temporary.chmod(self._path.stat().st_mode & 0o777)
            replacement = temporary.open("a+b", buffering=0)
            fcntl.flock(replacement, fcntl.LOCK_EX | fcntl.LOCK_NB)
            temporary.replace(self._path.resolve())
        except OSError as problem:
            raise LocalchatError(f"{self._path} cannot be written: {reason(problem)}") from problem
        finally:
            temporary.unlink(missing_ok=True)
        self._file.close()
        self._file = replacement
