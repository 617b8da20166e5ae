"""Conversations on disk: what doors call.

Writers never overwrite what another program wrote meanwhile: nodes have ids of their own and are written by
who makes them, and of the rest only what changed here is written.
"""

import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, TypeAlias

from localchat.chat.conversation import Conversation, Node
from localchat.chat.titles import title_for
from localchat.errors import UsageError
from localchat.history.database import Database
from localchat.history.finding import Hit, Summary, found, listed, summary_of
from localchat.history.rows import (
    Cover,
    NodeRow,
    cover_of,
    node_of,
    opened,
    packed,
    row_of,
    searchable,
    unpacked,
)
from localchat.history.words import segmented

_KEPT_S: Final = 30 * 24 * 3600.0
"""How long a deleted conversation can be restored."""
_SHORTEST_PREFIX: Final = 4
_COVER: Final = ", ".join(Cover._fields)
_NODE: Final = ", ".join(NodeRow._fields)


Summaries: TypeAlias = list[Summary]
Hits: TypeAlias = list[Hit]
"""Named here, because `History.list` hides the type in the class."""


class Purged(NamedTuple):
    """How much was deleted for good."""

    conversations: int


class History:
    """The file of conversations. Callable from any thread; every method may raise HistoryUnusable."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: dict[str, Cover] = {}

    @classmethod
    def open(cls, path: Path | None) -> "History":
        """The history in `path`, made where there is none; None: in memory, gone at the end. Raises
        HistoryUnusable, also for a file of a newer version, which is left as it is."""
        history = cls(Database(path))
        history.purge(time.time() - _KEPT_S)
        return history

    @property
    def notice(self) -> str:
        """What the user must be told about the opening (a damaged file was set aside); empty: nothing."""
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
        """Write what a conversation is apart from its messages: title, model, policy, head."""
        self.write(cover_of(conversation, title_for(conversation)), ())

    def put(self, conversation_id: str, node: Node) -> None:
        """Write one message, new or in a newer state."""
        self.write(None, (row_of(conversation_id, node),))

    def append(self, conversation: Conversation, nodes: Iterable[Node]) -> None:
        """Write a conversation and these of its messages, in one transaction."""
        rows = [row_of(conversation.id, node) for node in nodes]
        self.write(cover_of(conversation, title_for(conversation)), rows)

    def write(self, cover: Cover | None, rows: Iterable[NodeRow]) -> None:
        """One transaction of what `rows.py` made. A conversation that is written to is not deleted any
        more."""
        with self._database.write() as connection:
            if cover is not None:
                self._write_cover(cover)
            for row in rows:
                self._write_node(row)
                connection.execute(
                    "UPDATE conversations SET deleted_s = NULL WHERE id = ? AND deleted_s IS NOT NULL",
                    (row.conversation,),
                )
        if cover is not None:
            self._known[cover.id] = cover

    def _write_cover(self, cover: Cover) -> None:
        before = self._known.get(cover.id)
        with self._database.write() as connection:
            stored = connection.execute(
                f"SELECT {_COVER} FROM conversations WHERE id = ?",  # noqa: S608 - our own names
                (cover.id,),
            ).fetchone()
            if stored is None:
                marks = ", ".join("?" * len(cover))
                connection.execute(
                    f"INSERT INTO conversations ({_COVER}) VALUES ({marks})",  # noqa: S608
                    cover,
                )
                self._index_title(cover.id, "", cover.title, new=True)
                return
            changes = {
                name: value
                for name, value in cover._asdict().items()
                if before is None or value != getattr(before, name)
            }
            there = Cover(*stored)
            changes["updated_s"] = max(cover.updated_s, there.updated_s)
            if before is None and there.title:
                # Read through another History: whether its title is an old one cannot be known.
                changes.pop("title")
            if "title" in changes:
                self._index_title(cover.id, there.title, cover.title)
            assigned = ", ".join(f"{name} = ?" for name in changes)
            connection.execute(
                f"UPDATE conversations SET {assigned} WHERE id = ?",  # noqa: S608
                (*changes.values(), cover.id),
            )

    def _index_title(self, id_: str, before: str, after: str, *, new: bool = False) -> None:
        with self._database.write() as connection:
            (number,) = connection.execute(
                "SELECT number FROM conversations WHERE id = ?", (id_,)
            ).fetchone()
            if not new:
                connection.execute(
                    "INSERT INTO title_index (title_index, rowid, words) VALUES ('delete', ?, ?)",
                    (number, segmented(before)),
                )
            connection.execute(
                "INSERT INTO title_index (rowid, words) VALUES (?, ?)", (number, segmented(after))
            )

    def _write_node(self, row: NodeRow) -> None:
        """A text that is still growing stays out of the index, and is searched as it lies."""
        indexed = int(row.state != "open")
        with self._database.write() as connection:
            stored = connection.execute(
                "SELECT number, content, indexed FROM nodes WHERE id = ?", (row.id,)
            ).fetchone()
            if stored is None:
                marks = ", ".join("?" * len(row))
                cursor = connection.execute(
                    f"INSERT INTO nodes ({_NODE}, indexed) VALUES ({marks}, ?)",  # noqa: S608
                    (*row, indexed),
                )
                number, was_indexed, before = cursor.lastrowid, False, ""
            else:
                number, before, was_indexed = stored
                connection.execute(
                    "UPDATE nodes SET parent = ?, role = ?, state = ?, created_s = ?, content = ?, "
                    "exact = ?, rest = ?, indexed = ? WHERE number = ?",
                    (*row[2:], indexed, number),
                )
            if indexed and was_indexed and before == row.content:
                return
            if was_indexed:
                connection.execute(
                    "INSERT INTO message_index (message_index, rowid, words) VALUES ('delete', ?, ?)",
                    (number, segmented(before)),
                )
            if indexed:
                connection.execute(
                    "INSERT INTO message_index (rowid, words) VALUES (?, ?)",
                    (number, segmented(row.content)),
                )

    # ------------------------------------------------------------------ reading

    def find(self, id_or_prefix: str) -> str:
        """The id that begins so. Raises UsageError for none, for several, and for fewer than four digits."""
        wanted = searchable(id_or_prefix.strip().lower())
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT id FROM conversations WHERE id >= ? AND id < ? AND deleted_s IS NULL LIMIT 6",
                (wanted, wanted + "g"),
            ).fetchall()
        ids = [str(id_) for (id_,) in rows]
        if wanted in ids:
            return wanted
        if not ids or len(wanted) < _SHORTEST_PREFIX:
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
        """A conversation with all its branches. A message that another program was writing, or was when it
        died, is `open`. Raises UsageError."""
        id_ = self.find(id_or_prefix)
        with self._database.read() as connection:
            cover = connection.execute(
                f"SELECT {_COVER} FROM conversations WHERE id = ?",  # noqa: S608
                (id_,),
            ).fetchone()
            rows = connection.execute(
                f"SELECT {_NODE} FROM nodes WHERE conversation = ? ORDER BY number",  # noqa: S608
                (id_,),
            ).fetchall()
        known = Cover(*cover)
        conversation = opened(known)
        for row in rows:
            node = node_of(NodeRow(*row))
            conversation.nodes[node.id] = node
        conversation.mend()
        self._known[id_] = known
        return conversation

    def summary(self, id_or_prefix: str) -> Summary:
        """What `list` says of one conversation. Raises UsageError."""
        id_ = self.find(id_or_prefix)
        with self._database.read() as connection:
            return summary_of(connection, id_)

    def list(self, limit: int = 50, before: Summary | None = None) -> Summaries:
        """Conversations that hold a message, the newest first; `before`: the last one of the page before."""
        with self._database.read() as connection:
            return listed(connection, limit, before)

    def last(self) -> Summary | None:
        """The conversation that something was said in last."""
        return next(iter(self.list(1)), None)

    def search(self, text: str, limit: int = 50) -> Hits:
        """Conversations that hold all words of `text` in one message, or in the title; the newest first,
        each once. Any text is a query (words.py); one without a sign finds nothing."""
        with self._database.read() as connection:
            return found(connection, text, limit)

    # ------------------------------------------------------------------ care

    def rename(self, id_or_prefix: str, title: str) -> None:
        """Give a title; a program that holds the conversation under its old one does not take it back.
        Raises UsageError."""
        id_ = self.find(id_or_prefix)
        named = searchable(" ".join(title.split()))
        if not named:
            raise UsageError("a title holds at least one sign")
        with self._database.write() as connection:
            (before,) = connection.execute(
                "SELECT title FROM conversations WHERE id = ?", (id_,)
            ).fetchone()
            self._index_title(id_, before, named)
            connection.execute("UPDATE conversations SET title = ? WHERE id = ?", (named, id_))

    def delete(self, id_or_prefix: str) -> None:
        """Put a conversation away; it can be restored for thirty days. Raises UsageError."""
        id_ = self.find(id_or_prefix)
        with self._database.write() as connection:
            connection.execute(
                "UPDATE conversations SET deleted_s = ? WHERE id = ?", (time.time(), id_)
            )

    def restore(self, id_: str) -> None:
        """Take back a `delete`; `id_` is the whole id. Raises UsageError where it is gone for good."""
        with self._database.write() as connection:
            done = connection.execute(
                "UPDATE conversations SET deleted_s = NULL WHERE id = ?", (id_,)
            )
            if not done.rowcount:
                raise UsageError(f"the conversation {id_!r} cannot be restored any more")

    def purge(self, deleted_before_s: float) -> Purged:
        """Delete for good what was deleted before this moment (seconds since 1970)."""
        with self._database.read() as connection:
            gone = connection.execute(
                "SELECT number, id, title FROM conversations WHERE deleted_s < ?",
                (deleted_before_s,),
            ).fetchall()
        if not gone:
            return Purged(0)
        with self._database.write() as connection:
            for number, id_, title in gone:
                connection.execute(
                    "INSERT INTO title_index (title_index, rowid, words) VALUES ('delete', ?, ?)",
                    (number, segmented(title)),
                )
                nodes = connection.execute(
                    "SELECT number, content FROM nodes WHERE conversation = ? AND indexed = 1",
                    (id_,),
                ).fetchall()
                connection.executemany(
                    "INSERT INTO message_index (message_index, rowid, words) VALUES ('delete', ?, ?)",
                    [(node, segmented(content)) for node, content in nodes],
                )
                connection.execute("DELETE FROM nodes WHERE conversation = ?", (id_,))
                connection.execute("DELETE FROM drafts WHERE conversation = ?", (id_,))
                connection.execute("DELETE FROM conversations WHERE number = ?", (number,))
        return Purged(len(gone))

    # ------------------------------------------------------------------ drafts

    def put_draft(self, conversation_id: str | None, text: str) -> None:
        """Keep input that was not sent yet; empty text forgets it. None: of a conversation to come."""
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
