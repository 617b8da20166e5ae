"""Results of a session: the end of an answer, and a summary."""

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from localchat.errors import LocalchatError, UsageError

if TYPE_CHECKING:
    from localchat.chat.conversation import Node
    from localchat.chat.overflow import Overflow


STOPPED: Final = "The answer was stopped; its text is kept"
"""Hint after a command that had to stop the answer under way."""


class Outcome(NamedTuple):
    """End of an answer."""

    end: Literal["complete", "stopped", "failed", "too_long"]
    node: "Node | None" = None
    """The answer. None if none of it arrived."""
    error: LocalchatError | None = None
    overflow: "Overflow | None" = None
    """Choices for a prompt that was too long. None if the engine cannot count tokens."""


class SummaryResult(NamedTuple):
    """Summary that replaces the older part of the conversation."""

    text: str
    messages: int
    """Number of messages that it newly replaces."""


class AnswerUnderWay(UsageError):
    """A command has to wait for the end of the answer."""

    def __init__(self) -> None:
        super().__init__("an answer is under way", hint="Esc stops it")
