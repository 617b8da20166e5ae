"""The welcome of an empty conversation: the model, first steps, and models that fit on the first run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Final, NamedTuple

from textual import events
from textual.content import Content
from textual.message import Message
from textual.widget import Widget

from localchat.models.resolve import GUIDE
from localchat.sanitize import sanitize_line
from localchat.session.blocks import Offer
from localchat.session.context import ModelSetup
from localchat.tui.guide_answers import ASK_PREFIX
from localchat.tui.keymap import key_names, offer_key

if TYPE_CHECKING:
    from localchat.models.onboarding import FirstRun

FETCH_PREFIX: Final = "fetch "
"""Prefix of the action that offers a download. The name and description of the model follow."""
_LOW_ROWS: Final = 6
_MAX_EXTERNAL: Final = 2
_MAX_MODELS: Final = 4
_USAGE: Final = "Type a question. / lists the commands, @ includes a file, F1 explains the keys."
_GUIDE: Final = (
    "You're talking to the built-in guide.",
    "It knows localchat; choose a model for anything else.",
)
_SAMPLES: Final = (
    "What can localchat do?",
    "Which model should I choose?",
    "How do I ask about a file?",
)


class Greeting(NamedTuple):
    """Contents of a welcome."""

    lines: tuple[str, ...] = ()
    usage: str = ""
    samples: tuple[str, ...] = ()
    """Sample questions."""
    models: tuple[Offer, ...] = ()
    """Offers of models."""
    chooses_model: bool = False
    """Whether the welcome offers to choose a model."""
    searching: bool = False
    """Whether the search for models is running."""


class WelcomeRow(NamedTuple):
    """Row of the welcome."""

    text: Content
    rank: int
    """Order of omission: a low window omits the highest rank first."""
    action: str = ""
    """Action of a click."""


class Welcome(Widget):
    """A greeting, questions and models in the middle of the screen. A click or a key accepts one.

    The keys of questions and models never change, even if the models appear seconds later.
    """

    @dataclass
    class Taken(Message):
        """An offer was chosen."""

        action: str

    def __init__(self, greeting: Greeting, keys: Mapping[str, str], *, id: str) -> None:  # noqa: A002 - textual's word
        """`keys` is the keymap of the settings."""
        super().__init__(id=id)
        self.greeting = greeting
        self._keys = keys
        self._actions: dict[int, str] = {}
        """Actions by row of the widget."""

    def set_greeting(self, greeting: Greeting) -> None:
        """Show another greeting."""
        self.greeting = greeting
        self.refresh(layout=True)

    @property
    def offers(self) -> dict[int, str]:
        """Actions of all offers, by the number of their key."""
        questions = [f"{ASK_PREFIX}{sample}" for sample in self.greeting.samples]
        models = [offer.action for offer in self.greeting.models]
        return dict(enumerate([*questions, *models], 1))

    @property
    def reserved(self) -> int:
        """Number of keys that belong to current or later offers."""
        if self.greeting.samples:
            return len(self.greeting.samples) + _MAX_MODELS
        return 0

    def choose(self, number: int) -> bool:
        """Accept an offer by its number. Return False if it does not exist."""
        action = self.offers.get(number)
        if action is not None:
            self.post_message(self.Taken(action))
        return action is not None

    def on_click(self, event: events.Click) -> None:
        if action := self._actions.get(event.y):
            self.post_message(self.Taken(action))

    def render(self) -> Content:
        width = max(10, self.size.width - 2)
        rows = list(self._rows(width, wrapped=True))
        if len(rows) > self.size.height:
            rows = _fit_rows(list(self._rows(width, wrapped=False)), self.size.height)
        above = max(0, (self.size.height - len(rows)) // 2)
        self._actions = {y: row.action for y, row in enumerate(rows, above) if row.action}
        lines = _center([row.text for row in rows], self.size.width)
        return Content("\n" * above) + Content("\n").join(lines)

    def _rows(self, width: int, *, wrapped: bool) -> Iterator[WelcomeRow]:
        """Yield all rows. `wrapped` wraps long lines instead of dropping their last parts."""
        greeting = self.greeting
        yield WelcomeRow(Content.styled("localchat", "bold $primary"), 0)
        yield _BLANK
        for number, line in enumerate(greeting.lines):
            rank = 4 if number else 2
            for row in self._lines(sanitize_line(line), width, wrapped=wrapped):
                yield WelcomeRow(Content.styled(row, "$foreground 70%"), rank)
        if greeting.usage:
            yield _BLANK
            for row in self._lines(greeting.usage, width, wrapped=wrapped):
                yield WelcomeRow(Content.styled(row, "$foreground 70%"), 6)
        number = 1
        if greeting.samples:
            yield _BLANK
            yield _heading("Ask, for instance")
            for sample in greeting.samples:
                yield self._offer_row(number, Offer(sample, f"{ASK_PREFIX}{sample}"), width, 3)
                number += 1
        if greeting.models or greeting.chooses_model:
            yield _BLANK
        if greeting.searching:
            yield _heading(_shorten("Looking for models that fit this computer…", width))
        if greeting.models:
            yield _heading(_shorten("Models that fit this computer", width))
            for offer in greeting.models:
                yield self._offer_row(number, offer, width, 1)
                number += 1
        if greeting.chooses_model:
            key = key_names("screen.models", self._keys).partition(", ")[0]
            yield _choice(key, "choose a model", "model", width, 1)

    def _lines(self, text: str, width: int, *, wrapped: bool) -> list[str]:
        if wrapped:
            return _wrap_parts(text, width)
        shortened = _shorten(text, width)
        # In a low window a sentence is cut, with an ellipsis.
        if self.size.height < _LOW_ROWS or not shortened.endswith("…"):
            return [shortened]
        return wrap(text, width)

    def _offer_row(self, number: int, offer: Offer, width: int, rank: int) -> WelcomeRow:
        return _choice(offer_key(number, self._keys), offer.label, offer.action, width, rank)


_BLANK: Final = WelcomeRow(Content(""), 7)
_KEY_CELLS: Final = 7


def _heading(text: str) -> WelcomeRow:
    return WelcomeRow(Content.styled(text, "$foreground 70%"), 5)


def _choice(key: str, label: str, action: str, width: int, rank: int) -> WelcomeRow:
    text = _shorten(sanitize_line(label), width - _KEY_CELLS)
    shown = Content.assemble((f"{key:<{_KEY_CELLS}}", "bold $accent"), text)
    return WelcomeRow(shown, rank, action)


def _fit_rows(rows: list[WelcomeRow], room: int) -> list[WelcomeRow]:
    """Return the rows that fit a low window, without those of the highest rank."""
    while len(rows) > max(1, room):
        index = max(range(len(rows)), key=lambda index: (rows[index].rank, index))
        del rows[index]
    return rows


def _wrap_parts(line: str, width: int) -> list[str]:
    """Wrap a line. No row begins with the dot between two parts."""
    rows = wrap(line.replace(" ·", "\u00a0·"), width)
    return [row.replace("\u00a0", " ") for row in rows]


def _shorten(line: str, width: int) -> str:
    """Shorten a line to a width: drop its last parts, or end it with an ellipsis if it has none."""
    while len(line) > width:
        end = max(line.rfind(joint, 0, width + 1) for joint in (" · ", ", ", "; ", ": "))
        if end < width // 3:
            return f"{line[: width - 1].rstrip()}…"
        line = line[:end]
    return line


def _center(lines: Sequence[Content], width: int) -> list[Content]:
    """Indent all lines by the same amount, so that the widest is centered."""
    widest = max((line.cell_length for line in lines), default=0)
    indent = " " * max(1, (width - widest) // 2)
    return [Content(indent) + line for line in lines]


def greeting(setup: ModelSetup) -> Greeting:
    """Return the greeting for the model in use."""
    if setup.model.name != GUIDE:
        return Greeting((f"You're talking to {setup.model.name}.",), _USAGE)
    return Greeting(_GUIDE, "", _SAMPLES, chooses_model=True)


def first_greeting(first_run: "FirstRun") -> Greeting:
    """Return the greeting of the first run: hardware, models of other programs, and recommendations."""
    offers = [
        Offer(f"{model.name}, here already ({model.origin})", f"model {model.name}")
        for model in first_run.external[:_MAX_EXTERNAL]
    ]
    for recommendation in first_run.recommendations:
        label = f"{recommendation.name} · {recommendation.summary}"
        offers.append(Offer(label, f"{FETCH_PREFIX}{recommendation.name} {label}"))
    models = tuple(offers[:_MAX_MODELS])
    return Greeting((*_GUIDE, first_run.hardware), "", _SAMPLES, models, chooses_model=True)
