"""Sent message that is being changed in the composer, and the draft it replaces."""

from typing import TYPE_CHECKING

from localchat.tui.attachments import ComposerText, contract, question_of

if TYPE_CHECKING:
    from localchat.chat.conversation import Node
    from localchat.tui.widgets.composer import Composer


class EditedMessage:
    """Puts a sent message into the composer, and restores the draft."""

    def __init__(self) -> None:
        self.id: str | None = None
        """Id of the message that is being changed. None: no message is being changed."""
        self._draft = self._sent = ComposerText()

    def begin(self, node: "Node", composer: "Composer") -> None:
        """Change a message. Another one that is being changed stays as it was."""
        if self.id is None:
            self._draft = composer.written
        self.id = node.id
        self._sent = contract(question_of(node))
        composer.write(*self._sent)

    def leave(self, composer: "Composer") -> bool:
        """Put the draft back into the composer. False if no message was being changed."""
        if self.id is None:
            return False
        self.id = None
        draft = self._draft
        self._draft = ComposerText()
        composer.write(*draft)
        return True

    def drafts(self, composer: "Composer") -> tuple[ComposerText, ...]:
        """Return the unsent texts: the new message, and the changed message once it differs."""
        if self.id is None:
            return composer.drafts
        changed = composer.written
        if changed != self._sent:
            return (self._draft, changed)
        return (self._draft,)
