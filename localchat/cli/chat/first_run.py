"""Welcome text of the first run: hardware, local models, and three recommended ones.

A module of its own because only the first run imports it, and what it imports.
"""

import threading
from collections.abc import Callable, Iterator

from localchat.errors import LocalchatError
from localchat.models.onboarding import FirstRun
from localchat.models.recommended_models import Recommendation
from localchat.sanitize import sanitize_line
from localchat.units import duration, size

_MOST_EXTERNAL = 6
_PATIENCE_S = 2.0
"""Planning the models of the catalogue takes half a second on a quiet machine."""


def found_soon(find: Callable[[], FirstRun], patience_s: float = _PATIENCE_S) -> FirstRun | None:
    """The first run, or None if that takes too long: nobody waits for it before the first question.

    Raises LocalchatError."""
    found: list[FirstRun] = []
    failed: list[LocalchatError] = []

    def look() -> None:
        try:
            found.append(find())
        except LocalchatError as problem:
            failed.append(problem)

    thread = threading.Thread(target=look, name="first-run", daemon=True)
    thread.start()
    thread.join(patience_s)
    if failed:
        raise failed[0]
    return found[0] if found else None


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
        yield "Recommended models for this machine:"
        for recommendation in found.recommendations:
            yield from _recommendation(recommendation)
        per_s = f"{size(int(found.rate.bytes_per_s))}/s"
        yield (
            f"Download times by the last pull, {per_s}."
            if found.rate.measured
            else f"Download times assume {per_s}."
        )
    yield ""


def _recommendation(recommendation: Recommendation) -> Iterator[str]:
    yield f"  {recommendation.command}"
    yield (
        f"      {recommendation.summary}, {duration(recommendation.download_s)}. {recommendation.about}"
    )
