"""What a load took beside what was planned: a planner that is wrong says so itself."""

from collections.abc import Sequence

from localchat.fit.words import percent, size

_SHARE = 0.1
_LEAST_BYTES = 64_000_000
"""Below, a difference is noise of the allocator and of the interpreter."""


def surprise(predicted: Sequence[int], actual: Sequence[int]) -> str:
    """One sentence where the parts took over a tenth more or less than planned; empty otherwise. Parts in
    bytes, in the same order; -1 in `actual` is not known and does not count."""
    known = [(plan, took) for plan, took in zip(predicted, actual, strict=True) if took >= 0]
    planned, took = sum(plan for plan, _ in known), sum(took for _, took in known)
    difference = abs(took - planned)
    if difference <= max(_SHARE * planned, _LEAST_BYTES):
        return ""
    word = "more" if took > planned else "less"
    return (
        f"the load took {size(took)} where {size(planned)} were planned, {percent(difference, planned)} "
        f"{word}: `fit` is off by as much for this model"
    )
