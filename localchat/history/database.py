"""Opens the SQLite file of the history safely, and runs transactions on it.

The write-ahead log lets one connection write while others read. A writer waits up to five seconds for another
one. Committed data survives a killed process. Only the file's owner may read it.
"""

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from localchat.errors import HistoryUnusable, os_errors_as
from localchat.history.migrations import VERSION, migrate, version_of

_BUSY_TIMEOUT_S: Final = 5.0
_BROKEN: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_INCREMENTAL: Final = 2
"""Value of `PRAGMA auto_vacuum`."""
_MIN_FREE_PAGES: Final = 256
_FREE_SHARE: Final = 0.25
_COMPANIONS: Final = ("-wal", "-shm")
_WITHOUT_HISTORY: Final = "a new conversation with --no-history works without it"


class Database:
    """A database file, or a database in memory if `path` is None. Raises HistoryUnusable.

    Thread-safe: one connection reads and another writes, each for one thread at a time.
    """

    def __init__(self, path: Path | None, *, read_only: bool = False) -> None:
        """Open or create the file. `read_only` writes nothing, not even a lock, and every write fails."""
        self.path = path
        self.notice = ""
        """Sentence for the user about a problem while opening, or an empty string."""
        if path is not None and not read_only:
            self.notice = _prepared(path)
        with _sqlite_errors(path):
            if path is not None and read_only:
                self._writer = self._reader = _connected_read_only(path)
            else:
                self._writer = _connected(path)
                self._reader = self._writer if path is None else _connected(path)
        self._depth = 0
        self._writing = threading.RLock()
        self._reading = self._writing if path is None else threading.RLock()
        try:
            with self.read() as connection:
                current = version_of(connection) == VERSION
            if not current:
                with self.write() as connection:
                    migrate(connection)
        except HistoryUnusable:
            self.close()
            raise

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction. A nested transaction is part of the outer one."""
        with self._writing, _sqlite_errors(self.path):
            if self._depth:
                yield self._writer
                return
            self._writer.execute("BEGIN IMMEDIATE")
            self._depth += 1
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise
            finally:
                self._depth -= 1

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        with self._reading, _sqlite_errors(self.path):
            yield self._reader

    def release(self) -> None:
        """Return the space of deleted content to the file system, if it is large."""
        with self._writing, _sqlite_errors(self.path):
            pages, free = (
                self._writer.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("page_count", "freelist_count")
            )
            if self._depth or free < _MIN_FREE_PAGES or free < pages * _FREE_SHARE:
                return
            (mode,) = self._writer.execute("PRAGMA auto_vacuum").fetchone()
            try:
                if mode != _INCREMENTAL:
                    # An older version created the file.
                    self._writer.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
                    self._writer.execute("VACUUM")
                # `execute` stops after the first step of a statement without rows, and would free one page.
                self._writer.executescript("PRAGMA incremental_vacuum")
                self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            except sqlite3.OperationalError:
                # Another program uses the file, or the disk is full. The next release tries again.
                return

    def close(self) -> None:
        """Close both connections. Idempotent."""
        with self._writing, self._reading:
            self._reader.close()
            self._writer.close()


def _connected(path: Path | None) -> sqlite3.Connection:
    connection = sqlite3.connect(
        ":memory:" if path is None else os.fspath(path),
        timeout=_BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
    )
    connection.execute("PRAGMA temp_store = MEMORY")
    if path is None or path.stat().st_size == 0:
        connection.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
    if path is not None:
        _use_write_ahead_log(connection)
        connection.execute("PRAGMA synchronous = NORMAL")
    return connection


def _connected_read_only(path: Path) -> sqlite3.Connection:
    """Connect to a file that cannot be written. Reads its write-ahead log, too."""
    # Without locks and in exclusive mode, SQLite builds the index of the log in memory instead of a file.
    address = f"{path.absolute().as_uri()}?mode=ro&vfs=unix-none"
    connection = sqlite3.connect(address, isolation_level=None, check_same_thread=False, uri=True)
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    return connection


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    # If two programs open a new file at once, SQLite rejects one of them without waiting.
    end = time.monotonic() + _BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as problem:
            if _primary(problem) != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
            time.sleep(0.01)


def _prepared(path: Path) -> str:
    """Create a missing file, reject a newer version, and set aside a damaged file. Return a notice."""
    with os_errors_as(
        HistoryUnusable,
        f"the history {path} cannot be opened",
        hint=_WITHOUT_HISTORY,
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    if _readable(path):
        return ""
    from filelock import FileLock

    with FileLock(f"{path}.lock"):
        return "" if _readable(path) else _set_aside(path)


def _readable(path: Path) -> bool:
    """Return whether the file is a database. Raises HistoryUnusable for newer versions and other errors."""
    try:
        address = f"{path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(address, timeout=_BUSY_TIMEOUT_S, uri=True)) as connection:
            version = version_of(connection)
            connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except sqlite3.DatabaseError as problem:
        if _primary(problem) in _BROKEN:
            return False
        raise _translated(problem, path) from problem
    if version > VERSION:
        raise HistoryUnusable(
            f"the history {path} was written by a newer localchat (version {version}; this one knows "
            f"{VERSION}), and was left as it is",
            hint="update localchat, or use --no-history",
            version=version,
            known_version=VERSION,
        )
    return True


def _set_aside(path: Path) -> str:
    """Rename a damaged file and its companions, and return a notice."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    target = path.with_name(f"{path.name}.broken-{stamp}")
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.broken-{stamp}-{number}")
    with os_errors_as(
        HistoryUnusable,
        f"the history {path} is damaged and cannot be set aside",
        hint="move it away by hand, or use --no-history",
    ):
        for suffix in _COMPANIONS:
            companion = path.with_name(path.name + suffix)
            if companion.exists():
                companion.rename(target.with_name(target.name + suffix))
        path.rename(target)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    return (
        f"the history {path} is damaged: it was set aside as {target.name}, and a new one begins; "
        "what is readable in it can be rescued with sqlite3's .recover"
    )


@contextmanager
def _sqlite_errors(path: Path | None) -> Iterator[None]:
    """Translate SQLite's errors into HistoryUnusable."""
    try:
        yield
    except (sqlite3.Error, UnicodeError) as problem:
        raise _translated(problem, path) from problem


def _translated(problem: Exception, path: Path | None) -> HistoryUnusable:
    hints = {
        sqlite3.SQLITE_BUSY: "another localchat is writing for too long; try again",
        sqlite3.SQLITE_FULL: "the disk is full: make room and try again",
        sqlite3.SQLITE_IOERR: "the disk may be full or failing: make room and try again",
        sqlite3.SQLITE_READONLY: f"the disk is full, or the file is read-only; {_WITHOUT_HISTORY}",
        sqlite3.SQLITE_CORRUPT: "the file is damaged: move it away, or rescue it with sqlite3's .recover",
    }
    return HistoryUnusable(
        f"the history {path or 'in memory'} cannot be used: {problem}",
        hint=hints.get(_primary(problem), _WITHOUT_HISTORY),
    )


def _primary(problem: Exception) -> int:
    """Return SQLite's primary error code, 0 if Python detected the error."""
    return getattr(problem, "sqlite_errorcode", 0) & 0xFF
