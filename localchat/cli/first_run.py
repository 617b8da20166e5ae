"""The first run in words: hardware, models that are here already, and three to begin with."""

from collections.abc import Iterator

from localchat.models.onboarding import Card, FirstRun
from localchat.sanitize import sanitize_line
from localchat.units import duration, rate, size

_MOST_ADOPTABLE = 6


def welcome(found: FirstRun) -> Iterator[str]:
    """Lines for a terminal."""
    yield sanitize_line(found.hardware)
    if found.adoptable:
        yield ""
        yield "Here already, used where it lies:"
        for model in found.adoptable[:_MOST_ADOPTABLE]:
            yield f"  localchat run {sanitize_line(model.name)}   ({sanitize_line(model.origin)})"
        if len(found.adoptable) > _MOST_ADOPTABLE:
            yield f"  and {len(found.adoptable) - _MOST_ADOPTABLE} more: localchat list"
    if found.cards:
        yield ""
        yield "Models that run here, besides the built-in guide:"
        for card in found.cards:
            yield from _card(card)
        per_s = f"{size(int(found.rate.bytes_per_s))}/s"
        yield (
            f"Download times by the last pull, {per_s}."
            if found.rate.measured
            else f"Download times assume {per_s}."
        )
    yield ""


def _card(card: Card) -> Iterator[str]:
    speed = f", about {rate(card.tokens_per_s)}" if card.tokens_per_s is not None else ""
    yield f"  {card.role:<9}{card.command}"
    yield f"           {size(card.size_bytes)}, {duration(card.download_s)} to fetch{speed}. {card.about}"
