"""Files and batches on disk, apart by the API key that brought them, readable by nobody else.

files/ID.json, files/ID.data      what the file is, and its content
batches/ID.json, batches/ID.jsonl what the batch is, and the answers so far
"""

import re
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from localchat.atomic import write_text
from localchat.server.openai_batches.protocol import BatchObject, FileObject

_ID: Final = re.compile(r"(?:file-|batch_)[0-9a-f]{24}")
OPEN: Final = ("validating", "in_progress", "finalizing", "cancelling")
"""Statuses of a batch that is not done."""
KEPT_S: Final = 30 * 24 * 3600
"""Files are removed after this time, unless their client asked for a shorter one."""


class FileRecord(msgspec.Struct):
    """A file and whose it is."""

    owner: str
    """A hash of the API key; empty on a server without keys."""
    file: FileObject


class BatchRecord(msgspec.Struct):
    """A batch and whose it is."""

    owner: str
    batch: BatchObject
    output_kept_s: int = KEPT_S


Record = TypeVar("Record", FileRecord, BatchRecord)


class BatchStore:
    """The folder of files and batches. Nothing is cached: several servers may use one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = folder / "files"
        self._batches = folder / "batches"

    def prepare(self) -> None:
        """Make the folders, and remove what has expired. Raises OSError."""
        for each in (self.folder, self._files, self._batches):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        now_s = time.time()
        inputs = {one.batch.input_file_id for one in self.batches() if one.batch.status in OPEN}
        for record in self._records(self._files, FileRecord):
            expires_s = record.file.expires_at
            if expires_s is not None and expires_s <= now_s and record.file.id not in inputs:
                self.delete_file(record.file.id)

    # ------------------------------------------------------------------------ files

    @property
    def used_bytes(self) -> int:
        """Of all files together."""
        return sum(record.file.bytes for record in self._records(self._files, FileRecord))

    def add_file(self, record: FileRecord, content: Path) -> None:
        """Take a file, which is moved. Raises OSError."""
        content.chmod(0o600)
        content.replace(self.content(record.file.id))
        _write(self._files / f"{record.file.id}.json", record)

    def file(self, id_: str, owner: str) -> FileRecord | None:
        """A file of this owner that has not expired."""
        found = self._read(self._files, id_, FileRecord)
        if found is None or found.owner != owner:
            return None
        expires_s = found.file.expires_at
        if expires_s is not None and expires_s <= time.time():
            return None
        return found

    def files(self, owner: str) -> list[FileRecord]:
        """The files of an owner, newest first."""
        found = [self.file(path.stem, owner) for path in self._files.glob("*.json")]
        kept = [record for record in found if record is not None]
        return sorted(kept, key=lambda one: (one.file.created_at, one.file.id), reverse=True)

    def content(self, id_: str) -> Path:
        """Where the content of a file is."""
        assert _ID.fullmatch(id_)
        return self._files / f"{id_}.data"

    def delete_file(self, id_: str) -> None:
        """Remove a file."""
        (self._files / f"{id_}.json").unlink(missing_ok=True)
        self.content(id_).unlink(missing_ok=True)

    # ------------------------------------------------------------------------ batches

    def save(self, record: BatchRecord) -> None:
        """Write a batch. Raises OSError."""
        _write(self._batches / f"{record.batch.id}.json", record)

    def batch(self, id_: str, owner: str | None = None) -> BatchRecord | None:
        """A batch, of this owner if one is named."""
        found = self._read(self._batches, id_, BatchRecord)
        if found is not None and owner in (None, found.owner):
            return found
        return None

    def batches(self, owner: str | None = None) -> list[BatchRecord]:
        """Batches, newest first."""
        found = [
            record
            for record in self._records(self._batches, BatchRecord)
            if owner in (None, record.owner)
        ]
        return sorted(found, key=lambda one: (one.batch.created_at, one.batch.id), reverse=True)

    def answers(self, id_: str) -> Path:
        """Where the answers of a batch are written while it runs."""
        assert _ID.fullmatch(id_)
        return self._batches / f"{id_}.jsonl"

    def _records(self, folder: Path, kind: type[Record]) -> Iterator[Record]:
        for path in folder.glob("*.json"):
            record = self._read(folder, path.stem, kind)
            if record is not None:
                yield record

    def _read(self, folder: Path, id_: str, kind: type[Record]) -> Record | None:
        """A record; None where it is not there or damaged."""
        if not _ID.fullmatch(id_):
            return None
        with suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode((folder / f"{id_}.json").read_bytes(), type=kind)
        return None


def new_file_id() -> str:
    """A random id of a file."""
    return f"file-{secrets.token_hex(12)}"


def new_batch_id() -> str:
    """A random id of a batch."""
    return f"batch_{secrets.token_hex(12)}"


def _write(path: Path, record: FileRecord | BatchRecord) -> None:
    write_text(path, msgspec.json.encode(record).decode())
