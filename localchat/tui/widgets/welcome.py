"""The welcome of an empty conversation: the model, how to begin, and on the first run models that fit."""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, NamedTuple

from textual import events
from textual.content import Content
from textual.message import Message
from textual.widget import Widget

from localchat.models.resolve import GUIDE
from localchat.sanitize import sanitize_line
from localchat.session.blocks import Offer
from localchat.session.context import ModelSetup
from localchat.units import duration, rate, size

if TYPE_CHECKING:
    from localchat.models.onboarding import FirstRun, Recommendation


_MAX_EXTERNAL = 2
_USAGE = (
    "Enter sends, Ctrl+J begins a new line",
    "/ commands · @ files · Ctrl+R conversations",
    "Ctrl+O metrics · F1 everything else",
)
_GUIDE = (
    "You're talking to the built-in guide.",
    "It knows localchat; choose a model for anything else.",
)
_CHOOSE_MODEL = Offer("choose a model (F3)", "model")


class Welcome(Widget):
    """A greeting and offers in the middle of the screen. A click or Alt and its number accepts an offer."""

    @dataclass
    class Taken(Message):
        """An offer was chosen."""

        action: str

    def __init__(self, *, id: str) -> None:  # noqa: A002 - textual's word
        super().__init__(id=id)
        self.greeting: tuple[str, ...] = ()
        self._offers: tuple[Offer, ...] = ()
        self._offers_hidden = False
        self._offer_rows: dict[int, int] = {}

    def set_greeting(self, greeting: Sequence[str], offers: Sequence[Offer] = ()) -> None:
        """Show another greeting."""
        self.greeting, self._offers = tuple(greeting), tuple(offers)
        self.refresh(layout=True)

    @property
    def offers(self) -> tuple[Offer, ...]:
        """The offers that can be accepted now."""
        return () if self._offers_hidden else self._offers

    def set_offers_hidden(self, hidden: bool) -> None:
        """Hide the offers while a notice has some, which the same keys accept."""
        if hidden != self._offers_hidden:
            self._offers_hidden = hidden
            self.refresh(layout=True)

    def choose(self, number: int) -> None:
        """Accept an offer, counted from 1."""
        if 1 <= number <= len(self.offers):
            self.post_message(self.Taken(self.offers[number - 1].action))

    def on_click(self, event: events.Click) -> None:
        self.choose(self._offer_rows.get(event.y, 0))

    def render(self) -> Content:
        width = max(10, self.size.width - 2)
        sanitized = [sanitize_line(line) for line in self.greeting]
        greeting = _fit_lines(sanitized, width, self.size.height - 3 - len(self.offers))
        lines: list[Content] = [
            Content.assemble(("localchat", "bold $primary")),
            Content(""),
            *(Content.styled(line, "$foreground 60%") for line in greeting),
        ]
        first = len(lines) + 1
        if self.offers:
            lines.append(Content(""))
        for number, offer in enumerate(self.offers, 1):
            text = _shorten(sanitize_line(offer.label), width - 8)
            lines.append(Content.assemble((f" alt+{number} ", "bold $accent"), f" {text}"))
        above = max(0, (self.size.height - len(lines)) // 2)
        self._offer_rows = {above + first + n: n + 1 for n in range(len(self.offers))}
        return Content("\n" * above) + Content("\n").join(_center(lines, self.size.width))


def _fit_lines(lines: Sequence[str], width: int, room: int) -> list[str]:
    """The rows that fit a low window: empty lines are left out first, then the last lines, each as a whole."""
    wrapped = [_wrap_line(line, width) for line in lines]
    if sum(map(len, wrapped)) > room:
        wrapped = [rows for rows, line in zip(wrapped, lines, strict=True) if line]
    kept: list[str] = []
    for rows in wrapped:
        if len(kept) + len(rows) > room:
            break
        kept += rows
    return kept or [_shorten(lines[0], width)] if lines else []


def _wrap_line(line: str, width: int) -> list[str]:
    """Wrap a sentence; shorten a line of parts."""
    shortened = _shorten(line, width)
    return wrap(line, width) if shortened.endswith("…") else [shortened]


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


class Greeting(NamedTuple):
    """Lines of a welcome and the offers below them."""

    lines: tuple[str, ...]
    offers: tuple[Offer, ...] = ()


def greeting(setup: ModelSetup) -> Greeting:
    """The greeting for the model in use."""
    if setup.model.name != GUIDE:
        return Greeting((f"You're talking to {setup.model.name}.", "", *_USAGE))
    return Greeting((*_GUIDE, "", *_USAGE), (_CHOOSE_MODEL,))


def first_greeting(found: "FirstRun") -> Greeting:
    """The greeting of the first run: hardware, models of other programs, and recommended models."""
    here = [
        Offer(f"{model.name}, here already ({model.origin})", f"model {model.name}")
        for model in found.external[:_MAX_EXTERNAL]
    ]
    downloads = [Offer(_download_label(one), f"pull {one.name}") for one in found.recommendations]
    offers = (*(here + downloads)[:4], _CHOOSE_MODEL)
    return Greeting((*_GUIDE, "", found.hardware, "", *_USAGE[:2]), offers)


def _download_label(suggestion: "Recommendation") -> str:
    speed = (
        f", about {rate(suggestion.tokens_per_s)}" if suggestion.tokens_per_s is not None else ""
    )
    fetch = f"{size(suggestion.size_bytes)}, {duration(suggestion.download_s)} download"
    return f"{suggestion.role}: {suggestion.name} · {fetch}{speed}"
