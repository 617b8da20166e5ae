"""Periods of a text's end: the lengths after which it repeats itself."""

from collections.abc import Iterable
from typing import Final

_NEEDLES: Final = (128, 300, 1200, 3000)
"""Lengths of the end whose previous occurrence gives the period. A needle of twice the period misses nothing,
and a short one finds the beginning of a run early."""


def periods(text: str) -> Iterable[int]:
    """Yield candidates of the period of the text's end, the shortest first."""
    previous = 0
    for length in _NEEDLES:
        if length >= len(text):
            return
        start = text.rfind(text[-length:], 0, len(text) - 1)
        period = len(text) - length - start
        if start < 0:
            return
        if period > previous:
            previous = period
            yield period


def run_length(text: str, period: int) -> int:
    """Return the number of characters at the end of a text that have this period."""
    low = period
    high = len(text)
    while low < high:
        middle = (low + high + 1) // 2
        end = text[len(text) - middle :]
        if end[period:] == end[:-period]:
            low = middle
        else:
            high = middle - 1
    return low
