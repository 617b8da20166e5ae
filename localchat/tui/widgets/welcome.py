"""What stands where nothing was said yet: who answers, what one can do, and what fits this machine."""

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


class Welcome(Widget):
    """Lines in the middle of the screen. `offers` are taken by a click or their number; none are made while a
    notice makes some, which the same keys take."""

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
        """Say this. The first line is the largest."""
        self.greeting, self._offers = tuple(greeting), tuple(offers)
        self.refresh(layout=True)

    @property
    def offers(self) -> tuple[Offer, ...]:
        """Those that can be taken now."""
        return () if self._offers_hidden else self._offers

    def set_offers_hidden(self, by_notice: bool) -> None:
        """Whether a notice makes offers."""
        if by_notice != self._offers_hidden:
            self._offers_hidden = by_notice
            self.refresh(layout=True)

    def choose(self, number: int) -> None:
        """Choose an offer, counted from 1."""
        if 1 <= number <= len(self.offers):
            self.post_message(self.Taken(self.offers[number - 1].action))

    def on_click(self, event: events.Click) -> None:
        self.choose(self._offer_rows.get(event.y, 0))

    def render(self) -> Content:
        width = max(10, self.size.width - 2)
        said = [sanitize_line(line) for line in self.greeting]
        greeting = _fit_lines(said, width, self.size.height - 3 - len(self.offers))
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
    """The rows that a low window has room for: first the empty ones go, then the last lines, each as a
    whole."""
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
    """A sentence goes on below itself; a line of parts goes without its last ones."""
    shortened = _shorten(line, width)
    return wrap(line, width) if shortened.endswith("…") else [shortened]


def _shorten(line: str, width: int) -> str:
    """What fits of a line: without its last parts where it has parts, else with a sign that there was more."""
    while len(line) > width:
        at = max(line.rfind(joint, 0, width + 1) for joint in (" · ", ", ", "; ", ": "))
        if at < width // 3:
            return f"{line[: width - 1].rstrip()}…"
        line = line[:at]
    return line


def _center(lines: Sequence[Content], width: int) -> list[Content]:
    """All lines moved to the right alike, so that the widest stands in the middle."""
    widest = max((line.cell_length for line in lines), default=0)
    before = " " * max(1, (width - widest) // 2)
    return [Content(before) + line for line in lines]


# What an empty chat says: who answers, how to begin, and on the first run what this machine can do.


_MOST_EXTERNAL = 2
_USAGE = (
    "Enter sends, Ctrl+J begins a new line",
    "/ commands · @ files · Ctrl+R conversations",
    "Ctrl+O figures · F1 everything else",
)
_GUIDE = (
    "The guide answers: a small model that came with the program.",
    "It knows localchat; for everything else choose a model.",
)
_CHOOSE_MODEL = Offer("choose a model (F3)", "model")


class Greeting(NamedTuple):
    """Lines, and offers below them."""

    lines: tuple[str, ...]
    offers: tuple[Offer, ...] = ()


def greeting(setup: ModelSetup) -> Greeting:
    """What is said at once."""
    if setup.model.name != GUIDE:
        return Greeting((f"{setup.model.name} answers.", "", *_USAGE))
    return Greeting((*_GUIDE, "", *_USAGE), (_CHOOSE_MODEL,))


def first_greeting(found: "FirstRun") -> Greeting:
    """The same for somebody who has no model yet: hardware, what other programs have here, recommendations."""
    here = [
        Offer(f"{model.name}, here already ({model.origin})", f"model {model.name}")
        for model in found.external[:_MOST_EXTERNAL]
    ]
    recommendations = [
        Offer(_fetch_label(suggestion), f"pull {suggestion.name}")
        for suggestion in found.recommendations
    ]
    offers = (*(here + recommendations)[:4], _CHOOSE_MODEL)
    return Greeting((*_GUIDE, "", found.hardware, "", *_USAGE[:2]), offers)


def _fetch_label(suggestion: "Recommendation") -> str:
    speed = (
        f", about {rate(suggestion.tokens_per_s)}" if suggestion.tokens_per_s is not None else ""
    )
    fetch = f"{size(suggestion.size_bytes)}, {duration(suggestion.download_s)} to fetch"
    return f"{suggestion.role}: {suggestion.name} · {fetch}{speed}"
