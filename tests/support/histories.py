"""Writes conversations into a history at once, as the autosave does a moment later."""

import time
from collections.abc import Iterable

from localchat.chat.conversation import Conversation, Node
from localchat.chat.titles import title_for
from localchat.history.store import History
from localchat.history.tables import conversation_row, node_rows


def record(history: History, conversation: Conversation, nodes: Iterable[Node] = ()) -> None:
    """Write a conversation and some of its messages."""
    rows = [node_rows(conversation.id, node) for node in nodes]
    history.write(conversation_row(conversation, title_for(conversation)), rows)


def put_node(history: History, conversation_id: str, node: Node) -> None:
    """Write a message."""
    history.write(None, [node_rows(conversation_id, node)])


def purge_deleted(history: History) -> int:
    """Delete permanently what is deleted, as two starts do after its time. Return the number."""
    later_s = time.time() + 31 * 24 * 3600
    assert history.purge(later_s) == 0
    return history.purge(later_s + 25 * 3600)
