"""Schema of the history file as numbered migrations. `PRAGMA user_version` counts the applied ones.

Never edit a published migration. Add a new one. A file with a higher version was written by a newer localchat
and is not changed.
"""

import sqlite3
from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

from localchat.history.search_query import segmented

Step: TypeAlias = Callable[[sqlite3.Connection], None]

_TABLES: Final = """
CREATE TABLE conversations (
    number    INTEGER PRIMARY KEY,
    id        TEXT NOT NULL UNIQUE,
    title     TEXT NOT NULL,      -- searchable text (tables.py)
    created_s REAL NOT NULL,      -- seconds since 1970
    updated_s REAL NOT NULL,
    model     BLOB NOT NULL,      -- UTF-8 that may hold lone surrogates
    system    BLOB NOT NULL,
    policy    BLOB NOT NULL,      -- JSON of chat.conversation.Policy
    head      TEXT,
    deleted_s REAL                -- since when it waits to be purged
);
CREATE INDEX conversations_by_time ON conversations (updated_s DESC, id DESC)
    WHERE deleted_s IS NULL;
CREATE INDEX conversations_deleted ON conversations (deleted_s) WHERE deleted_s IS NOT NULL;
CREATE TABLE nodes (
    number       INTEGER PRIMARY KEY,
    id           TEXT NOT NULL UNIQUE,
    conversation TEXT NOT NULL,
    parent       TEXT,
    role         TEXT NOT NULL,
    state        TEXT NOT NULL,
    created_s    REAL NOT NULL,
    content      TEXT NOT NULL,   -- searchable text
    exact        BLOB,            -- the content itself where it differs from that
    rest         BLOB NOT NULL    -- JSON of everything else in chat.conversation.Node
);
CREATE INDEX nodes_of_conversation ON nodes (conversation);
"""

_SEARCH: Final = """
ALTER TABLE nodes ADD COLUMN indexed INTEGER NOT NULL DEFAULT 0;
CREATE INDEX nodes_not_indexed ON nodes (number) WHERE indexed = 0;
CREATE VIRTUAL TABLE message_index USING fts5(
    words, content='', tokenize='unicode61 remove_diacritics 2', prefix='1 2 3'
);
CREATE VIRTUAL TABLE title_index USING fts5(
    words, content='', tokenize='unicode61 remove_diacritics 2', prefix='1 2 3'
);
"""

_DRAFTS: Final = """
CREATE TABLE drafts (
    conversation TEXT PRIMARY KEY,  -- empty: of no conversation yet
    text         BLOB NOT NULL,
    updated_s    REAL NOT NULL
) WITHOUT ROWID;
"""


_MEDIA: Final = """
CREATE TABLE media (
    digest TEXT PRIMARY KEY,  -- SHA-256 of the data
    data   BLOB NOT NULL      -- the encoded file
);
CREATE TABLE media_uses (
    conversation TEXT NOT NULL,
    node         TEXT NOT NULL,
    digest       TEXT NOT NULL,
    PRIMARY KEY (conversation, node, digest)
) WITHOUT ROWID;
CREATE INDEX media_by_node ON media_uses (node);
CREATE INDEX media_by_digest ON media_uses (digest);
"""

_OVERDUE: Final = """
ALTER TABLE conversations ADD COLUMN overdue_s REAL;  -- when a start first saw that its time is over
"""


def _script(connection: sqlite3.Connection, text: str) -> None:
    # `executescript` would commit the surrounding transaction.
    statement = ""
    for line in text.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            connection.execute(statement)
            statement = ""


def _search(connection: sqlite3.Connection) -> None:
    # The index is contentless, because its words differ from the text (search_query.py).
    _script(connection, _SEARCH)
    messages = connection.execute("SELECT number, content FROM nodes WHERE state != 'open'")
    connection.executemany(
        "INSERT INTO message_index (rowid, words) VALUES (?, ?)",
        ((number, segmented(content)) for number, content in messages.fetchall()),
    )
    connection.execute("UPDATE nodes SET indexed = 1 WHERE state != 'open'")
    titles = connection.execute("SELECT number, title FROM conversations")
    connection.executemany(
        "INSERT INTO title_index (rowid, words) VALUES (?, ?)",
        ((number, segmented(title)) for number, title in titles.fetchall()),
    )


STEPS: Final[tuple[Step, ...]] = (
    partial(_script, text=_TABLES),
    _search,
    partial(_script, text=_DRAFTS),
    partial(_script, text=_MEDIA),
    partial(_script, text=_OVERDUE),
)
VERSION: Final = len(STEPS)


def migrate(connection: sqlite3.Connection) -> None:
    """Apply the missing migrations. Call inside a write transaction."""
    version = version_of(connection)
    for number, step in enumerate(STEPS[version:], start=version + 1):
        step(connection)
        connection.execute(f"PRAGMA user_version = {number}")


def version_of(connection: sqlite3.Connection) -> int:
    """Return the number of applied migrations, 0 for a new file."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    assert isinstance(version, int)
    return version
