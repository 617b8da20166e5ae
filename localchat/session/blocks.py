"""What the transcript shows: one frozen value per block, made from a conversation. No textual here.

Texts are raw; the transcript makes them inert at the display boundary.
"""

from typing import Literal, NamedTuple, TypeAlias


class Fold(NamedTuple):
    """Characters `start` to `end` of a text, shown as one chip with this label until it is opened."""

    label: str
    start: int
    end: int


class Branch(NamedTuple):
    """Version `number` of `total` of a message, counted from 1."""

    number: int
    total: int


class UserBlock(NamedTuple):
    """A question. `dimmed`: it is not sent any more."""

    id: str
    text: str
    folds: tuple[Fold, ...] = ()
    branch: Branch = Branch(1, 1)
    dimmed: bool = False


class AnswerBlock(NamedTuple):
    """Markdown of a model. `footer`: one quiet line below (figures, why it stopped)."""

    id: str
    text: str
    branch: Branch = Branch(1, 1)
    footer: str = ""
    dimmed: bool = False


class ReasoningBlock(NamedTuple):
    """What a model thought, folded to one line until it is opened. `seconds`: how long, once it ended."""

    id: str
    text: str
    seconds: float | None = None
    dimmed: bool = False


class ToolCallBlock(NamedTuple):
    """A call that the model asked for. localchat runs none. `arguments`: JSON text."""

    id: str
    name: str
    arguments: str
    dimmed: bool = False


class SummaryBlock(NamedTuple):
    """A summary that stands for earlier messages; Markdown."""

    id: str
    text: str
    messages: int
    tokens: int
    dimmed: bool = False


class Offer(NamedTuple):
    """Something that a notice lets one choose: `action` is a key of the app's actions."""

    label: str
    action: str


class NoticeBlock(NamedTuple):
    """A word of the program. `offers` are shown as choices that a click or their number takes."""

    id: str
    text: str
    kind: Literal["info", "warning", "error"] = "info"
    offers: tuple[Offer, ...] = ()


Block: TypeAlias = (
    UserBlock | AnswerBlock | ReasoningBlock | ToolCallBlock | SummaryBlock | NoticeBlock
)
