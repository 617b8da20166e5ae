"""One collection of documents: an SQLite file with the passages of its files and an index of their words.

Only the owner may read the file. What it was made of is looked at again by date and size, then by hash, so
that unchanged files are not read twice.
"""

import hashlib
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, Final, NamedTuple, TypeAlias

from localchat.documents.binary_kind import binary_kind
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
from localchat.errors import FileMissing, LocalchatError, UsageError, reason
from localchat.history.search_query import segmented
from localchat.sanitize import sanitize_line

Embed = Callable[[str, Sequence[str]], list[list[float]]]
"""Vectors of texts by the embedding model of this name. Raises LocalchatError."""
Fetch = Callable[[str], tuple[str, bytes]]
"""Name and bytes of what a URL holds. Raises LocalchatError."""
_VERSION: Final = 1
_CANDIDATES: Final = 50
_FUSION: Final = 60
"""Rank at which a passage counts half as much as the first, where two rankings are joined."""
_EMBEDDED_AT_ONCE: Final = 1024
_COMMIT_EVERY_S: Final = 2.0
_HINTS: Final = {
    sqlite3.SQLITE_BUSY: "another localchat reads them: try again",
    sqlite3.SQLITE_LOCKED: "another localchat reads them: try again",
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


_DOCUMENT_KINDS: Final = {".pdf": "PDF", ".docx": "DOCX", ".html": "HTML", ".htm": "HTML"}
"""Kinds that a user expects to be read, by suffix."""


class Summary(NamedTuple):
    """What a collection holds."""

    sources: tuple[str, ...]
    files: int
    length: int
    """Characters of all texts."""
    skipped: dict[str, int]
    """Files that could not be read, by reason."""
    embedding_model: str


class UnreadKind(NamedTuple):
    """A kind of document of which no file could be read."""

    kind: str
    """`PDF`, `DOCX` or `HTML`."""
    files: int
    reason: str
    """The most frequent one, as the end of a sentence that names a file."""


class Changes(NamedTuple):
    """What reading a collection again did."""

    read: int
    unchanged: int
    removed: int


_Rows: TypeAlias = dict[tuple[str, str], tuple[Any, ...]]
"""Files as they were read, by source and path."""


class _Found(NamedTuple):
    """A file of a source, as it is now."""

    source: str
    path: str
    mtime_ns: int
    size: int


class Collection:
    """An open collection. For one thread at a time; raises LocalchatError. Close it."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Raises UsageError if there is none and `create` is false, LocalchatError if it cannot be opened."""
        self.path = path
        self.name = path.stem
        if create:
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            except OSError as problem:
                raise LocalchatError(f"{path} cannot be written: {reason(problem)}") from problem
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
        """Idempotent."""
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
            # The first byte of the code is SQLite's error; the others say more about it.
            code = getattr(problem, "sqlite_errorcode", 0) & 0xFF
            again = f"localchat learn --forget {self.name} removes them; then learn them again"
            raise LocalchatError(
                f"the documents @{self.name} cannot be used: {problem}",
                hint=_HINTS.get(code, again),
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

    # ------------------------------------------------------------------ what it holds

    def summary(self) -> Summary:
        """Sources, sizes and what was skipped."""
        with self._errors():
            files, length = self._db.execute(
                "SELECT count(*), coalesce(sum(length), 0) FROM file WHERE trouble = ''"
            ).fetchone()
            skipped = self._db.execute(
                "SELECT trouble, count(*) FROM file WHERE trouble != '' GROUP BY trouble ORDER BY trouble"
            )
            return Summary(self._sources(), files, length, dict(skipped), self.embedding_model)

    def unread_kinds(self) -> list[UnreadKind]:
        """Return the kinds of documents of which no file could be read."""
        with self._errors():
            rows = self._db.execute("SELECT path, trouble FROM file").fetchall()
        troubles: dict[str, list[str]] = {}
        for path, trouble in rows:
            if kind := _DOCUMENT_KINDS.get(PurePath(path).suffix.lower()):
                troubles.setdefault(kind, []).append(trouble)
        return [
            UnreadKind(kind, len(reasons), Counter(reasons).most_common(1)[0][0])
            for kind, reasons in sorted(troubles.items())
            if all(reasons)
        ]

    @property
    def embedding_model(self) -> str:
        """The model of the vectors; empty: there are none."""
        row = self._db.execute("SELECT value FROM about WHERE key = 'embedding_model'").fetchone()
        return str(row[0]) if row else ""

    def _sources(self) -> tuple[str, ...]:
        return tuple(row[0] for row in self._db.execute("SELECT place FROM source ORDER BY place"))

    def passages(self) -> list[Passage]:
        """All passages, in an order that is always the same."""
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

    # ------------------------------------------------------------------ reading

    def learn(
        self,
        sources: Sequence[str] = (),
        *,
        fetch: Fetch | None = None,
        embed: Embed | None = None,
        embedding_model: str | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Changes:
        """Add sources (absolute paths or URLs), and read what has changed in all of them.

        `fetch=None`: URLs stay as they are. `embedding_model`: from now on; `none`: no vectors. A source that
        is gone keeps what was read of it. Raises FileMissing for a new source that is not there."""
        with self._errors():
            for place in sources:
                if not is_url(place) and not Path(place).exists():
                    raise FileMissing(f"there is no file or folder {place}")
            known = {
                (row[1], row[2]): row
                for row in self._db.execute(
                    "SELECT id, source, path, mtime_ns, size, hash, trouble FROM file"
                )
            }
            places = [*dict.fromkeys((*self._sources(), *sources))]
            found, kept = self._found(places, known)
            stale = [one for one in found if not _is_same(one, known.get((one.source, one.path)))]
            urls = [place for place in places if is_url(place) and fetch is not None]
            gone = [row for key, row in known.items() if key not in kept]
            if not (
                stale
                or urls
                or gone
                or embedding_model is not None
                or set(places) - set(self._sources())
            ):
                return Changes(0, len(found), 0)
            self._db.execute("BEGIN IMMEDIATE")
            try:
                for place in sources:
                    self._db.execute("INSERT OR IGNORE INTO source VALUES (?)", (place,))
                for row in gone:
                    self._remove(row[0])
                read = self._read_files(stale, known, progress)
                for place in urls:
                    assert fetch is not None
                    read += self._store(
                        _Found(place, "", 0, 0), *fetch(place), known.get((place, ""))
                    )
                self._embed(embed, embedding_model)
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            return Changes(read, len(found) - len(stale), len(gone))

    def _read_files(
        self, stale: Sequence[_Found], known: _Rows, progress: Callable[[int, int], None]
    ) -> int:
        """Read files within a transaction, which is committed now and then: a kill loses little."""
        read = 0
        due_s = time.monotonic() + _COMMIT_EVERY_S
        for number, one in enumerate(stale):
            progress(number, len(stale))
            read += self._read_file(one, known.get((one.source, one.path)))
            if time.monotonic() > due_s:
                self._db.execute("COMMIT")
                self._db.execute("BEGIN IMMEDIATE")
                due_s = time.monotonic() + _COMMIT_EVERY_S
        return read

    def _found(
        self, places: Sequence[str], known: _Rows
    ) -> tuple[list[_Found], set[tuple[str, str]]]:
        """The files of all sources, and the keys of those that stay."""
        found: list[_Found] = []
        kept: set[tuple[str, str]] = set()
        for place in places:
            root = Path(place)
            if is_url(place) or not root.exists():  # perhaps on a disk that is not here now
                kept.update(key for key in known if key[0] == place)
                continue
            for name in find_files(root) if root.is_dir() else ("",):
                try:
                    stat = (root / name).stat()
                except OSError:
                    continue
                found.append(_Found(place, name, stat.st_mtime_ns, stat.st_size))
        kept.update((one.source, one.path) for one in found)
        return found, kept

    def _read_file(self, one: _Found, known: "tuple[object, ...] | None") -> bool:
        """Read a file whose date or size has changed. False if its content is the same."""
        path = Path(one.source, one.path)
        try:
            with path.open("rb") as file:
                head = file.read(8192)
                if kind_of(path.name, head) == "binary":
                    return self._store_trouble(one, known, f"is {binary_kind(path.name, head)}")
                data = head + file.read(MAX_FILE_BYTES + 1 - len(head))
        except OSError as problem:
            return self._store_trouble(one, known, f"cannot be read: {problem.strerror}")
        return self._store(one, path.name, data, known)

    def _store(
        self, one: _Found, name: str, data: bytes, known: "tuple[object, ...] | None"
    ) -> bool:
        digest = hashlib.sha256(data).digest()
        if known is not None and known[5] == digest and not known[6]:
            self._db.execute(
                "UPDATE file SET mtime_ns = ?, size = ? WHERE id = ?",
                (one.mtime_ns, one.size, known[0]),
            )
            return False
        try:
            document = read_document(name, data)
        except Unreadable as problem:
            if "extra" in problem.details:
                one = one._replace(mtime_ns=-1)  # the library may be there the next time
            hint = f" ({problem.hint})" if problem.hint else ""
            return self._store_trouble(one, known, f"{problem.message}{hint}")
        self._insert(one, known, digest, "", document)
        return True

    def _store_trouble(self, one: _Found, known: "tuple[object, ...] | None", reason: str) -> bool:
        self._insert(one, known, b"", reason, DocumentText(()))
        return False

    def _insert(
        self,
        one: _Found,
        known: "tuple[object, ...] | None",
        digest: bytes,
        trouble: str,
        document: DocumentText,
    ) -> None:
        if known is not None:
            self._remove(known[0])
        name = self._unused_name(one)
        length = sum(len(page.text) for page in document.pages)
        values = (one.source, one.path, name, one.mtime_ns, one.size, digest, trouble, length)
        file = self._db.execute(
            "INSERT INTO file (source, path, name, mtime_ns, size, hash, trouble, length) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            values,
        ).lastrowid
        for passage in passages_of(name, document):
            row = self._db.execute(
                "INSERT INTO passage (file, number, text) VALUES (?, ?, ?)",
                (file, passage.number, passage.text),
            ).lastrowid
            self._db.execute(
                "INSERT INTO words (rowid, text) VALUES (?, ?)", (row, segmented(passage.text))
            )

    def _unused_name(self, one: _Found) -> str:
        """The name by which a file is cited: its path in its source, longer where two would be alike."""
        last = one.source.rstrip("/").rpartition("/")[2]
        inside = one.path or (one.source.partition("://")[2] if is_url(one.source) else last)
        names = (inside, f"{last}/{one.path}", str(Path(one.source, one.path)))
        for name in (sanitize_line(name).replace("[", "(").replace("]", ")") for name in names):
            if not self._db.execute("SELECT 1 FROM file WHERE name = ?", (name,)).fetchone():
                return name
        return f"{names[-1]} ({hashlib.sha256(repr(one[:2]).encode()).hexdigest()[:8]})"

    def _remove(self, file: object) -> None:
        rows = self._db.execute("SELECT id, text FROM passage WHERE file = ?", (file,)).fetchall()
        self._db.executemany(
            "INSERT INTO words (words, rowid, text) VALUES ('delete', ?, ?)",
            ((number, segmented(text)) for number, text in rows),
        )
        self._db.execute("DELETE FROM passage WHERE file = ?", (file,))
        self._db.execute("DELETE FROM file WHERE id = ?", (file,))

    # ------------------------------------------------------------------ vectors

    def _embed(self, embed: Embed | None, chosen: str | None) -> None:
        """Give the passages without a vector one. `chosen`: the model from now on; `none`: no model."""
        wanted = self.embedding_model if chosen is None else "" if chosen == "none" else chosen
        if wanted != self.embedding_model:
            self._db.execute("UPDATE passage SET vector = NULL")
            self._db.execute(
                "INSERT OR REPLACE INTO about VALUES ('embedding_model', ?)", (wanted,)
            )
        model = wanted
        if not model or embed is None:
            return
        import numpy as np

        rows = self._db.execute("SELECT id, text FROM passage WHERE vector IS NULL").fetchall()
        for at in range(0, len(rows), _EMBEDDED_AT_ONCE):
            part = rows[at : at + _EMBEDDED_AT_ONCE]
            vectors = embed(model, [text for _, text in part])
            for (number, _), vector in zip(part, vectors, strict=True):
                blob = np.asarray(vector, np.float16).tobytes()
                self._db.execute("UPDATE passage SET vector = ? WHERE id = ?", (blob, number))

    # ------------------------------------------------------------------ retrieval

    def find(
        self, question: str, most: int, vector: Sequence[float] | None = None
    ) -> list[Passage]:
        """The passages nearest to a question, in the order of the documents.

        By BM25; with the vector of the question (of `embedding_model`) by both, their ranks joined."""
        with self._errors():
            scores: dict[int, float] = {}
            for ranking in (self._by_words(question), self._by_vector(vector)):
                for rank, number in enumerate(ranking):
                    scores[number] = scores.get(number, 0.0) + 1 / (_FUSION + rank)
            best = sorted(scores, key=lambda number: (-scores[number], number))[:most]
            holes = ", ".join("?" * len(best))
            return self._passages(f"WHERE passage.id IN ({holes})", best)

    def beginnings(self, most: int) -> list[Passage]:
        """The first passages of the first files, for a question that no passage is near to."""
        with self._errors():
            return self._passages(
                "WHERE passage.id IN (SELECT min(passage.id) FROM passage JOIN file ON file.id = passage.file "
                "GROUP BY file ORDER BY file.name LIMIT ?)",
                (most,),
            )

    def _by_words(self, question: str) -> list[int]:
        query = match_query(question)
        if not query:
            return []
        rows = self._db.execute(
            "SELECT rowid FROM words WHERE words MATCH ? ORDER BY rank LIMIT ?",
            (query, _CANDIDATES),
        )
        return [row[0] for row in rows]

    def _by_vector(self, vector: Sequence[float] | None) -> list[int]:
        if vector is None:
            return []
        import numpy as np

        rows = self._db.execute(
            "SELECT id, vector FROM passage WHERE vector IS NOT NULL"
        ).fetchall()
        rows = [row for row in rows if len(row[1]) == 2 * len(vector)]
        if not rows:
            return []
        matrix = np.frombuffer(b"".join(row[1] for row in rows), np.float16).reshape(len(rows), -1)
        near = matrix.astype(np.float32) @ np.asarray(vector, np.float32)
        return [rows[at][0] for at in np.argsort(-near, kind="stable")[:_CANDIDATES]]


def is_url(place: str) -> bool:
    """Whether a source is fetched."""
    return place.startswith(("http://", "https://"))


def _is_same(one: _Found, known: "tuple[object, ...] | None") -> bool:
    return known is not None and (known[3], known[4]) == (one.mtime_ns, one.size)
