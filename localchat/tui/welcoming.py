"""What an empty chat says: who answers, how to begin, and on the first run what this machine can do."""

from typing import TYPE_CHECKING, NamedTuple

from localchat.fit.report import duration, rate, size
from localchat.models.resolve import GUIDE
from localchat.tui.blocks import Offer
from localchat.tui.workplace import Settled

if TYPE_CHECKING:
    from localchat.models.onboarding import Card, FirstRun

_MOST_ADOPTABLE = 2
_HOW = (
    "Enter sends, Ctrl+J begins a new line",
    "/ commands · @ files · Ctrl+R conversations",
    "Ctrl+O figures · F1 everything else",
)
_GUIDE = (
    "The guide answers: a small model that came with the program.",
    "It knows localchat; for everything else choose a model.",
)
_ANOTHER = Offer("choose a model (F3)", "model")


class Greeting(NamedTuple):
    """Lines, and offers below them."""

    lines: tuple[str, ...]
    offers: tuple[Offer, ...] = ()


def greeting(settled: Settled) -> Greeting:
    """What is said at once."""
    if settled.model.name != GUIDE:
        return Greeting((f"{settled.model.name} answers.", "", *_HOW))
    return Greeting((*_GUIDE, "", *_HOW), (_ANOTHER,))


def first_greeting(found: "FirstRun") -> Greeting:
    """The same for somebody who has no model yet: hardware, what other programs have here, three cards."""
    here = [
        Offer(f"{model.name}, here already ({model.origin})", f"model {model.name}")
        for model in found.adoptable[:_MOST_ADOPTABLE]
    ]
    cards = [Offer(_card(card), f"pull {card.name}") for card in found.cards]
    offers = (*(here + cards)[:4], _ANOTHER)
    return Greeting((*_GUIDE, "", found.hardware, "", *_HOW[:2]), offers)


def _card(card: "Card") -> str:
    speed = f", about {rate(card.tokens_per_s)}" if card.tokens_per_s is not None else ""
    fetch = f"{size(card.size_bytes)}, {duration(card.download_s)} to fetch"
    return f"{card.role}: {card.name} · {fetch}{speed}"
