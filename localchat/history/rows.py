"""Conversations and nodes as rows, and back, exactly.

SQLite's text cannot hold lone surrogates, and its functions stop at NUL. So what is searched is a text with
both replaced; where that differs from the original, the original lies beside it as bytes.
"""

import json
import re
from typing import Any, Final, NamedTuple

import msgspec

from localchat.chat.conversation import Conversation, Node, Policy
from localchat.engine.request import Message

_UNFIT: Final = re.compile("[\0\ud800-\udfff]")


_UNREADABLE: Final = (ValueError, RecursionError, msgspec.ValidationError)


class Cover(NamedTuple):
    """A conversation without its messages, taken at one moment. Columns of the table, in its order."""

    id: str
    title: str
    created_s: float
    updated_s: float
    model: bytes
    system: bytes
    policy: bytes
    head: str | None


class NodeRow(NamedTuple):
    """A node as its row."""

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


def cover_of(conversation: Conversation, title: str) -> Cover:
    """`title`: what it is called where it has no title of its own."""
    return Cover(
        conversation.id,
        searchable(conversation.title or title),
        conversation.created_s,
        conversation.updated_s,
        packed(conversation.model),
        packed(conversation.system),
        _json(conversation.policy),
        conversation.head,
    )


def opened(cover: Cover) -> Conversation:
    """The conversation of a row, without messages."""
    return Conversation(
        id=cover.id,
        title=cover.title,
        created_s=cover.created_s,
        updated_s=cover.updated_s,
        model=unpacked(cover.model),
        system=unpacked(cover.system),
        policy=_policy(cover.policy),
        head=cover.head,
    )


def row_of(conversation: str, node: Node) -> NodeRow:
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


def node_of(row: NodeRow) -> Node:
    """A message whose rest cannot be read keeps its text, and says so."""
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
    """What cannot be read is no choice: the user is asked again."""
    try:
        return msgspec.convert(_parsed(data), Policy)
    except _UNREADABLE:
        return Policy()


def _json(value: object) -> bytes:
    """Python's writer, because msgspec's refuses lone surrogates."""
    return packed(json.dumps(msgspec.to_builtins(value), ensure_ascii=False))


def _parsed(data: bytes) -> Any:  # noqa: ANN401 - JSON has no type
    return json.loads(unpacked(data))
