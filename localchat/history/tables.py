"""Rows of conversations and nodes: conversion without loss, and writes that keep the search index in step.

SQLite's text cannot hold lone surrogates, and its functions stop at NUL. So the searched text has both
replaced; where it differs from the original, another column holds the original as bytes. Functions that take
a connection are called inside a write transaction.
"""

import json
import re
import sqlite3
from typing import Any, Final, NamedTuple

import msgspec

from localchat.chat.conversation import Conversation, Node, Policy
from localchat.engine.request import Message
from localchat.history.search_query import segmented

_UNFIT: Final = re.compile("[\0\ud800-\udfff]")
_UNREADABLE: Final = (ValueError, RecursionError, msgspec.ValidationError)


class ConversationRow(NamedTuple):
    """A conversation without its messages, at one moment; the table's columns in order."""

    id: str
    title: str
    created_s: float
    updated_s: float
    model: bytes
    system: bytes
    policy: bytes
    head: str | None


class NodeRow(NamedTuple):
    """A message; the table's columns in order."""

    id: str
    conversation: str
    parent: str | None
    role: str
    state: str
    created_s: float
    content: str
    exact: bytes | None
    rest: bytes


def searchable(text: str) -> str:
    """`text` as SQLite can hold and search it."""
    return _UNFIT.sub("\N{REPLACEMENT CHARACTER}", text)


def packed(text: str) -> bytes:
    """Any string as bytes, lone surrogates included."""
    return text.encode("utf-8", "surrogatepass")


def unpacked(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def conversation_row(conversation: Conversation, title: str) -> ConversationRow:
    """The row of a conversation. `title`: for one without a title of its own."""
    return ConversationRow(
        conversation.id,
        searchable(conversation.title or title),
        conversation.created_s,
        conversation.updated_s,
        packed(conversation.model),
        packed(conversation.system),
        _json(conversation.policy),
        conversation.head,
    )


def conversation_from_row(row: ConversationRow) -> Conversation:
    """The conversation of a row, without messages."""
    return Conversation(
        id=row.id,
        title=row.title,
        created_s=row.created_s,
        updated_s=row.updated_s,
        model=unpacked(row.model),
        system=unpacked(row.system),
        policy=_policy(row.policy),
        head=row.head,
    )


def node_row(conversation: str, node: Node) -> NodeRow:
    content = searchable(node.message.content)
    changed = content != node.message.content
    rest = msgspec.structs.replace(
        node,
        parent=None,
        message=msgspec.structs.replace(node.message, content=""),
    )
    return NodeRow(
        node.id,
        conversation,
        node.parent,
        searchable(node.message.role),
        node.state,
        node.created_s,
        content,
        packed(node.message.content) if changed else None,
        _json(rest),
    )


def node_from_row(row: NodeRow) -> Node:
    """The node of a row; where its JSON cannot be read it keeps the text and has an error."""
    try:
        node = msgspec.convert(_parsed(row.rest), Node)
    except _UNREADABLE:
        node = Node(
            row.id,
            row.parent,
            Message(row.role),
            "failed",
            row.created_s,
            error="the rest of this message cannot be read from the history",
        )
    content = row.content if row.exact is None else unpacked(row.exact)
    return msgspec.structs.replace(
        node,
        parent=row.parent,
        message=msgspec.structs.replace(node.message, content=content),
    )


def _policy(data: bytes) -> Policy:
    """The stored policy; where it cannot be read the user is asked again."""
    try:
        return msgspec.convert(_parsed(data), Policy)
    except _UNREADABLE:
        return Policy()


def _json(value: object) -> bytes:
    """Python's writer, because msgspec's refuses lone surrogates."""
    return packed(json.dumps(msgspec.to_builtins(value), ensure_ascii=False))


def _parsed(data: bytes) -> Any:  # noqa: ANN401 - JSON has no type
    return json.loads(unpacked(data))


_CONVERSATION: Final = ", ".join(ConversationRow._fields)
_NODE: Final = ", ".join(NodeRow._fields)
_MARKS: Final = ", ".join("?" for _ in ConversationRow._fields)
_NODE_MARKS: Final = ", ".join("?" for _ in (*NodeRow._fields, "indexed"))
_READ_CONVERSATION: Final = f"SELECT {_CONVERSATION} FROM conversations WHERE id = ?"  # noqa: S608
_NEW_CONVERSATION: Final = f"INSERT INTO conversations ({_CONVERSATION}) VALUES ({_MARKS})"  # noqa: S608
_NEW_NODE: Final = f"INSERT INTO nodes ({_NODE}, indexed) VALUES ({_NODE_MARKS})"  # noqa: S608
_NEW_STATE: Final = (
    "UPDATE nodes SET parent = ?, role = ?, state = ?, created_s = ?, content = ?, exact = ?, "
    "rest = ?, indexed = ? WHERE number = ?"
)


def write_conversation(
    connection: sqlite3.Connection, row: ConversationRow, before: ConversationRow | None
) -> None:
    """Insert a conversation, or update what differs from `before`, its state when the writer last read it."""
    stored = connection.execute(_READ_CONVERSATION, (row.id,)).fetchone()
    if stored is None:
        connection.execute(_NEW_CONVERSATION, row)
        _index_title(connection, row.id, None, row.title)
        return
    there = ConversationRow(*stored)
    changes = {
        name: value
        for name, value in row._asdict().items()
        if before is None or value != getattr(before, name)
    }
    changes["updated_s"] = max(row.updated_s, there.updated_s)
    if before is None and there.title:
        # It came from another History, so the stored title may be newer than this one.
        changes.pop("title")
    if "title" in changes:
        _index_title(connection, row.id, there.title, row.title)
    assigned = ", ".join(f"{name} = ?" for name in changes)
    connection.execute(
        f"UPDATE conversations SET {assigned} WHERE id = ?",  # noqa: S608
        (*changes.values(), row.id),
    )


def write_title(connection: sqlite3.Connection, id_: str, title: str) -> None:
    """Rename a conversation that exists."""
    (before,) = connection.execute(
        "SELECT title FROM conversations WHERE id = ?", (id_,)
    ).fetchone()
    _index_title(connection, id_, before, title)
    connection.execute("UPDATE conversations SET title = ? WHERE id = ?", (title, id_))


def _index_title(
    connection: sqlite3.Connection, id_: str, before: str | None, after: str | None
) -> None:
    (number,) = connection.execute(
        "SELECT number FROM conversations WHERE id = ?", (id_,)
    ).fetchone()
    if before is not None:
        connection.execute(
            "INSERT INTO title_index (title_index, rowid, words) VALUES ('delete', ?, ?)",
            (number, segmented(before)),
        )
    if after is not None:
        connection.execute(
            "INSERT INTO title_index (rowid, words) VALUES (?, ?)", (number, segmented(after))
        )


def write_node(connection: sqlite3.Connection, row: NodeRow) -> None:
    """Insert or update a message. One that is still open is not indexed; searches scan its text."""
    indexed = row.state != "open"
    stored = connection.execute(
        "SELECT number, content, indexed FROM nodes WHERE id = ?", (row.id,)
    ).fetchone()
    if stored is None:
        number = connection.execute(_NEW_NODE, (*row, indexed)).lastrowid
        before = ""
        was_indexed = False
    else:
        number, before, was_indexed = stored
        _, _, *state = row
        connection.execute(_NEW_STATE, (*state, indexed, number))
    if indexed and was_indexed and before == row.content:
        return
    if was_indexed:
        _forget_words(connection, number, before)
    if indexed:
        connection.execute(
            "INSERT INTO message_index (rowid, words) VALUES (?, ?)",
            (number, segmented(row.content)),
        )


def undelete(connection: sqlite3.Connection, id_: str) -> None:
    """Undo a deletion: somebody continues the conversation."""
    connection.execute(
        "UPDATE conversations SET deleted_s = NULL WHERE id = ? AND deleted_s IS NOT NULL", (id_,)
    )


def deleted_before(connection: sqlite3.Connection, moment_s: float) -> list[str]:
    """Ids of conversations deleted before a moment."""
    rows = connection.execute("SELECT id FROM conversations WHERE deleted_s < ?", (moment_s,))
    return [str(id_) for (id_,) in rows]


def erase(connection: sqlite3.Connection, id_: str) -> None:
    """Remove a conversation for good, with its messages, index entries and draft."""
    (title,) = connection.execute("SELECT title FROM conversations WHERE id = ?", (id_,)).fetchone()
    _index_title(connection, id_, title, None)
    nodes = connection.execute(
        "SELECT number, content FROM nodes WHERE conversation = ? AND indexed = 1", (id_,)
    ).fetchall()
    for number, content in nodes:
        _forget_words(connection, number, content)
    connection.execute("DELETE FROM nodes WHERE conversation = ?", (id_,))
    connection.execute("DELETE FROM drafts WHERE conversation = ?", (id_,))
    connection.execute("DELETE FROM conversations WHERE id = ?", (id_,))


def remove_message(
    connection: sqlite3.Connection, conversation: str, id_: str, parent: str | None
) -> int:
    """Remove a message and show the path up to `parent`. Returns how many messages are left."""
    stored = connection.execute(
        "SELECT number, content, indexed FROM nodes WHERE id = ?", (id_,)
    ).fetchone()
    if stored is not None:
        number, content, indexed = stored
        if indexed:
            _forget_words(connection, number, content)
        connection.execute("DELETE FROM nodes WHERE number = ?", (number,))
        connection.execute(
            "UPDATE conversations SET head = ? WHERE id = ? AND head = ?",
            (parent, conversation, id_),
        )
    (left,) = connection.execute(
        "SELECT count(*) FROM nodes WHERE conversation = ?", (conversation,)
    ).fetchone()
    return int(left)


def _forget_words(connection: sqlite3.Connection, number: int | None, content: str) -> None:
    """Delete a text from the contentless index, which needs the words that were inserted."""
    connection.execute(
        "INSERT INTO message_index (message_index, rowid, words) VALUES ('delete', ?, ?)",
        (number, segmented(content)),
    )
