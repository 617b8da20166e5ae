"""Results of a session's work: how an answer ended, and what a summary replaced."""

from typing import TYPE_CHECKING, Literal, NamedTuple

from localchat.errors import LocalchatError, UsageError

if TYPE_CHECKING:
    from localchat.chat.conversation import Node
    from localchat.chat.overflow import Overflow


class Outcome(NamedTuple):
    """How an answer ended."""

    end: Literal["complete", "stopped", "failed", "too_long"]
    node: "Node | None" = None
    """The answer; None if none of it arrived."""
    error: LocalchatError | None = None
    overflow: "Overflow | None" = None
    """Ways to make room for a prompt that was too long; None if the engine cannot count tokens."""


class SummaryResult(NamedTuple):
    """Summary that replaces the older part of the conversation."""

    text: str
    messages: int
    """Messages that it newly replaces."""


class AnswerUnderWay(UsageError):
    """Something was asked for that must wait for the end of an answer."""

    def __init__(self) -> None:
        super().__init__("an answer is under way", hint="Esc stops it")
