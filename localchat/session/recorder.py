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
        self._failure: LocalchatError | None = None
        """Why the history could not be opened."""
        self._conversation: Conversation | None = None
        self._staying_draft = ""
        """Part of the draft that stays with this conversation."""
        self._others = 0
        """Number of messages of other programs at the last call of `has_grown_elsewhere`."""
        self._history_version = -1
        """Version of the history at that call."""
        self._lock = threading.Lock()

    def attach(self, history: "History") -> None:
        """Set the history, and write the conversation so far."""
        with self._lock:
            self.history = history
            self._failure = None
            if self._conversation is not None:
                self._begin(self._conversation, history)
                for node in self._conversation.nodes.values():
                    self.changed(node)

    def fail(self, problem: LocalchatError) -> None:
        """Record that the history could not be opened. A later `attach` still writes everything."""
        self._failure = problem

    def hold(self, conversation: Conversation) -> None:
        """Record this conversation from now on.

        Raises HistoryUnusable if the previous one cannot be saved, and nothing has changed then.
        """
        with self._lock:
            if self._autosave is not None:
                self._autosave.draft(self._staying_draft)
                # Flush first: after a failed `close`, nothing more would be written.
                self._autosave.flush()
                self._autosave.close()
            self._conversation = conversation
            self._staying_draft = ""
            self._others = 0
            self._history_version = -1
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

    def draft(self, text: str, staying: str | None = None) -> None:
        """Record text that is not sent yet.

        Once another conversation is held, this one has only the part `staying` left, by default all of it.
        """
        self._staying_draft = text if staying is None else staying
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

    def has_grown_elsewhere(self) -> bool:
        """Return whether other programs have added messages to the conversation since the last call.

        Raises HistoryUnusable.
        """
        history = self.history
        conversation = self._conversation
        if history is None or conversation is None:
            return False
        version = history.version()
        if version == self._history_version:
            return False
        self._history_version = version
        before = self._others
        self._others = len(history.message_ids(conversation.id) - set(conversation.nodes))
        return self._others > before

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
        """Why the last write failed, or why the history could not be opened."""
        if self._autosave is not None:
            return self._autosave.problem
        return self._failure

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
            if self._failure is not None and self._conversation and self._conversation.nodes:
                raise self._failure
