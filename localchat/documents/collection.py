"""A collection of documents: an SQLite file with passages and an index of their words.

Only the file's owner may read it. Sources are compared by date and size, then by hash, so that unchanged
files are not read again.
"""

import hashlib
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from localchat.documents.folder import find_files
from localchat.documents.pages import (
    MAX_FILE_BYTES,
    DocumentText,
    Unreadable,
    kind_of,
    read_document,
)
from localchat.documents.passages import Passage, passages_of
from localchat.documents.question import match_query
from localchat.errors import FileMissing, LocalchatError, UsageError, os_errors_as
from localchat.history.search_query import segmented
from localchat.media.binary_kind import binary_kind
from localchat.sanitize import sanitize_line

_VERSION: Final = 1
_DOCUMENT_KINDS: Final = {".pdf": "PDF", ".docx": "DOCX"}
"""Kinds of files, by suffix, that are learned for their text and may be unreadable."""
_COMMIT_INTERVAL_S: Final = 2.0
_HINTS: Final = {
    sqlite3.SQLITE_BUSY: "another localchat reads them: try again",
    sqlite3.SQLITE_LOCKED: "another localchat reads them: try again",
    # Both have read the same new file.
    sqlite3.SQLITE_CONSTRAINT: "another localchat reads them: try again",
    sqlite3.SQLITE_FULL: "the disk is full: make room and try again",
    sqlite3.SQLITE_READONLY: "the file or its folder is read-only",
}
_SCHEMA: Final = """
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE source (place TEXT PRIMARY KEY);
CREATE TABLE file (
  id INTEGER PRIMARY KEY, source TEXT NOT NULL, path TEXT NOT NULL, name TEXT NOT NULL UNIQUE,
  mtime_ns INTEGER NOT NULL, size INTEGER NOT NULL, hash BLOB NOT NULL, trouble TEXT NOT NULL,
  length INTEGER NOT NULL, UNIQUE (source, path));
CREATE TABLE passage (
  id INTEGER PRIMARY KEY, file INTEGER NOT NULL, number INTEGER NOT NULL, text TEXT NOT NULL, vector BLOB);
CREATE INDEX passage_of_file ON passage (file);
CREATE VIRTUAL TABLE words USING fts5(
  text, content = '', tokenize = "porter unicode61 remove_diacritics 2");
"""


class Summary(NamedTuple):
    """Contents of a collection."""

    sources: tuple[str, ...]
    files: int
    length: int
    """Characters of all texts."""
    skipped: dict[str, int]
    """Number of unreadable files by reason."""
    unread_kinds: dict[str, int]
    """Number of files by kind of document, for kinds without a single readable file."""


class Changes(NamedTuple):
    """Result of reading a collection again."""

    read: int
    unchanged: int
    removed: int


_Rows: TypeAlias = dict[tuple[str, str], tuple[Any, ...]]
"""Stored files by source and path."""


class _SourceFile(NamedTuple):
    """A file of a source with its current status."""

    source: str
    path: str
    mtime_ns: int
    size: int


class Collection:
    """An open collection, for one thread at a time. Close it. Raises LocalchatError."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Raises UsageError if it is missing and `create` is false.

        Raises LocalchatError if it cannot be opened.
        """
        self.path = path
        self.name = path.stem
        if create:
            with os_errors_as(LocalchatError, f"{path} cannot be written"):
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        elif not path.exists():
            raise UsageError(f"there are no documents @{self.name}", hint="localchat learn --list")
        with self._errors():
            self._db = sqlite3.connect(
                path, timeout=5.0, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare()
            except BaseException:
                self._db.close()
                raise

    def _prepare(self) -> None:
        self._db.execute("PRAGMA secure_delete = ON")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > _VERSION:
            raise LocalchatError(
                f"the documents @{self.name} were read by a newer localchat",
                hint="update localchat",
            )
        if not version:
            with self._transaction():
                if not self._db.execute("PRAGMA user_version").fetchone()[0]:
                    for statement in _SCHEMA.split(";")[:-1]:
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA user_version = {_VERSION}")

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._db.close()

    def __enter__(self) -> "Collection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as problem:
            # The low byte of the code is SQLite's primary error.
            code = getattr(problem, "sqlite_errorcode", 0) & 0xFF
            default = (
                f"remove them with localchat learn --forget {self.name}, then learn them again"
            )
            raise LocalchatError(
                f"the documents @{self.name} cannot be used: {problem}",
                hint=_HINTS.get(code, default),
            ) from problem

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def summary(self) -> Summary:
        """Return the sources, sizes and skipped files."""
        with self._errors():
            files, length = self._db.execute(
                "SELECT count(*), coalesce(sum(length), 0) FROM file WHERE trouble = ''"
            ).fetchone()
            skipped = self._db.execute(
                "SELECT trouble, count(*) FROM file WHERE trouble != '' GROUP BY trouble ORDER BY trouble"
            )
            return Summary(self._sources(), files, length, dict(skipped), self._unread_kinds())

    def _unread_kinds(self) -> dict[str, int]:
        unread: Counter[str] = Counter()
        readable: set[str] = set()
        for name, trouble in self._db.execute("SELECT name, trouble FROM file ORDER BY name"):
            kind = _DOCUMENT_KINDS.get(Path(name).suffix.lower())
            if kind is None:
                continue
            if trouble:
                unread[kind] += 1
            else:
                readable.add(kind)
        return {kind: count for kind, count in unread.items() if kind not in readable}

    def _sources(self) -> tuple[str, ...]:
        return tuple(row[0] for row in self._db.execute("SELECT place FROM source ORDER BY place"))

    def passages(self) -> list[Passage]:
        """Return all passages in a fixed order."""
        with self._errors():
            return self._passages("", ())

    def _passages(self, where: str, values: Sequence[object]) -> list[Passage]:
        rows = self._db.execute(
            "SELECT file.name, passage.number, passage.text FROM passage "  # noqa: S608 - ours
            "JOIN file ON file.id = passage.file "
            f"{where} ORDER BY file.name, passage.id",
            values,
        )
        return [Passage(*row) for row in rows]

    def learn(
        self,
        sources: Sequence[str] = (),
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Changes:
        """Add sources, which are absolute paths, and read all changes.

        The text of a missing source stays. Raises FileMissing for a missing new source.
        """
        with self._errors():
            for source in sources:
                if not Path(source).exists():
                    raise FileMissing(f"there is no file or folder {source}")
            stored = {
                (row[1], row[2]): row
                for row in self._db.execute(
                    "SELECT id, source, path, mtime_ns, size, hash, trouble FROM file"
                )
            }
            places = [*dict.fromkeys((*self._sources(), *sources))]
            files, current_keys = self._scan(places, stored)
            changed = [
                file for file in files if not _is_same(file, stored.get((file.source, file.path)))
            ]
            removed = [row for key, row in stored.items() if key not in current_keys]
            is_new_source = bool(set(places) - set(self._sources()))
            if not (changed or removed or is_new_source):
                return Changes(0, len(files), 0)
            with self._transaction():
                for source in sources:
                    self._db.execute("INSERT OR IGNORE INTO source VALUES (?)", (source,))
                for row in removed:
                    self._remove(row[0])
                read = self._read_files(changed, stored, progress)
            return Changes(read, len(files) - len(changed), len(removed))

    def _read_files(
        self, changed: Sequence[_SourceFile], stored: _Rows, progress: Callable[[int, int], None]
    ) -> int:
        """Read files in a transaction, and commit at intervals so that a kill loses little."""
        read = 0
        due_s = time.monotonic() + _COMMIT_INTERVAL_S
        for number, file in enumerate(changed):
            progress(number, len(changed))
            read += self._read_file(file, stored.get((file.source, file.path)))
            if time.monotonic() > due_s:
                self._db.execute("COMMIT")
                self._db.execute("BEGIN IMMEDIATE")
                due_s = time.monotonic() + _COMMIT_INTERVAL_S
        return read

    def _scan(
        self, places: Sequence[str], stored: _Rows
    ) -> tuple[list[_SourceFile], set[tuple[str, str]]]:
        """Return the files of all sources, and the keys of stored files that stay."""
        files: list[_SourceFile] = []
        keys: set[tuple[str, str]] = set()
        for source in places:
            root = Path(source)
            # A missing source may be on a disk that is not mounted, or a URL of an earlier version. Reading
            # a pipe in the place of a file might never end.
            if not (root.is_file() or root.is_dir()):
                keys.update(key for key in stored if key[0] == source)
                continue
            for name in find_files(root) if root.is_dir() else ("",):
                try:
                    stat = (root / name).stat()
                except OSError:
                    continue
                # SQLite stores only UTF-8. `_read_file` reports that the file is skipped.
                name = os.fsencode(name).decode(errors="backslashreplace")
                files.append(_SourceFile(source, name, stat.st_mtime_ns, stat.st_size))
        keys.update((file.source, file.path) for file in files)
        return files, keys

    def _read_file(self, file: _SourceFile, stored: "tuple[object, ...] | None") -> bool:
        """Read a file whose date or size changed. Return False if its content is unchanged."""
        path = Path(file.source, file.path)
        try:
            with path.open("rb") as stream:
                head = stream.read(8192)
                if kind_of(path.name, head) == "binary":
                    return self._store_trouble(file, stored, f"is {binary_kind(path.name, head)}")
                data = head + stream.read(MAX_FILE_BYTES + 1 - len(head))
        except OSError as problem:
            reason = f"cannot be read: {problem.strerror}"
            if isinstance(problem, FileNotFoundError) and "\\x" in file.path:
                reason = "has a name that is not UTF-8"
            return self._store_trouble(file, stored, reason)
        return self._store(file, path.name, data, stored)

    def _store(
        self, file: _SourceFile, name: str, data: bytes, stored: "tuple[object, ...] | None"
    ) -> bool:
        digest = hashlib.sha256(data).digest()
        if stored is not None and stored[5] == digest and not stored[6]:
            self._db.execute(
                "UPDATE file SET mtime_ns = ?, size = ? WHERE id = ?",
                (file.mtime_ns, file.size, stored[0]),
            )
            return False
        try:
            document = read_document(name, data)
        except Unreadable as problem:
            return self._store_trouble(file, stored, problem.message)
        self._insert(file, stored, digest, "", document)
        return True

    def _store_trouble(
        self, file: _SourceFile, stored: "tuple[object, ...] | None", reason: str
    ) -> bool:
        self._insert(file, stored, b"", reason, DocumentText(()))
        return False

    def _insert(
        self,
        source_file: _SourceFile,
        stored: "tuple[object, ...] | None",
        digest: bytes,
        trouble: str,
        document: DocumentText,
    ) -> None:
        if stored is not None:
            self._remove(stored[0])
        name = self._unused_name(source_file)
        length = sum(len(page.text) for page in document.pages)
        values = (
            source_file.source,
            source_file.path,
            name,
            source_file.mtime_ns,
            source_file.size,
            digest,
            trouble,
            length,
        )
        file_id = self._db.execute(
            "INSERT INTO file (source, path, name, mtime_ns, size, hash, trouble, length) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            values,
        ).lastrowid
        for passage in passages_of(name, document):
            row = self._db.execute(
                "INSERT INTO passage (file, number, text) VALUES (?, ?, ?)",
                (file_id, passage.number, passage.text),
            ).lastrowid
            self._db.execute(
                "INSERT INTO words (rowid, text) VALUES (?, ?)", (row, segmented(passage.text))
            )

    def _unused_name(self, file: _SourceFile) -> str:
        """Return the name by which a file is cited: its path in its source, longer if another file has it."""
        source_name = file.source.rstrip("/").rpartition("/")[2]
        names = [f"{source_name}/{file.path}", str(Path(file.source, file.path))]
        names.insert(0, file.path or source_name)
        for name in (sanitize_line(name).replace("[", "(").replace("]", ")") for name in names):
            if not self._db.execute("SELECT 1 FROM file WHERE name = ?", (name,)).fetchone():
                return name
        return f"{names[-1]} ({hashlib.sha256(repr(file[:2]).encode()).hexdigest()[:8]})"

    def _remove(self, file: object) -> None:
        rows = self._db.execute("SELECT id, text FROM passage WHERE file = ?", (file,)).fetchall()
        self._db.executemany(
            "INSERT INTO words (words, rowid, text) VALUES ('delete', ?, ?)",
            ((number, segmented(text)) for number, text in rows),
        )
        self._db.execute("DELETE FROM passage WHERE file = ?", (file,))
        self._db.execute("DELETE FROM file WHERE id = ?", (file,))

    def find(self, question: str, limit: int) -> list[Passage]:
        """Return the passages nearest to a question by BM25, in the order of the documents."""
        query = match_query(question)
        if not query:
            return []
        with self._errors():
            return self._passages(
                "WHERE passage.id IN (SELECT rowid FROM words WHERE words MATCH ? ORDER BY rank LIMIT ?)",
                (query, limit),
            )

    def beginnings(self, limit: int) -> list[Passage]:
        """Return the first passages of the first files, for a question without a near passage."""
        with self._errors():
            return self._passages(
                "WHERE passage.id IN (SELECT min(passage.id) FROM passage JOIN file ON file.id = passage.file "
                "GROUP BY file ORDER BY file.name LIMIT ?)",
                (limit,),
            )


def _is_same(file: _SourceFile, stored: "tuple[object, ...] | None") -> bool:
    return stored is not None and (stored[3], stored[4]) == (file.mtime_ns, file.size)
