"""Writes a changing conversation to disk on a thread of its own.

Callers never wait for the disk. A killed process loses at most the last second.
"""

import threading
import time
from typing import Final

from localchat.chat.conversation import Conversation, Node
from localchat.chat.titles import title_for
from localchat.errors import HistoryUnusable
from localchat.history.store import History
from localchat.history.tables import ConversationRow, NodeRows, conversation_row, node_rows

CADENCE_S: Final = 0.4
_FLUSH_TIMEOUT_S: Final = 10.0


class Autosave:
    """Saves one conversation. `changed`, `draft` and `problem` return immediately, on any thread."""

    def __init__(
        self, history: History, conversation: Conversation, *, cadence_s: float = CADENCE_S
    ) -> None:
        self._history = history
        self._conversation = conversation
        self._cadence_s = cadence_s
        self._lock = threading.Condition()
        self._row: ConversationRow | None = None
        self._nodes: dict[str, Node] = {}
        self._drafts: dict[str | None, str] = {}
        self._is_new = not conversation.nodes
        self._changes = 0
        self._written = 0
        self._urgent = False
        self._closing = False
        self._problem: HistoryUnusable | None = None
        self._thread = threading.Thread(target=self._run, name="autosave", daemon=True)
        self._thread.start()

    def changed(self, node: Node | None = None) -> None:
        """Record a new or longer message, or (None) a change of title, model, policy or head.

        A user's message is written immediately, because it could not be generated again.
        """
        title = title_for(self._conversation)
        row = conversation_row(self._conversation, title) if self._conversation.nodes else None
        with self._lock:
            self._row = row
            if node is not None:
                self._nodes[node.id] = node
                self._urgent = self._urgent or node.message.role == "user"
            self._count_change()

    def draft(self, text: str) -> None:
        """Store unsent input. Empty text removes it after sending.

        It belongs to no conversation before the first message, and moves to the conversation with it.
        """
        key = self._conversation.id if self._conversation.nodes else None
        with self._lock:
            if key is not None and self._is_new:
                self._drafts[None] = ""
                self._is_new = False
            self._drafts[key] = text
            self._count_change()

    @property
    def behind(self) -> bool:
        """Whether some change is not on disk yet."""
        with self._lock:
            return self._written < self._changes

    @property
    def problem(self) -> HistoryUnusable | None:
        """Error of the last write, or None. The next write tries again."""
        with self._lock:
            return self._problem

    def flush(self, timeout_s: float = _FLUSH_TIMEOUT_S) -> None:
        """Wait until everything is on disk. Raises HistoryUnusable if a write fails."""
        with self._lock:
            target = self._changes
            self._problem = None
            self._urgent = True
            self._lock.notify_all()
            done = self._lock.wait_for(
                lambda: self._written >= target or self._problem is not None, timeout_s
            )
            if self._problem is not None:
                raise self._problem
            if not done:
                raise HistoryUnusable(f"the history was not written within {timeout_s:g} s")

    def close(self, timeout_s: float = _FLUSH_TIMEOUT_S) -> None:
        """Write the remaining changes and stop the thread. Raises HistoryUnusable. Idempotent."""
        with self._lock:
            closed = self._closing
            self._closing = True
        if closed:
            return
        try:
            self.flush(timeout_s)
        finally:
            with self._lock:
                self._lock.notify_all()
            self._thread.join(timeout_s)

    def _count_change(self) -> None:
        self._changes += 1
        self._lock.notify_all()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._changes > self._written or self._closing)
                if self._changes == self._written:
                    return
                target = self._changes
                self._urgent = False
                row = self._row
                self._row = None
                nodes = self._nodes
                self._nodes = {}
                drafts = self._drafts
                self._drafts = {}
            started_s = time.monotonic()
            problem = self._write(row, nodes, drafts)
            with self._lock:
                self._problem = problem
                if problem is None:
                    self._written = target
                else:
                    # Keep the changes for the next try. Changes since then are newer.
                    self._row = self._row or row
                    self._nodes = nodes | self._nodes
                    self._drafts = drafts | self._drafts
                self._lock.notify_all()
                if problem is not None and self._closing:
                    return
                pause_s = self._cadence_s - (time.monotonic() - started_s)
                self._lock.wait_for(lambda: self._urgent or self._closing, max(pause_s, 0.0))

    def _write(
        self, row: ConversationRow | None, nodes: dict[str, Node], drafts: dict[str | None, str]
    ) -> HistoryUnusable | None:
        rows: list[NodeRows] = [node_rows(self._conversation.id, node) for node in nodes.values()]
        try:
            self._history.write(row, rows)
            for key, text in drafts.items():
                self._history.put_draft(key, text)
        except HistoryUnusable as problem:
            return problem
        return None
