"""The welcome of an empty conversation: the model, how to begin, and on the first run models that fit."""

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
    from localchat.models.recommended_models import Recommendation

FETCH_PREFIX: Final = "fetch "
"""First part of the action that asks whether to download a model: its name and a line about it follow."""
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
    """Questions to begin with."""
    models: tuple[Offer, ...] = ()
    """Models to begin with."""
    chooses_model: bool = False
    """Whether choosing a model is offered."""
    searching: bool = False
    """Whether models to begin with are being looked for."""


class WelcomeRow(NamedTuple):
    """One row of the welcome."""

    text: Content
    rank: int
    """The row with the highest rank is left out first where the window is low."""
    action: str = ""
    """What a click does."""


class Welcome(Widget):
    """A greeting, questions and models in the middle of the screen. A click or a key accepts one.

    The keys of questions and models never change, also when the models appear seconds later."""

    @dataclass
    class Taken(Message):
        """An offer was chosen."""

        action: str

    def __init__(self, greeting: Greeting, keys: Mapping[str, str], *, id: str) -> None:  # noqa: A002 - textual's word
        """`keys`: the keymap of the settings."""
        super().__init__(id=id)
        self.greeting = greeting
        self._keys = keys
        self._actions: dict[int, str] = {}
        """By the row of the widget."""

    def set_greeting(self, greeting: Greeting) -> None:
        """Show another greeting."""
        self.greeting = greeting
        self.refresh(layout=True)

    @property
    def offers(self) -> dict[int, str]:
        """Actions of all offers, by the number of their key."""
        asked = {n: f"{ASK_PREFIX}{text}" for n, text in enumerate(self.greeting.samples, 1)}
        first = len(self.greeting.samples) + 1
        return asked | {n: offer.action for n, offer in enumerate(self.greeting.models, first)}

    @property
    def reserved(self) -> int:
        """How many numbers belong to offers that are here or may still come."""
        if self.greeting.samples:
            return len(self.greeting.samples) + _MAX_MODELS
        return 0

    def choose(self, number: int) -> bool:
        """Accept an offer by its number. False if there is none."""
        action = self.offers.get(number)
        if action is not None:
            self.post_message(self.Taken(action))
        return action is not None

    def on_click(self, event: events.Click) -> None:
        if action := self._actions.get(event.y):
            self.post_message(self.Taken(action))

    def render(self) -> Content:
        width = max(10, self.size.width - 2)
        rows = list(self._rows(width, whole=True))
        if len(rows) > self.size.height:
            rows = _fit_rows(list(self._rows(width, whole=False)), self.size.height)
        above = max(0, (self.size.height - len(rows)) // 2)
        self._actions = {above + at: row.action for at, row in enumerate(rows) if row.action}
        lines = _center([row.text for row in rows], self.size.width)
        return Content("\n" * above) + Content("\n").join(lines)

    def _rows(self, width: int, *, whole: bool) -> Iterator[WelcomeRow]:
        """`whole`: sentences of the greeting are wrapped, never cut at a joint."""
        greeting = self.greeting
        low = self.size.height < _LOW_ROWS  # half a sentence must show that it is half
        yield WelcomeRow(Content.styled("localchat", "bold $primary"), 0)
        yield _BLANK
        for number, line in enumerate(greeting.lines):
            text = sanitize_line(line)
            if whole and text.endswith("."):
                rows = wrap(text, width)
            else:
                rows = [_shorten(text, width)] if low else _wrap_line(text, width)
            for row in rows:
                yield WelcomeRow(Content.styled(row, "$foreground 70%"), 4 if number else 2)
        if greeting.usage:
            yield _BLANK
            for row in _wrap_line(greeting.usage, width):
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
    """The rows that fit a low window: those of the highest rank are left out, the last of them first."""
    while len(rows) > max(1, room):
        worst = max(range(len(rows)), key=lambda at: (rows[at].rank, at))
        del rows[worst]
    return rows


def _wrap_line(line: str, width: int) -> list[str]:
    """Wrap a sentence; shorten a line of parts."""
    shortened = _shorten(line, width)
    if shortened.endswith("…"):
        return wrap(line, width)
    return [shortened]


def _shorten(line: str, width: int) -> str:
    """Shorten a line to a width: drop its last parts, or end it with an ellipsis if it has none."""
    while len(line) > width:
        at = max(line.rfind(joint, 0, width + 1) for joint in (" · ", ", ", "; ", ": "))
        if at < width // 3:
            return f"{line[: width - 1].rstrip()}…"
        line = line[:at]
    return line


def _center(lines: Sequence[Content], width: int) -> list[Content]:
    """Indent all lines by the same amount, so that the widest is centered."""
    widest = max((line.cell_length for line in lines), default=0)
    before = " " * max(1, (width - widest) // 2)
    return [Content(before) + line for line in lines]


def greeting(setup: ModelSetup) -> Greeting:
    """The greeting for the model in use."""
    if setup.model.name != GUIDE:
        return Greeting((f"You're talking to {setup.model.name}.",), _USAGE)
    return Greeting(_GUIDE, "", _SAMPLES, chooses_model=True)


def first_greeting(found: "FirstRun") -> Greeting:
    """The greeting of the first run: hardware, models of other programs, and recommended models."""
    here = [
        Offer(f"{model.name}, here already ({model.origin})", f"model {model.name}")
        for model in found.external[:_MAX_EXTERNAL]
    ]
    downloads = [
        Offer(label := _download_label(one), f"{FETCH_PREFIX}{one.name} {label}")
        for one in found.recommendations
    ]
    models = tuple((here + downloads)[:_MAX_MODELS])
    return Greeting((*_GUIDE, found.hardware), "", _SAMPLES, models, chooses_model=True)


def _download_label(recommendation: "Recommendation") -> str:
    return f"{recommendation.name} · {recommendation.summary}"
