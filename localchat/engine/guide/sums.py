"""Sums in the guide's answers: whether they hold, and are about the numbers of the question.

A model of its size copies most numbers and knows the sums of its table by heart; it can calculate no other.
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
"""How an answer with a sum begins."""
_OFF: Final = 0.04
"""Relative error of a rounded result."""
_PER_BILLION: Final = (0.55, 0.76)
"""GB of a file at Q4_K_M for a billion parameters; small models have larger embeddings."""


def holds(said: str, answer: str) -> bool:
    """Whether the sum that an answer begins with is right and its numbers were `said`; true without a sum."""
    numbers = {_value(found) for found in _NUMBER.findall(said)}
    if found := _WEIGHTS.match(answer):
        gigabytes, billions, bits = map(float, found.groups())
        return billions in numbers and _equal(gigabytes, billions * bits / 8)
    if found := _SPEED.search(answer):
        rate, width, size = map(float, found.groups())
        return bool({width, width / 1000} & numbers) and _equal(rate, width / size)
    if found := _DOWNLOAD.search(answer):
        gigabytes, gigabits, seconds = map(float, found.groups())
        return gigabytes in numbers and _equal(seconds, gigabytes * 8 / gigabits)
    if found := _FITS.match(answer):
        billions, gigabytes, memory = map(float, found.groups())
        low, high = _PER_BILLION
        return {billions, memory} <= numbers and low <= gigabytes / billions <= high
    if found := _KV.match(answer):
        return float(found[1]) in numbers
    return True


def _equal(stated: float, right: float) -> bool:
    return abs(stated - right) <= max(_OFF * right, 0.5)


def _value(text: str) -> float:
    """A number as it was typed: with a comma for thousands or for decimals."""
    whole, comma, rest = text.rpartition(",")
    if comma and len(rest) != 3:
        text = f"{whole}.{rest}"
    try:
        return float(text.replace(",", ""))
    except ValueError:  # such as 3.10.2
        return -1.0
