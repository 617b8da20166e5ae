"""Rows of conversations and nodes: lossless conversion, and writes that update the search index.

SQLite's text cannot store lone surrogates, and its functions stop at NUL. Both are replaced in the searchable
text. If that changes a text, another column stores the original as bytes. Call functions that take a connection
inside a write transaction.
"""

import hashlib
import json
import re
import sqlite3
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from localchat.chat.conversation import Conversation, Node, Policy
from localchat.engine.request import Message
from localchat.history.search_query import segmented

_UNFIT: Final = re.compile("[\0\ud800-\udfff]")
_UNREADABLE: Final = (ValueError, RecursionError, msgspec.ValidationError)


class ConversationRow(NamedTuple):
    """A snapshot of a conversation without its messages, in the order of the table's columns."""

    id: str
    title: str
    created_s: float
    updated_s: float
    model: bytes
    system: bytes
    policy: bytes
    head: str | None


class NodeRow(NamedTuple):
    """A message, in the order of the table's columns."""

    id: str
    conversation: str
    parent: str | None
    role: str
    state: str
    created_s: float
    content: str
    exact: bytes | None
    rest: bytes


class NodeRows(NamedTuple):
    """A message to write."""

    row: NodeRow
    media: Mapping[str, bytes]
    """Bytes of its pictures and recordings, by digest."""


def searchable(text: str) -> str:
    """Replace the characters that SQLite cannot store or search."""
    return _UNFIT.sub("\N{REPLACEMENT CHARACTER}", text)


def packed(text: str) -> bytes:
    """Encode any string, including lone surrogates."""
    return text.encode("utf-8", "surrogatepass")


def unpacked(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def conversation_row(conversation: Conversation, title: str) -> ConversationRow:
    """Return the row of a conversation. title: used if the conversation has none."""
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
    """Return the conversation of a row, without messages."""
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


def node_rows(conversation: str, node: Node) -> NodeRows:
    """Return the rows of a message. Pictures and recordings are replaced by their digests in it."""
    media = {_digest(item.data): item.data for item in node.message.attachments}
    attachments = tuple(
        msgspec.structs.replace(item, data=_digest(item.data).encode())
        for item in node.message.attachments
    )
    message = msgspec.structs.replace(node.message, attachments=attachments)
    return NodeRows(_node_row(conversation, msgspec.structs.replace(node, message=message)), media)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _node_row(conversation: str, node: Node) -> NodeRow:
    content = searchable(node.message.content)
    is_changed = content != node.message.content
    message = msgspec.structs.replace(node.message, content="")
    other_fields = msgspec.structs.replace(node, parent=None, message=message)
    return NodeRow(
        node.id,
        conversation,
        node.parent,
        searchable(node.message.role),
        node.state,
        node.created_s,
        content,
        packed(node.message.content) if is_changed else None,
        _json(other_fields),
    )


def node_from_row(row: NodeRow, media: Mapping[str, bytes]) -> Node:
    """Return the node of a row. If its JSON is unreadable, the node has the text and an error.

    media: bytes by digest. Attachments without bytes are left out.
    """
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
        message=msgspec.structs.replace(
            node.message,
            content=content,
            attachments=tuple(
                msgspec.structs.replace(item, data=media[digest])
                for item in node.message.attachments
                if (digest := item.data.decode("ascii", "replace")) in media
            ),
        ),
    )


def _policy(data: bytes) -> Policy:
    """Return the stored policy. If it is unreadable, the default makes the program ask again."""
    try:
        return msgspec.convert(_parsed(data), Policy)
    except _UNREADABLE:
        return Policy()


def _json(value: object) -> bytes:
    # msgspec's encoder rejects lone surrogates.
    return packed(json.dumps(msgspec.to_builtins(value), ensure_ascii=False))


def _parsed(data: bytes) -> Any:  # noqa: ANN401 - JSON has no type
    return json.loads(unpacked(data))


_CONVERSATION: Final = ", ".join(ConversationRow._fields)
_NODE: Final = ", ".join(NodeRow._fields)
_PLACEHOLDERS: Final = ", ".join("?" for _ in ConversationRow._fields)
_NODE_PLACEHOLDERS: Final = ", ".join("?" for _ in (*NodeRow._fields, "indexed"))
_READ_CONVERSATION: Final = f"SELECT {_CONVERSATION} FROM conversations WHERE id = ?"  # noqa: S608
_READ_NODES: Final = f"SELECT {_NODE} FROM nodes WHERE conversation = ? ORDER BY number"  # noqa: S608
_NEW_CONVERSATION: Final = f"INSERT INTO conversations ({_CONVERSATION}) VALUES ({_PLACEHOLDERS})"  # noqa: S608
_NEW_NODE: Final = f"INSERT INTO nodes ({_NODE}, indexed) VALUES ({_NODE_PLACEHOLDERS})"  # noqa: S608
_NEW_STATE: Final = (
    "UPDATE nodes SET parent = ?, role = ?, state = ?, created_s = ?, content = ?, exact = ?, "
    "rest = ?, indexed = ? WHERE number = ?"
)


def read_conversation(connection: sqlite3.Connection, id_: str) -> ConversationRow | None:
    """Return the row of a conversation. None if it does not exist."""
    stored = connection.execute(_READ_CONVERSATION, (id_,)).fetchone()
    if stored is None:
        return None
    return ConversationRow(*stored)


def read_nodes(connection: sqlite3.Connection, conversation: str) -> list[NodeRow]:
    """Return the rows of all messages of a conversation, oldest first."""
    return [NodeRow(*row) for row in connection.execute(_READ_NODES, (conversation,))]


def write_conversation(
    connection: sqlite3.Connection, row: ConversationRow, before: ConversationRow | None
) -> None:
    """Insert a conversation, or update the fields that differ from `before`.

    before: the row as the caller last read it.
    """
    current = read_conversation(connection, row.id)
    if current is None:
        connection.execute(_NEW_CONVERSATION, row)
        _index_title(connection, row.id, None, row.title)
        return
    changes = {
        name: value
        for name, value in row._asdict().items()
        if before is None or value != getattr(before, name)
    }
    changes["updated_s"] = max(row.updated_s, current.updated_s)
    if before is None and current.title:
        # Another History loaded it, so the stored title may be newer.
        changes.pop("title")
    if "title" in changes:
        _index_title(connection, row.id, current.title, row.title)
    assigned = ", ".join(f"{name} = ?" for name in changes)
    connection.execute(
        f"UPDATE conversations SET {assigned} WHERE id = ?",  # noqa: S608
        (*changes.values(), row.id),
    )


def write_title(connection: sqlite3.Connection, id_: str, title: str) -> None:
    """Rename an existing conversation."""
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


def write_node(connection: sqlite3.Connection, rows: NodeRows) -> None:
    """Insert or update a message. An open message is not indexed, because searches scan its text."""
    row = rows.row
    for digest, data in rows.media.items():
        connection.execute("INSERT OR IGNORE INTO media VALUES (?, ?)", (digest, data))
        connection.execute(
            "INSERT OR IGNORE INTO media_uses VALUES (?, ?, ?)",
            (row.conversation, row.id, digest),
        )
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


def read_media(connection: sqlite3.Connection, conversation: str) -> dict[str, bytes]:
    """Return the bytes of all pictures and recordings of a conversation, by digest."""
    rows = connection.execute(
        "SELECT digest, data FROM media WHERE digest IN "
        "(SELECT digest FROM media_uses WHERE conversation = ?)",
        (conversation,),
    )
    return dict(rows.fetchall())


def _forget_media(connection: sqlite3.Connection, where: str, id_: str) -> None:
    """Delete the media of a conversation or a node that nothing else uses. where: column of the id."""
    uses = connection.execute(f"DELETE FROM media_uses WHERE {where} = ?", (id_,))  # noqa: S608
    if uses.rowcount:
        connection.execute("DELETE FROM media WHERE digest NOT IN (SELECT digest FROM media_uses)")


def undelete(connection: sqlite3.Connection, id_: str) -> None:
    """Undo the deletion of a conversation."""
    connection.execute(
        "UPDATE conversations SET deleted_s = NULL, overdue_s = NULL "
        "WHERE id = ? AND deleted_s IS NOT NULL",
        (id_,),
    )


def may_be_overdue(connection: sqlite3.Connection, deleted_before_s: float) -> bool:
    """Return whether a deletion is older than a time, or was at an earlier start."""
    rows = connection.execute(
        "SELECT 1 FROM conversations WHERE deleted_s < ? "
        "OR (deleted_s IS NOT NULL AND overdue_s IS NOT NULL) LIMIT 1",
        (deleted_before_s,),
    )
    return rows.fetchone() is not None


def mark_overdue(connection: sqlite3.Connection, deleted_before_s: float, now_s: float) -> None:
    """Mark the deletions before a time, and remove marks that this clock contradicts."""
    connection.execute(
        "UPDATE conversations SET overdue_s = NULL "
        "WHERE deleted_s IS NOT NULL AND (deleted_s >= ? OR overdue_s > ?)",
        (deleted_before_s, now_s),
    )
    connection.execute(
        "UPDATE conversations SET overdue_s = ? WHERE deleted_s < ? AND overdue_s IS NULL",
        (now_s, deleted_before_s),
    )


def overdue(connection: sqlite3.Connection, marked_before_s: float) -> list[str]:
    """Return the ids of deleted conversations that were marked before a time."""
    rows = connection.execute(
        "SELECT id FROM conversations WHERE deleted_s IS NOT NULL AND overdue_s < ?",
        (marked_before_s,),
    )
    return [str(id_) for (id_,) in rows]


def erase(connection: sqlite3.Connection, id_: str) -> None:
    """Delete a conversation permanently, with its messages, index entries and draft."""
    (title,) = connection.execute("SELECT title FROM conversations WHERE id = ?", (id_,)).fetchone()
    _index_title(connection, id_, title, None)
    nodes = connection.execute(
        "SELECT number, content FROM nodes WHERE conversation = ? AND indexed = 1", (id_,)
    ).fetchall()
    for number, content in nodes:
        _forget_words(connection, number, content)
    connection.execute("DELETE FROM nodes WHERE conversation = ?", (id_,))
    _forget_media(connection, "conversation", id_)
    connection.execute("DELETE FROM drafts WHERE conversation = ?", (id_,))
    connection.execute("DELETE FROM conversations WHERE id = ?", (id_,))


def remove_message(
    connection: sqlite3.Connection, conversation: str, id_: str, parent: str | None
) -> int:
    """Remove a message and select the path up to `parent`. Return the number of remaining messages."""
    stored = connection.execute(
        "SELECT number, content, indexed FROM nodes WHERE id = ?", (id_,)
    ).fetchone()
    if stored is not None:
        number, content, indexed = stored
        if indexed:
            _forget_words(connection, number, content)
        connection.execute("DELETE FROM nodes WHERE number = ?", (number,))
        _forget_media(connection, "node", id_)
        connection.execute(
            "UPDATE conversations SET head = ? WHERE id = ? AND head = ?",
            (parent, conversation, id_),
        )
    (remaining,) = connection.execute(
        "SELECT count(*) FROM nodes WHERE conversation = ?", (conversation,)
    ).fetchone()
    return int(remaining)


def _forget_words(connection: sqlite3.Connection, number: int | None, content: str) -> None:
    """Delete a text from the contentless index, which requires the inserted words."""
    connection.execute(
        "INSERT INTO message_index (message_index, rowid, words) VALUES ('delete', ?, ?)",
        (number, segmented(content)),
    )
