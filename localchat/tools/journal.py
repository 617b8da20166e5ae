"""The journal of writes: the state of each file before a tool changed it, so that /undo restores it.

A record is on the disk before its file changes. Records belong to a message of a conversation, and are deleted
with the conversation or once they are undone.
"""

import hashlib
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import msgspec

from localchat.atomic import write_text
from localchat.errors import LocalchatError, os_errors_as, reason
from localchat.tools.root import FileContent, Root
from localchat.tools.tool import ToolError


class WriteRecord(msgspec.Struct, frozen=True):
    """A write, and the state of its file before it."""

    node: str
    """Id of the message whose call wrote."""
    root: str
    name: str
    """Name of the file relative to the root."""
    before: bytes | None
    """Bytes of the file, None if it did not exist."""
    before_mode: int
    after: str
    """SHA-256 of the new bytes."""
    after_mode: int
    folders: tuple[str, ...] = ()
    """Folders that the write created, outermost first."""


class UndoReport(NamedTuple):
    """Result of an undo, as names of files. A file may have had several writes."""

    restored: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    """Files that have changed since, or cannot be reached. They stay as they are."""

    def sentence(self, folder: Path) -> str:
        """Return what happened to files, or an empty string. Names are relative to the folder."""
        parts = []
        if self.restored:
            parts.append(f"restored: {_listed(self.restored, folder)}")
        if self.changed:
            parts.append(f"changed since then and left as it is: {_listed(self.changed, folder)}")
        return "; ".join(parts)


class Journal:
    """The writes of conversations, of which one is open."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: of all journals. None keeps records in memory, because conversations are not saved."""
        self._folder = folder
        self._conversation = ""
        self._node = ""
        self._records: dict[int, WriteRecord] = {}
        """Records by the time of the write: of the open conversation, or of all if they are only in memory."""

    def begin(self, conversation: str, node: str = "") -> None:
        """Record for this message of this conversation from now on."""
        self._node = node
        if self._folder is None or conversation == self._conversation:
            return
        self._conversation = conversation
        self._records = {}
        for path in (self._folder / conversation).glob("*.json"):
            try:
                record = msgspec.json.decode(path.read_bytes(), type=WriteRecord)
                self._records[int(path.stem)] = record
            except (OSError, ValueError, msgspec.DecodeError):
                continue  # damaged; the others are still good

    def write(self, root: Root, name: str, after: FileContent, before: FileContent | None) -> None:
        """Write a file that is still as `before`, and record it first. Raises LocalchatError."""
        # Two programs may write for the same conversation.
        number = max(time.time_ns(), max(self._records, default=0) + 1)
        record = WriteRecord(
            self._node,
            str(root.path),
            root.relative(name),
            None if before is None else before.data,
            0 if before is None else before.mode,
            _digest(after.data),
            after.mode,
        )
        self._store(number, record)
        try:
            created = root.replace(name, after, before)
        except (OSError, LocalchatError) as problem:
            self._forget(number)
            if isinstance(problem, OSError):
                raise ToolError(f"{name} cannot be written: {reason(problem)}") from problem
            raise
        if created:
            self._store(number, msgspec.structs.replace(record, folders=tuple(created)))

    def _store(self, number: int, record: WriteRecord) -> None:
        if self._folder is not None:
            with os_errors_as(ToolError, "the write was not made, because it cannot be recorded"):
                self._path(number).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_text(self._path(number), msgspec.json.encode(record).decode())
        self._records[number] = record

    def _forget(self, number: int) -> None:
        del self._records[number]
        if self._folder is not None:
            self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        assert self._folder is not None
        return self._folder / self._conversation / f"{number}.json"

    def undo(self, nodes: Collection[str]) -> UndoReport:
        """Take back the writes of these messages, newest first. Blocks.

        A file that has changed since its last write is left, with all earlier writes to it.
        """
        restored: dict[str, None] = {}
        changed: dict[str, None] = {}
        for number, record in sorted(self._records.items(), reverse=True):
            path = str(Path(record.root) / record.name)
            if record.node not in nodes or path in changed:
                continue
            try:
                root = Root(Path(record.root))
                try:
                    is_restored = _restore(root, record)
                finally:
                    root.close()
            except (OSError, LocalchatError):
                is_restored = False
            if is_restored:
                restored[path] = None
                self._forget(number)
            else:
                changed[path] = None
                restored.pop(path, None)
        return UndoReport(tuple(restored), tuple(changed))


def _listed(paths: Collection[str], folder: Path) -> str:
    return ", ".join(path.removeprefix(f"{folder}/") for path in paths)


def _restore(root: Root, record: WriteRecord) -> bool:
    """Restore the state before a write. Return False if the file has changed since. Raises OSError."""
    current = root.read(record.name)
    before = None
    if record.before is not None:
        before = FileContent(record.before, record.before_mode)
    if current != before:
        if current is None or (_digest(current.data), current.mode) != (
            record.after,
            record.after_mode,
        ):
            return False
        root.replace(record.name, before, current)
    for folder in reversed(record.folders):
        root.remove_folder(folder)
    return True


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
