"""Welcome text of the first run: hardware, local models, and three recommendations.

It is a separate module because only the first run needs its imports.
"""

import threading
from collections.abc import Callable, Iterator

from localchat.errors import LocalchatError
from localchat.models.onboarding import FirstRun
from localchat.models.recommended_models import Recommendation
from localchat.sanitize import sanitize_line
from localchat.units import duration, size

_MAX_EXTERNAL = 6
_TIMEOUT_S = 3.0
"""Longest wait for the recommendations, which take a second on an idle machine."""


def found_soon(find: Callable[[], FirstRun], timeout_s: float = _TIMEOUT_S) -> FirstRun | None:
    """Return the first run, or None after the timeout. Raises LocalchatError.

    The first question should not wait for recommendations.
    """
    results: list[FirstRun | LocalchatError] = []

    def run() -> None:
        try:
            results.append(find())
        except LocalchatError as problem:
            results.append(problem)

    thread = threading.Thread(target=run, name="first-run", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not results:
        return None
    (result,) = results
    if isinstance(result, LocalchatError):
        raise result
    return result


def welcome(first_run: FirstRun) -> Iterator[str]:
    """Format the first run for a terminal."""
    yield sanitize_line(first_run.hardware)
    if first_run.external:
        yield ""
        yield "Already here, and usable in place:"
        for model in first_run.external[:_MAX_EXTERNAL]:
            yield f"  localchat run {sanitize_line(model.name)}   ({sanitize_line(model.origin)})"
        if len(first_run.external) > _MAX_EXTERNAL:
            yield f"  and {len(first_run.external) - _MAX_EXTERNAL} more: localchat list"
    if first_run.recommendations:
        yield ""
        yield "Recommended models for this machine:"
        for recommendation in first_run.recommendations:
            yield from _recommendation(recommendation)
        speed = f"{size(int(first_run.rate.bytes_per_s))}/s"
        if first_run.rate.measured:
            yield f"Download times by the last pull, {speed}."
        else:
            yield f"Download times assume {speed}."
    yield ""


def _recommendation(recommendation: Recommendation) -> Iterator[str]:
    yield f"  {recommendation.command}"
    yield (
        f"      {recommendation.summary}, {duration(recommendation.download_s)}. {recommendation.about}"
    )
