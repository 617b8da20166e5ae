"""Blocks of a transcript: one frozen value for each, made from a conversation.

Texts are raw; the widget that shows them sanitizes them.
"""

from typing import Final, Literal, NamedTuple, TypeAlias

RETRY: Final = "retry"
"""Action of an offer: answer the last question again."""
OVERFLOW_PREFIX: Final = "overflow/"
"""First part of the action of an offer to make room in the context."""

END_PREFIX: Final = "end/"
"""First part of the action of an offer about an answer that repeats itself."""


class Fold(NamedTuple):
    """Characters `start` to `end` of a text, shown as one label until it is unfolded."""

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
    """Not sent to the model any more. The same in the other blocks."""


class AnswerBlock(NamedTuple):
    """An answer of a model, in Markdown."""

    id: str
    text: str
    branch: Branch = Branch(1, 1)
    footer: str = ""
    """One line below the answer: its metrics."""
    dimmed: bool = False
    ended: str = ""
    """Why the answer is not complete; shown above its metrics."""


class ReasoningBlock(NamedTuple):
    """Reasoning of a model, folded to one line until it is opened."""

    id: str
    text: str
    seconds: float | None = None
    """Duration; None while it goes on."""
    dimmed: bool = False


class TriesBlock(NamedTuple):
    """The tries that an answer was chosen from, folded to one line until it is opened."""

    id: str
    label: str
    """What they brought and cost."""
    text: str
    dimmed: bool = False


class ToolCallBlock(NamedTuple):
    """A tool call of the model. localchat runs none."""

    id: str
    name: str
    arguments: str
    """JSON text."""
    dimmed: bool = False


class SummaryBlock(NamedTuple):
    """A summary that replaces earlier messages, in Markdown."""

    id: str
    text: str
    messages: int
    tokens: int
    """Of the summary; 0 if they were not counted."""
    dimmed: bool = False
    is_new: bool = False
    """Shown opened, because the user has not seen it yet."""


class Offer(NamedTuple):
    """A choice of a notice."""

    label: str
    action: str
    """What the application does when it is taken."""
    key: str = ""
    """The key that takes it, as a front end with keys writes it."""


class NoticeBlock(NamedTuple):
    """A message of the program."""

    id: str
    text: str
    kind: Literal["info", "warning", "error"] = "info"
    offers: tuple[Offer, ...] = ()
    """Shown as choices that a click or a key takes."""
    first: int = 1
    """Number of the first offer: keys take offers by number."""


class ProgressBlock(NamedTuple):
    """Progress of a request before its first words."""

    id: str
    text: str
    share: float | None = None
    """Part that is done, from 0 to 1; None if that is not known."""


Block: TypeAlias = (
    UserBlock
    | AnswerBlock
    | ReasoningBlock
    | TriesBlock
    | ToolCallBlock
    | SummaryBlock
    | NoticeBlock
    | ProgressBlock
)
