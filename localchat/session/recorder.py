"""Records the conversation of a session in the history, once the history is open."""

import threading
from typing import TYPE_CHECKING, Final

from localchat.chat.conversation import Conversation, Node
from localchat.errors import LocalchatError, UsageError

if TYPE_CHECKING:
    from localchat.history.autosave import Autosave
    from localchat.history.store import History

SAVE_EVERY_S: Final = 0.25
"""Interval at which a growing answer is recorded. The history writes at most 0.4 s later, so that killing the
program loses less than a second of text."""


class ConversationRecorder:
    """Writes changes of the current conversation in the background.

    `changed` and `draft` never wait for the disk. `attach` writes the changes made before it.
    """

    def __init__(self) -> None:
        self.history: History | None = None
        self._autosave: Autosave | None = None
        self._conversation: Conversation | None = None
        self._reported_ids: set[str] = set()
        """Messages of other programs that `added_elsewhere` has counted."""
        self._lock = threading.Lock()

    def attach(self, history: "History") -> None:
        """Set the history, and write the conversation so far."""
        with self._lock:
            self.history = history
            if self._conversation is not None:
                self._begin(self._conversation, history)
                for node in self._conversation.nodes.values():
                    self.changed(node)

    def hold(self, conversation: Conversation) -> None:
        """Record this conversation from now on.

        Raises HistoryUnusable if the previous one cannot be saved, and nothing has changed then.
        """
        with self._lock:
            if self._autosave is not None:
                # Flush first: after a failed `close`, nothing more would be written.
                self._autosave.flush()
                self._autosave.close()
            self._conversation = conversation
            self._autosave = None
            if self.history is not None:
                self._begin(conversation, self.history)

    def _begin(self, conversation: Conversation, history: "History") -> None:
        from localchat.history.autosave import Autosave

        self._autosave = Autosave(history, conversation)

    def changed(self, node: Node | None = None) -> None:
        """Record a new or changed message. None records head, title, model and policy."""
        if self._autosave is not None:
            self._autosave.changed(node)

    def draft(self, text: str) -> None:
        """Record text that is not sent yet."""
        if self._autosave is not None:
            self._autosave.draft(text)

    def withdraw(self, question: Node) -> None:
        """Remove an unanswered question from disk, and wait for it. Raises HistoryUnusable."""
        if self._autosave is None:
            return
        assert self.history is not None
        assert self._conversation is not None
        self._autosave.flush()
        self.history.withdraw(self._conversation.id, question)

    def flush(self) -> bool:
        """Write all changes to disk. Return whether there were any. Raises HistoryUnusable."""
        if self._autosave is None or not self._autosave.behind:
            return False
        self._autosave.flush()
        return True

    def added_elsewhere(self) -> int:
        """Count the messages that other programs added to the conversation since the last call.

        Raises HistoryUnusable.
        """
        history = self.history
        conversation = self._conversation
        if history is None or conversation is None:
            return 0
        new_ids = history.message_ids(conversation.id) - set(conversation.nodes)
        new_ids -= self._reported_ids
        self._reported_ids |= new_ids
        return len(new_ids)

    def check_unchanged(self, answer: Node) -> None:
        """Raise UsageError if another program has changed an answer, and HistoryUnusable."""
        if self.history is None or self._conversation is None:
            return
        self.flush()
        text = self.history.answer_text(self._conversation.id, answer.id)
        if text is not None and text != answer.message.content:
            raise UsageError(
                "another window continues this answer", hint="open the conversation again to see it"
            )

    def kept_draft(self) -> str:
        """Return the unsent text of the last run. May be empty."""
        if self.history is None:
            return ""
        if self._conversation is None or not self._conversation.nodes:
            return self.history.draft(None)
        return self.history.draft(self._conversation.id)

    @property
    def trouble(self) -> LocalchatError | None:
        """Why the last write failed."""
        if self._autosave is not None:
            return self._autosave.problem
        return None

    def close(self) -> None:
        """Write all changes and close the history. Raises HistoryUnusable."""
        with self._lock:
            try:
                if self._autosave is not None:
                    self._autosave.close()
            finally:
                self._autosave = None
                if self.history is not None:
                    self.history.close()
                    self.history = None
