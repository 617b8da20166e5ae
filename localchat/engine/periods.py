"""Periods of the end of a text: the lengths after which it repeats itself."""

from collections.abc import Iterable
from typing import Final

_NEEDLES: Final = (128, 300, 1200, 3000)
"""Lengths of suffixes to search for. The distance to the previous occurrence is the period.

A suffix of twice the period finds every run. A shorter one finds a run sooner.
"""


def periods(text: str) -> Iterable[int]:
    """Yield candidates for the period of the end of a text, shortest first."""
    previous = 0
    for length in _NEEDLES:
        if length >= len(text):
            return
        start = text.rfind(text[-length:], 0, len(text) - 1)
        if start < 0:
            return
        period = len(text) - length - start
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
