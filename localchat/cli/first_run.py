"""Welcome text of the first run: hardware, local models, and three recommended ones.

A module of its own because only the first run imports it, and what it imports.
"""

from collections.abc import Iterator

from localchat.models.onboarding import FirstRun, Recommendation
from localchat.sanitize import sanitize_line
from localchat.units import duration, rate, size

_MOST_EXTERNAL = 6


def welcome(found: FirstRun) -> Iterator[str]:
    """Format the first run for a terminal."""
    yield sanitize_line(found.hardware)
    if found.external:
        yield ""
        yield "Already here, and usable in place:"
        for model in found.external[:_MOST_EXTERNAL]:
            yield f"  localchat run {sanitize_line(model.name)}   ({sanitize_line(model.origin)})"
        if len(found.external) > _MOST_EXTERNAL:
            yield f"  and {len(found.external) - _MOST_EXTERNAL} more: localchat list"
    if found.recommendations:
        yield ""
        yield "Models that run here, besides the built-in guide:"
        for recommendation in found.recommendations:
            yield from _recommendation(recommendation)
        per_s = f"{size(int(found.rate.bytes_per_s))}/s"
        yield (
            f"Download times by the last pull, {per_s}."
            if found.rate.measured
            else f"Download times assume {per_s}."
        )
    yield ""


def _recommendation(one: Recommendation) -> Iterator[str]:
    speed = f", about {rate(one.tokens_per_s)}" if one.tokens_per_s is not None else ""
    yield f"  {one.role:<9}{one.command}"
    yield f"           {size(one.size_bytes)}, {duration(one.download_s)} to download{speed}. {one.about}"
