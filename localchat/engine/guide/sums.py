"""Checks of the sums in the guide's answers.

A model of the guide's size copies most numbers and memorizes the sums of its training. It cannot calculate.
"""

import re
from typing import Final

_NUMBER: Final = re.compile(r"\d+(?:[.,]\d+)*")
_WEIGHTS: Final = re.compile(r"([\d.]+) GB: ([\d.]+) billion × (\d+) / 8")
_SPEED: Final = re.compile(r"about ([\d.]+) tok/s: ([\d.]+) / ([\d.]+\d)")
_DOWNLOAD: Final = re.compile(r"([\d.]+) × 8 / ([\d.]+) = ([\d.]+) s")
_FITS: Final = re.compile(r"An? ([\d.]+)B at Q4_K_M has ([\d.]+) GB of weights, so on ([\d.]+) GB")
_KV: Final = re.compile(r"[A-Z][\w. -]*[ -]([\d.]+)B needs ")
SUM: Final = re.compile(r"(An? )?\d|About |At most ")
"""Start of an answer with a sum."""
_TOLERANCE: Final = 0.04
"""Relative error of a rounded result."""
_GB_PER_BILLION: Final = (0.55, 0.76)
"""Size of a Q4_K_M file per billion parameters. Small models have larger embeddings."""


def holds(user_text: str, answer: str) -> bool:
    """Return whether the sum of an answer is right and uses numbers of the user. True without a sum."""
    numbers = {_value(text) for text in _NUMBER.findall(user_text)}
    if match := _WEIGHTS.match(answer):
        gigabytes, billions, bits = map(float, match.groups())
        return billions in numbers and _equal(gigabytes, billions * bits / 8)
    if match := _SPEED.search(answer):
        rate, bandwidth, size = map(float, match.groups())
        return bool({bandwidth, bandwidth / 1000} & numbers) and _equal(rate, bandwidth / size)
    if match := _DOWNLOAD.search(answer):
        gigabytes, gigabits, seconds = map(float, match.groups())
        return gigabytes in numbers and _equal(seconds, gigabytes * 8 / gigabits)
    if match := _FITS.match(answer):
        billions, gigabytes, memory = map(float, match.groups())
        low, high = _GB_PER_BILLION
        return {billions, memory} <= numbers and low <= gigabytes / billions <= high
    if match := _KV.match(answer):
        return float(match[1]) in numbers
    return True


def _equal(stated: float, expected: float) -> bool:
    return abs(stated - expected) <= max(_TOLERANCE * expected, 0.5)


def _value(text: str) -> float:
    """Parse a number whose comma separates either thousands or decimals."""
    integer, comma, decimals = text.rpartition(",")
    if comma and len(decimals) != 3:
        text = f"{integer}.{decimals}"
    try:
        return float(text.replace(",", ""))
    except ValueError:  # such as 3.10.2
        return -1.0
