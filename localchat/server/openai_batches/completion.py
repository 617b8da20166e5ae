"""Begin and end of a batch: its input is checked, its answers become files. Blocking, and safe to do twice.

A batch is seen by clients while it changes: its last status is there at once with all that belongs to it, and
not before it is on disk.
"""

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
from msgspec.structs import replace

from localchat.batch.input_file import BatchInput
from localchat.batch.output_file import BatchAnswer, BatchOutput, BatchProblem, answer_id
from localchat.errors import UsageError
from localchat.server.config import ServerLimits
from localchat.server.openai_batches.protocol import BatchErrors, BatchLineError, FileObject
from localchat.server.openai_batches.store import BatchRecord, BatchStore, FileRecord

_MOST_ERRORS: Final = 100
Problem: TypeAlias = tuple[str, str, int | None]
"""Code, sentence, line."""


def validate(store: BatchStore, record: BatchRecord, limits: ServerLimits) -> list[Problem]:
    """What is wrong with the input, whose lines are counted."""
    source = BatchInput(store.content(record.batch.input_file_id))
    problems: list[Problem] = []
    try:
        hashes = source.hashes()
        record.batch.request_counts.total = total = len(hashes) - hashes.count(0)
        if not total:
            problems.append(("empty_file", "The input file holds no request.", None))
        elif total > limits.batch_lines:
            sentence = f"The input has {total} lines; at most {limits.batch_lines} are allowed."
            problems.append(("too_many_requests", sentence, None))
        else:
            problems += _line_problems(source, record.batch.endpoint)
    except UsageError as problem:
        # The sentence names the file by its path, which clients do not see.
        sentence = problem.message.replace(str(source.path), "the input file")
        problems.append(("invalid_file", f"{sentence[:1].upper()}{sentence[1:]}.", None))
    return problems


def begin(store: BatchStore, record: BatchRecord, problems: Sequence[Problem]) -> None:
    """Set a batch in progress, or end it as failed where there are problems. On the event loop, where
    batches are cancelled, too."""
    batch = record.batch
    now_s = int(time.time())
    if problems:
        batch.status = "failed"
        batch.failed_at = now_s
        batch.errors = BatchErrors([BatchLineError(*one) for one in problems])
        batch.request_counts.total = 0
    elif batch.status == "validating":  # it may have been cancelled meanwhile
        batch.status = "in_progress"
        batch.in_progress_at = now_s
    store.save(record)


def _line_problems(source: BatchInput, endpoint: str) -> list[Problem]:
    problems: list[Problem] = []
    for raw in source.lines():
        line = source.parse(raw)
        if line.problem:
            sentence = f"{line.problem[:1].upper()}{line.problem[1:]}."
            problems.append(("invalid_json_line", sentence, line.number))
        elif line.path != endpoint:
            sentence = f"The url of this line is {line.path}, and the batch is for {endpoint}."
            problems.append(("mismatched_url", sentence, line.number))
        if len(problems) == _MOST_ERRORS:
            break
    return problems


# ---------------------------------------------------------------------------- end


def end(store: BatchStore, record: BatchRecord) -> None:
    """Make files of the answers, and close the batch: completed, expired or cancelled."""
    batch = record.batch
    now_s = int(time.time())
    answers = store.answers(batch.id)
    with (
        BatchOutput(answers) as output,
        closing(_AnswerFile(store)) as good,
        closing(_AnswerFile(store)) as bad,
    ):
        source = BatchInput(store.content(batch.input_file_id))
        hashes = source.hashes() if batch.request_counts.total else None
        done = output.answered(hashes)[0] if hashes is not None else bytearray()
        missing = batch.request_counts.total - sum(done)
        expired = missing and batch.status == "finalizing"
        for content, answer in _lines(answers):
            (bad if answer.failed else good).write(content)
        failed = bad.lines
        for answer in _unanswered(source, done) if expired else ():
            bad.write(msgspec.json.encode(answer) + b"\n")
        ended = replace(
            batch,
            output_file_id=good.keep(record, "output"),
            error_file_id=bad.keep(record, "error"),
            request_counts=replace(batch.request_counts, completed=good.lines, failed=failed),
        )
    if ended.status == "cancelling":
        ended.status = "cancelled"
        ended.cancelled_at = now_s
    elif expired:
        ended.status = "expired"
        ended.expired_at = now_s
    else:
        ended.status = "completed"
        ended.completed_at = now_s
    store.save(replace(record, batch=ended))
    record.batch = ended
    answers.unlink(missing_ok=True)


def _lines(path: Path) -> Iterator[tuple[bytes, BatchAnswer]]:
    decode = msgspec.json.Decoder(BatchAnswer).decode
    with path.open("rb") as file:
        for line in file:
            yield line, decode(line)


def _unanswered(source: BatchInput, done: bytearray) -> Iterator[BatchAnswer]:
    problem = BatchProblem("batch_expired", "The batch expired before this line was answered.")
    for raw in source.lines():
        if not done[raw.number]:
            custom_id = source.parse(raw).custom_id
            yield BatchAnswer(answer_id(raw.number, raw.hash), custom_id, error=problem)


class _AnswerFile:
    """A file of answers that becomes one of the store. Close it."""

    def __init__(self, store: BatchStore) -> None:
        handle, name = tempfile.mkstemp(prefix=".answers.", dir=store.folder)
        self.lines = 0
        self._store = store
        self._path = Path(name)
        self._file = os.fdopen(handle, "wb")

    def close(self) -> None:
        """Remove it, if it did not become one."""
        with suppress(OSError):  # a full disk refuses what is left in the buffer
            self._file.close()
        self._path.unlink(missing_ok=True)

    def write(self, line: bytes) -> None:
        self._file.write(line)
        self.lines += 1

    def keep(self, record: BatchRecord, what: str) -> str | None:
        """The id of the file, always the same for a batch; None without a line, and then there is no file."""
        size = self._file.tell()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if not size:
            return None
        name = hashlib.sha256(f"{record.batch.id} {what}".encode()).hexdigest()[:24]
        now_s = int(time.time())
        file = FileObject(
            id=f"file-{name}",
            bytes=size,
            created_at=now_s,
            expires_at=now_s + record.output_kept_s,
            filename=f"{record.batch.id}_{what}.jsonl",
            purpose="batch_output",
        )
        self._store.add_file(FileRecord(record.owner, file), self._path)
        return file.id
