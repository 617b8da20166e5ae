"""Queries of the history: lists of conversations and full-text search."""

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from localchat.history.search_query import Query, Snippet, parse, snippet
from localchat.history.tables import searchable, unpacked

_SUMMARY: Final = (
    "SELECT c.id, c.title, c.updated_s, c.model, "
    "(SELECT count(*) FROM nodes n WHERE n.conversation = c.id), c.created_s FROM conversations c "
)
_HAS_MESSAGES: Final = "EXISTS (SELECT 1 FROM nodes n WHERE n.conversation = c.id)"
_NOT_DELETED: Final = "c.deleted_s IS NULL"
_NODES: Final = (
    "SELECT n.conversation, n.id, n.content FROM nodes n "
    "JOIN conversations c ON c.id = n.conversation AND c.deleted_s IS NULL "
)
_INDEXED: Final = (
    "SELECT n.conversation, n.id, n.content FROM message_index f JOIN nodes n ON n.number = f.rowid "
    "JOIN conversations c ON c.id = n.conversation AND c.deleted_s IS NULL "
)
_TITLES: Final = "SELECT c.id, c.title FROM conversations c "
_INDEXED_TITLES: Final = (
    "SELECT c.id, c.title FROM title_index f JOIN conversations c ON c.number = f.rowid "
)


class ConversationSummary(NamedTuple):
    """A conversation in a list."""

    id: str
    title: str
    updated_s: float
    model: str
    """Name by which the user chose the model."""
    messages: int
    """Number of messages in all branches."""
    created_s: float


class SearchHit(NamedTuple):
    """A conversation that matches a search."""

    summary: ConversationSummary
    snippet: str
    node_id: str | None
    """The matching message. None if only the title matches."""
    marks: tuple[tuple[int, int], ...]
    """(start, end) of each match in the snippet, in characters."""


class _Match(NamedTuple):
    conversation: str
    node: str | None
    text: str


def list_summaries(connection: sqlite3.Connection, limit: int) -> list[ConversationSummary]:
    """Return the conversations with messages, newest first."""
    where = f"WHERE {_NOT_DELETED} AND {_HAS_MESSAGES} "
    rows = connection.execute(
        f"{_SUMMARY}{where}ORDER BY c.updated_s DESC, c.id DESC LIMIT ?", (limit,)
    )
    return [_summary(row) for row in rows]


def last_summary(connection: sqlite3.Connection) -> ConversationSummary | None:
    """Return the conversation with the newest message.

    Messages are numbered as they are written. Their times depend on a clock that may have been wrong.
    """
    row = connection.execute(f"{_NODES}ORDER BY n.number DESC LIMIT 1").fetchone()
    if row is None:
        return None
    return summary_by_id(connection, row[0])


def summary_by_id(connection: sqlite3.Connection, id_: str) -> ConversationSummary:
    return _summary(connection.execute(f"{_SUMMARY}WHERE c.id = ?", (id_,)).fetchone())


def _summary(row: Sequence[object]) -> ConversationSummary:
    id_, title, updated_s, model, messages, created_s = row
    assert isinstance(id_, str) and isinstance(title, str) and isinstance(model, bytes)
    assert isinstance(updated_s, float) and isinstance(messages, int)
    assert isinstance(created_s, float)
    return ConversationSummary(id_, title, updated_s, unpacked(model), messages, created_s)


def search(connection: sqlite3.Connection, text: str, limit: int) -> list[SearchHit]:
    """Return up to `limit` conversations, newest first, each with its newest matching message."""
    query = parse(searchable(text))
    if not query.parts:
        return []
    best: dict[str, _Match] = {}
    for source in (_unfinished, _indexed, _by_title):
        conversations: set[str] = set()
        for match in source(connection, query):
            best.setdefault(match.conversation, match)
            conversations.add(match.conversation)
            if len(conversations) >= limit:
                break
    hits = [_hit(connection, match, query) for match in best.values()]
    hits.sort(key=lambda hit: (hit.summary.updated_s, hit.summary.id), reverse=True)
    return hits[:limit]


def _hit(connection: sqlite3.Connection, match: _Match, query: Query) -> SearchHit:
    shown: Snippet = snippet(match.text, query.parts)
    return SearchHit(
        summary_by_id(connection, match.conversation), shown.text, match.node, shown.marks
    )


def _indexed(connection: sqlite3.Connection, query: Query) -> Iterator[_Match]:
    """Yield indexed messages, newest first. If the query has no words, scan their text."""
    if not query.match:
        yield from _scanned(connection, "n.indexed = 1", query.plain)
        return
    where = "WHERE f.message_index MATCH ? " + _likes("n.content", query.like)
    rows = connection.execute(
        _INDEXED + where + "ORDER BY f.rowid DESC", (query.match, *query.like)
    )
    yield from (_Match(*row) for row in rows)


def _unfinished(connection: sqlite3.Connection, query: Query) -> Iterator[_Match]:
    """Yield messages that are not indexed, because they are incomplete or their program was killed."""
    yield from _scanned(connection, "n.indexed = 0", query.plain)


def _scanned(
    connection: sqlite3.Connection, where: str, patterns: tuple[str, ...]
) -> Iterator[_Match]:
    likes = _likes("n.content", patterns)
    rows = connection.execute(f"{_NODES}WHERE {where} {likes}ORDER BY n.number DESC", patterns)
    yield from (_Match(*row) for row in rows)


def _by_title(connection: sqlite3.Connection, query: Query) -> Iterator[_Match]:
    where = f"{_NOT_DELETED} AND {_HAS_MESSAGES} {_likes('c.title', query.like)}"
    values = list(query.like)
    if query.match:
        statement = f"{_INDEXED_TITLES}WHERE f.title_index MATCH ? AND {where}"
        values.insert(0, query.match)
    else:
        statement = f"{_TITLES}WHERE {where}"
    rows = connection.execute(statement + "ORDER BY c.updated_s DESC", values)
    yield from (_Match(id_, None, title) for id_, title in rows)


def _likes(column: str, patterns: tuple[str, ...]) -> str:
    return f"AND {column} LIKE ? ESCAPE '\\' " * len(patterns)
