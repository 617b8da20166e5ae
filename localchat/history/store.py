"""History: the conversations on disk, as front ends use them.

Programs that write at the same time do not overwrite each other. Each program writes only its own nodes, and
only the fields of a conversation that it changed.
"""

import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias

from localchat.chat.conversation import Conversation, Node
from localchat.config.paths import WRITES
from localchat.errors import UsageError
from localchat.history.database import Database
from localchat.history.queries import (
    ConversationSummary,
    SearchHit,
    last_summary,
    list_summaries,
    search,
    summary_by_id,
)
from localchat.history.tables import (
    ConversationRow,
    NodeRows,
    conversation_from_row,
    erase,
    mark_overdue,
    may_be_overdue,
    node_from_row,
    overdue,
    packed,
    read_conversation,
    read_media,
    read_nodes,
    remove_message,
    searchable,
    undelete,
    unpacked,
    write_conversation,
    write_node,
    write_title,
)
from localchat.state_file import is_running

_RESTORABLE_S: Final = 30 * 24 * 3600.0
"""Time for which a deleted conversation can be restored."""
_CONFIRMATION_S: Final = 24 * 3600.0
"""Time between the two starts that must agree before a purge. One clock may be wrong."""
_MIN_PREFIX: Final = 4
_NEW: Final = "new "
"""Key of a draft without a conversation, before the id of the process. Was an empty key before."""
_LARGE_TEXT: Final = 256 << 10
"""Characters of a message whose space is released immediately."""


Summaries: TypeAlias = list[ConversationSummary]
Hits: TypeAlias = list[SearchHit]
"""Aliases, because `History.list` hides the type inside the class."""


class History:
    """A file of conversations. Thread-safe. Every method may raise HistoryUnusable."""

    def __init__(
        self,
        database: Database,
        kv_folder: Path | None = None,
        writes_folder: Path | None = None,
    ) -> None:
        self._database = database
        self._kv_folder = kv_folder
        self._writes_folder = writes_folder
        self._rows: dict[str, ConversationRow] = {}
        self._new_draft = ""
        """Key of the draft that the new conversation of this program took."""

    @classmethod
    def open(cls, path: Path | None, kv_folder: Path | None = None) -> "History":
        """Open or create the history in `path`, or in memory if `path` is None.

        kv_folder: store of the conversations' KV, which is deleted with them, as are the journals of files
        beside the history. Raises HistoryUnusable, also
        for a file of a newer version, which is not changed.
        """
        writes_folder = path.parent / WRITES if path else None
        history = cls(Database(path), kv_folder, writes_folder)
        history.purge(time.time())
        return history

    @classmethod
    def open_read_only(cls, path: Path) -> "History":
        """Open a history on a disk that is full or read-only. Every change raises HistoryUnusable."""
        return cls(Database(path, read_only=True))

    @property
    def notice(self) -> str:
        """Sentence for the user about a damaged file that was set aside, or an empty string."""
        return self._database.notice

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._database.close()

    def __enter__(self) -> "History":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, conversation: ConversationRow | None, nodes: Iterable[NodeRows]) -> None:
        """Write rows in one transaction. A message restores a deleted conversation."""
        with self._database.write() as connection:
            if conversation is not None:
                write_conversation(connection, conversation, self._rows.get(conversation.id))
            for node in nodes:
                write_node(connection, node)
                undelete(connection, node.row.conversation)
        if conversation is not None:
            self._rows[conversation.id] = conversation

    def withdraw(self, conversation_id: str, node: Node) -> None:
        """Remove a message without replies, and its conversation if no message remains."""
        is_large = len(node.message.content) > _LARGE_TEXT or bool(node.message.attachments)
        with self._database.write() as connection:
            if not remove_message(connection, conversation_id, node.id, node.parent):
                erase(connection, conversation_id)
                self._rows.pop(conversation_id, None)
            if is_large:
                # The search index stores deleted words until it is merged.
                connection.execute("INSERT INTO message_index (message_index) VALUES ('optimize')")
        if is_large:
            self._database.release()

    def find(self, id_or_prefix: str, *, deleted: bool = False) -> str:
        """Return the full id for a prefix. deleted: search only deleted conversations.

        Raises UsageError for no match, for several matches, and for fewer than four digits.
        """
        prefix = searchable(id_or_prefix.strip().lower())
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT id FROM conversations WHERE id >= ? AND id < ? AND (deleted_s IS NULL) = ? LIMIT 6",
                (prefix, prefix + "g", not deleted),
            ).fetchall()
        ids = [str(id_) for (id_,) in rows]
        if prefix in ids:
            return prefix
        if ids and len(prefix) < _MIN_PREFIX:
            raise UsageError(
                f"{id_or_prefix!r} is too short for the id of a conversation",
                hint=f"write its first {_MIN_PREFIX} digits or more; localchat history list shows them",
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

    def load(self, id_or_prefix: str, *, as_left: bool = False) -> Conversation:
        """Return a conversation with all its branches. Raises UsageError.

        If every message was undone, the path ends at the newest one, or is empty with `as_left`. A message is
        `open` if another program is writing it, or was killed while writing it.
        """
        id_ = self.find(id_or_prefix)
        with self._database.read() as connection:
            row = read_conversation(connection, id_)
            rows = read_nodes(connection, id_)
            media = read_media(connection, id_)
        assert row is not None
        conversation = conversation_from_row(row)
        for node_row in rows:
            node = node_from_row(node_row, media)
            conversation.nodes[node.id] = node
        conversation.repair()
        if conversation.head is None and not as_left:
            conversation.head = next(reversed(conversation.nodes), None)
        self._rows[id_] = row
        return conversation

    def version(self) -> int:
        """Return a number that changes with every transaction of any program. Cheap."""
        with self._database.read() as connection:
            return int(connection.execute("PRAGMA data_version").fetchone()[0])

    def message_ids(self, conversation_id: str) -> set[str]:
        """Return the ids of a conversation's messages on disk, also those of other programs."""
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT id FROM nodes WHERE conversation = ?", (conversation_id,)
            )
            return {str(id_) for (id_,) in rows}

    def answer_text(self, conversation_id: str, id_: str) -> str | None:
        """Return the text of an answer on disk. None if it is not there."""
        with self._database.read() as connection:
            rows = read_nodes(connection, conversation_id)
        texts = (node_from_row(row, {}).message.content for row in rows if row.id == id_)
        return next(texts, None)

    def summary(self, id_or_prefix: str) -> ConversationSummary:
        """Return the summary of a conversation. Raises UsageError."""
        id_ = self.find(id_or_prefix)
        with self._database.read() as connection:
            return summary_by_id(connection, id_)

    def list(self, limit: int = 50) -> Summaries:
        """Return conversations with messages, newest first."""
        with self._database.read() as connection:
            return list_summaries(connection, limit)

    def last(self) -> ConversationSummary | None:
        """Return the conversation with the newest message. None without messages."""
        with self._database.read() as connection:
            return last_summary(connection)

    def search(self, text: str, limit: int = 50) -> Hits:
        """Return the conversations with all words of `text` in one message or in the title, newest first.

        Any text is a valid query (search_query.py). Blank text matches nothing.
        """
        with self._database.read() as connection:
            return search(connection, text, limit)

    def rename(self, id_or_prefix: str, title: str) -> str:
        """Change the title and return it as stored. Raises UsageError.

        Programs with the old title in memory do not overwrite it.
        """
        id_ = self.find(id_or_prefix)
        title = searchable(" ".join(title.split()))
        if not title:
            raise UsageError("a title cannot be empty")
        with self._database.write() as connection:
            write_title(connection, id_, title)
        return title

    def delete(self, id_or_prefix: str) -> None:
        """Delete a conversation. It can be restored for thirty days, with its KV. Raises UsageError."""
        id_ = self.find(id_or_prefix)
        with self._database.write() as connection:
            connection.execute(
                # A clock that has lost its time would make it overdue at once.
                "UPDATE conversations SET deleted_s = max(?, updated_s) WHERE id = ?",
                (time.time(), id_),
            )

    def restore(self, id_or_prefix: str) -> str:
        """Undo a `delete` and return the id. Raises UsageError after permanent deletion."""
        id_ = self.find(id_or_prefix, deleted=True)
        with self._database.write() as connection:
            undelete(connection, id_)
        return id_

    def purge(self, now_s: float) -> int:
        """Delete permanently what was deleted more than thirty days ago. Return the number.

        Two calls a day or more apart must agree on that, without a call between them that does not: a wrong
        clock at one start deletes nothing. now_s: seconds since 1970.
        """
        deleted_before_s = now_s - _RESTORABLE_S
        with self._database.read() as connection:
            if not may_be_overdue(connection, deleted_before_s):
                return 0
        with self._database.write() as connection:
            mark_overdue(connection, deleted_before_s, now_s)
            ids = overdue(connection, now_s - _CONFIRMATION_S)
            for id_ in ids:
                erase(connection, id_)
        if not ids:
            return 0
        self._database.release()
        self._forget_kv(ids)
        if self._writes_folder is not None:
            for id_ in ids:
                shutil.rmtree(self._writes_folder / id_, ignore_errors=True)
        return len(ids)

    def _forget_kv(self, ids: Iterable[str]) -> None:
        """Delete the KV that only these conversations use."""
        if self._kv_folder is None or not self._kv_folder.is_dir():
            return
        # This imports numpy.
        from localchat.kv_store.store import KVStore

        store = KVStore(self._kv_folder, 0)
        for id_ in ids:
            with suppress(OSError):
                store.forget(id_)

    def put_draft(self, conversation_id: str | None, text: str) -> None:
        """Store unsent input. Empty text removes it. None: the new conversation of this program."""
        key = conversation_id or f"{_NEW}{os.getpid()}"
        with self._database.write() as connection:
            if conversation_id is None:
                connection.execute("DELETE FROM drafts WHERE conversation = ?", (self._new_draft,))
                self._new_draft = key
            if text:
                connection.execute(
                    "INSERT INTO drafts VALUES (?, ?, ?) ON CONFLICT (conversation) DO UPDATE "
                    "SET text = excluded.text, updated_s = excluded.updated_s",
                    (key, packed(text), time.time()),
                )
            else:
                connection.execute("DELETE FROM drafts WHERE conversation = ?", (key,))

    def draft(self, conversation_id: str | None) -> str:
        """Return the unsent input, or an empty string.

        None: the newest input for a new conversation that is not in another running program.
        """
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT conversation, text FROM drafts WHERE conversation = ? "
                "OR (? AND conversation LIKE ?) ORDER BY updated_s DESC",
                (conversation_id or "", conversation_id is None, f"{_NEW}%"),
            ).fetchall()
        for key, text in rows:
            if conversation_id is None:
                pid = int(key.removeprefix(_NEW) or os.getpid())
                if pid != os.getpid() and is_running(pid):
                    continue
                self._new_draft = key
            return unpacked(text)
        return ""
