"""Blocks of a transcript: frozen values, made from a conversation.

Texts are raw. The widget that shows them sanitizes them.
"""

from typing import Final, Literal, NamedTuple, TypeAlias

from localchat.chat.conversation import ToolRun
from localchat.engine.request import Attachment

RETRY: Final = "retry"
"""Action of an offer that answers the last question again."""
OVERFLOW_PREFIX: Final = "overflow/"
"""Prefix of the actions that make room in the context."""

END_PREFIX: Final = "end/"
"""Prefix of the actions for an answer that repeats itself."""


class Fold(NamedTuple):
    """Characters `start` to `end` of a text, shown as a label until unfolded."""

    label: str
    start: int
    end: int


class Branch(NamedTuple):
    """Version `number` of `total` of a message, counted from 1."""

    number: int
    total: int


class UserBlock(NamedTuple):
    """A question of the user."""

    id: str
    text: str
    folds: tuple[Fold, ...] = ()
    branch: Branch = Branch(1, 1)
    dimmed: bool = False
    """Whether the block is no longer sent to the model."""
    attachments: tuple[Attachment, ...] = ()


class AnswerBlock(NamedTuple):
    """An answer of a model, in Markdown."""

    id: str
    text: str
    branch: Branch = Branch(1, 1)
    footer: str = ""
    """Line of metrics below the answer."""
    dimmed: bool = False
    ended: str = ""
    """Why the answer is not complete. Shown above its metrics."""


class ReasoningBlock(NamedTuple):
    """Reasoning of a model, folded to one line until opened."""

    id: str
    text: str
    seconds: float | None = None
    """Duration. None while the reasoning continues."""
    dimmed: bool = False


class ToolCallBlock(NamedTuple):
    """A tool call of the model, with its result once it has run."""

    id: str
    name: str
    arguments: str
    """JSON text."""
    dimmed: bool = False
    run: ToolRun | None = None
    """State, time and size of the result. None if the call has not begun, or nothing runs it."""
    result: str = ""
    """Result as the model sees it."""


class SummaryBlock(NamedTuple):
    """A summary that replaces earlier messages, in Markdown."""

    id: str
    text: str
    messages: int
    tokens: int
    """Tokens of the summary. 0 if they were not counted."""
    dimmed: bool = False
    is_new: bool = False
    """Whether the user has not seen the summary yet. It is shown open then."""


class Offer(NamedTuple):
    """A choice of a notice."""

    label: str
    action: str
    """Command that the front end runs if the user takes the offer."""
    key: str = ""
    """Name of the key that takes the offer, if there is one."""


class NoticeBlock(NamedTuple):
    """A message of the program."""

    id: str
    text: str
    kind: Literal["info", "warning", "error"] = "info"
    offers: tuple[Offer, ...] = ()
    """Choices that a click or a key takes."""
    first: int = 1
    """Number of the first offer. Keys take offers by number."""


class ProgressBlock(NamedTuple):
    """Progress of a request before its first token."""

    id: str
    text: str
    share: float | None = None
    """Completed share, from 0 to 1. None if unknown."""


Block: TypeAlias = (
    UserBlock
    | AnswerBlock
    | ReasoningBlock
    | ToolCallBlock
    | SummaryBlock
    | NoticeBlock
    | ProgressBlock
)
