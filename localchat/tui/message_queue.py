"""Messages that were sent while an answer was under way, oldest first."""

from localchat.chat.conversation import Question
from localchat.sanitize import sanitize_line
from localchat.tui.attachments import ComposerText, contract, joined

_MAX_SHOWN = 3
_MAX_CHARACTERS = 400
"""More than one row of any terminal shows."""


class MessageQueue:
    """Holds messages until the answer before them is complete."""

    def __init__(self) -> None:
        self._messages: list[Question] = []
        self.is_sending = False
        """Whether a message is on its way and has no answer yet."""

    def __bool__(self) -> bool:
        return bool(self._messages)

    def put(self, question: Question) -> None:
        """Add a message at the end."""
        self._messages.append(question)

    def next(self) -> Question:
        """Take the oldest message."""
        return self._messages.pop(0)

    def take_last(self) -> ComposerText | None:
        """Take the newest message to change it. None: the queue is empty."""
        if self._messages:
            return contract(self._messages.pop())
        return None

    def take_all(self) -> ComposerText:
        """Take all messages as one text."""
        text = joined(map(contract, self._messages))
        self._messages.clear()
        return text

    def texts(self) -> list[str]:
        """Return the full texts, for the draft."""
        return [question.text for question in self._messages]

    def describe(self) -> str:
        """Describe the first messages in a line each, and count the others."""
        lines = []
        label = "next"
        for message in self._messages[:_MAX_SHOWN]:
            lines.append(f"{label}: {_line(message)}")
            label = "then"
        more = len(self._messages) - _MAX_SHOWN
        if more > 0:
            lines.append(f"and {more} more")
        return "\n".join(lines)


def _line(question: Question) -> str:
    return sanitize_line(" ".join(contract(question).text.split()))[:_MAX_CHARACTERS]
