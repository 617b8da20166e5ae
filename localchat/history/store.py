"""History: the conversations on disk, as front ends use them.

Programs that write at the same time never overwrite each other: nodes have ids of their own and are written
by their maker, and of a conversation only what changed here is written.
"""

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, TypeAlias

from localchat.chat.conversation import Conversation, Node
from localchat.chat.titles import title_for
from localchat.errors import UsageError
from localchat.history.database import Database
from localchat.history.queries import (
    ConversationSummary,
    SearchHit,
    list_summaries,
    search,
    summary_by_id,
)
from localchat.history.tables import (
    ConversationRow,
    NodeRow,
    conversation_from_row,
    conversation_row,
    deleted_before,
    erase,
    node_from_row,
    node_row,
    packed,
    remove_message,
    searchable,
    undelete,
    unpacked,
    write_conversation,
    write_node,
    write_title,
)

_KEPT_S: Final = 30 * 24 * 3600.0
"""How long a deleted conversation can be restored."""
_SHORTEST_PREFIX: Final = 4
_LARGE_TEXT: Final = 256 << 10
"""Characters of a message whose space is released at once."""
_CONVERSATION: Final = ", ".join(ConversationRow._fields)
_NODE: Final = ", ".join(NodeRow._fields)


Summaries: TypeAlias = list[ConversationSummary]
Hits: TypeAlias = list[SearchHit]
"""Named here, because `History.list` hides the type in the class."""


class Purged(NamedTuple):
    """How much was deleted for good."""

    conversations: int


class History:
    """A file of conversations. Callable from any thread; every method may raise HistoryUnusable."""

    def __init__(self, database: Database, kv_folder: Path | None = None) -> None:
        self._database = database
        self._kv_folder = kv_folder
        self._known: dict[str, ConversationRow] = {}

    @classmethod
    def open(cls, path: Path | None, kv_folder: Path | None = None) -> "History":
        """Open or make the history in `path`; None: in memory, gone at the end.

        `kv_folder`: where the KV of conversations is kept, which goes with them. Raises HistoryUnusable, also
        for a file of a newer version, which is left as it is.
        """
        history = cls(Database(path), kv_folder)
        history.purge(time.time() - _KEPT_S)
        return history

    @property
    def notice(self) -> str:
        """A sentence for the user about the opening (a damaged file was set aside), or empty."""
        return self._database.notice

    def close(self) -> None:
        """Idempotent."""
        self._database.close()

    def __enter__(self) -> "History":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ writing

    def save(self, conversation: Conversation) -> None:
        """Write title, model, policy and head of a conversation, not its messages."""
        self.write(conversation_row(conversation, title_for(conversation)), ())

    def put(self, conversation_id: str, node: Node) -> None:
        """Write one message, new or changed."""
        self.write(None, (node_row(conversation_id, node),))

    def append(self, conversation: Conversation, nodes: Iterable[Node]) -> None:
        """Write a conversation and these of its messages, in one transaction."""
        rows = [node_row(conversation.id, node) for node in nodes]
        self.write(conversation_row(conversation, title_for(conversation)), rows)

    def write(self, conversation: ConversationRow | None, nodes: Iterable[NodeRow]) -> None:
        """Write rows in one transaction. A conversation that gets a message is restored if it was deleted."""
        with self._database.write() as connection:
            if conversation is not None:
                write_conversation(connection, conversation, self._known.get(conversation.id))
            for node in nodes:
                write_node(connection, node)
                undelete(connection, node.conversation)
        if conversation is not None:
            self._known[conversation.id] = conversation

    def withdraw(self, conversation_id: str, node: Node) -> None:
        """Remove a message that nothing follows; the conversation too if it was the only one."""
        is_large = len(node.message.content) > _LARGE_TEXT
        with self._database.write() as connection:
            if not remove_message(connection, conversation_id, node.id, node.parent):
                erase(connection, conversation_id)
                self._known.pop(conversation_id, None)
            if is_large:  # the search index keeps deleted words until it is merged
                connection.execute("INSERT INTO message_index (message_index) VALUES ('optimize')")
        if is_large:
            self._database.release()

    # ------------------------------------------------------------------ reading

    def find(self, id_or_prefix: str, *, deleted: bool = False) -> str:
        """Return the full id for a prefix, of a deleted conversation if asked for.

        Raises UsageError for none, for several, and for fewer than four digits."""
        prefix = searchable(id_or_prefix.strip().lower())
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT id FROM conversations WHERE id >= ? AND id < ? AND (deleted_s IS NULL) = ? LIMIT 6",
                (prefix, prefix + "g", not deleted),
            ).fetchall()
        ids = [str(id_) for (id_,) in rows]
        if prefix in ids:
            return prefix
        if ids and len(prefix) < _SHORTEST_PREFIX:
            raise UsageError(
                f"{id_or_prefix!r} is too short for the id of a conversation",
                hint=f"write its first {_SHORTEST_PREFIX} digits or more; localchat history list shows them",
            )
        if not ids and deleted:
            raise UsageError(
                f"no removed conversation begins with {id_or_prefix!r}",
                hint="removed conversations are deleted for good after thirty days",
            )
        if not ids:
            raise UsageError(
                f"there is no conversation {id_or_prefix!r}",
                hint="localchat history list shows them; the first digits of an id are enough",
            )
        if len(ids) > 1:
            raise UsageError(
                f"several conversations begin with {id_or_prefix!r}",
                hint=f"write more digits: {', '.join(ids[:5])}{', …' if len(ids) > 5 else ''}",
            )
        return ids[0]

    def load(self, id_or_prefix: str) -> Conversation:
        """A conversation with all its branches. Raises UsageError.

        A message that another program is writing, or was when it died, is `open`.
        """
        id_ = self.find(id_or_prefix)
        with self._database.read() as connection:
            stored = connection.execute(
                f"SELECT {_CONVERSATION} FROM conversations WHERE id = ?",  # noqa: S608
                (id_,),
            ).fetchone()
            rows = connection.execute(
                f"SELECT {_NODE} FROM nodes WHERE conversation = ? ORDER BY number",  # noqa: S608
                (id_,),
            ).fetchall()
        known = ConversationRow(*stored)
        conversation = conversation_from_row(known)
        for row in rows:
            node = node_from_row(NodeRow(*row))
            conversation.nodes[node.id] = node
        conversation.repair()
        self._known[id_] = known
        return conversation

    def summary(self, id_or_prefix: str) -> ConversationSummary:
        """One conversation as `list` gives it. Raises UsageError."""
        id_ = self.find(id_or_prefix)
        with self._database.read() as connection:
            return summary_by_id(connection, id_)

    def list(self, limit: int = 50, before: ConversationSummary | None = None) -> Summaries:
        """Conversations with messages, newest first; `before`: the last one of the previous page."""
        with self._database.read() as connection:
            return list_summaries(connection, limit, before)

    def last(self) -> ConversationSummary | None:
        """The conversation that changed last."""
        return next(iter(self.list(1)), None)

    def search(self, text: str, limit: int = 50) -> Hits:
        """Conversations with all words of `text` in one message or in the title, newest first, each once.

        Any text is a query (search_query.py); blank text finds nothing.
        """
        with self._database.read() as connection:
            return search(connection, text, limit)

    # ------------------------------------------------------------------ care

    def rename(self, id_or_prefix: str, title: str) -> None:
        """Give a title that no program with the old title in memory overwrites. Raises UsageError."""
        id_ = self.find(id_or_prefix)
        named = searchable(" ".join(title.split()))
        if not named:
            raise UsageError("a title cannot be empty")
        with self._database.write() as connection:
            write_title(connection, id_, named)

    def delete(self, id_or_prefix: str) -> None:
        """Delete a conversation; it can be restored for thirty days, with its KV. Raises UsageError."""
        id_ = self.find(id_or_prefix)
        with self._database.write() as connection:
            connection.execute(
                "UPDATE conversations SET deleted_s = ? WHERE id = ?", (time.time(), id_)
            )

    def restore(self, id_or_prefix: str) -> str:
        """Undo a `delete` and return the id. Raises UsageError where it is gone for good."""
        id_ = self.find(id_or_prefix, deleted=True)
        with self._database.write() as connection:
            connection.execute("UPDATE conversations SET deleted_s = NULL WHERE id = ?", (id_,))
        return id_

    def purge(self, deleted_before_s: float) -> Purged:
        """Delete for good what was deleted before this moment (seconds since 1970)."""
        with self._database.read() as connection:
            if not deleted_before(connection, deleted_before_s):
                return Purged(0)
        with self._database.write() as connection:
            gone = deleted_before(
                connection, deleted_before_s
            )  # another program may have been first
            for id_ in gone:
                erase(connection, id_)
        self._database.release()
        self._forget_kv(gone)
        return Purged(len(gone))

    def _forget_kv(self, ids: Iterable[str]) -> None:
        """Delete the KV that only these conversations had."""
        if self._kv_folder is None or not self._kv_folder.is_dir():
            return
        from localchat.kv_store.store import KVStore  # numpy

        store = KVStore(self._kv_folder, 0)
        for id_ in ids:
            with suppress(OSError):
                store.forget(id_)

    # ------------------------------------------------------------------ drafts

    def put_draft(self, conversation_id: str | None, text: str) -> None:
        """Keep input that was not sent yet; empty text removes it. None: of a new conversation."""
        key = conversation_id or ""
        with self._database.write() as connection:
            if text:
                connection.execute(
                    "INSERT INTO drafts VALUES (?, ?, ?) ON CONFLICT (conversation) DO UPDATE "
                    "SET text = excluded.text, updated_s = excluded.updated_s",
                    (key, packed(text), time.time()),
                )
            else:
                connection.execute("DELETE FROM drafts WHERE conversation = ?", (key,))

    def draft(self, conversation_id: str | None) -> str:
        """The input that was not sent; empty: none."""
        with self._database.read() as connection:
            row = connection.execute(
                "SELECT text FROM drafts WHERE conversation = ?", (conversation_id or "",)
            ).fetchone()
        return unpacked(row[0]) if row else ""
