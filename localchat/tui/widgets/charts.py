"""Bars and sparklines of block characters, as text."""

from collections.abc import Sequence
from typing import Final

_LEVELS: Final = "▁▂▃▄▅▆▇█"
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw the last `width` values on a scale of their own range.

    The scale spans at least a fifth of the largest value, so that a steady rate is a flat line in the middle.
    """
    shown = list(values)[-width:]
    high = max(shown, default=0.0)
    low = min(shown, default=0.0)
    if high <= 0:
        return ""
    span = 1.4 * max(high - low, high / 5)
    bottom = (high + low - span) / 2
    last = len(_LEVELS) - 1
    return "".join(_LEVELS[round((value - bottom) / span * last)] for value in shown)


def bar(part: float, total: float, width: int) -> str:
    """Draw `part` of `total` as a bar of `width` cells.

    Rounds to an eighth of a cell, but shows at least an eighth if `part` is positive.
    """
    share = 0.0
    if total > 0:
        share = min(1.0, max(0.0, part / total))
    eighths = round(share * width * 8)
    if part > 0 and not eighths:
        eighths = 1
    full_cells, last_eighths = divmod(eighths, 8)
    text = _EIGHTHS[8] * full_cells
    if last_eighths:
        text += _EIGHTHS[last_eighths]
    return text.ljust(width)


def shares(parts: Sequence[float], width: int) -> tuple[int, ...]:
    """Divide `width` cells among the parts in proportion. Rounding errors do not add up."""
    total = sum(parts)
    if total <= 0:
        return tuple(0 for _ in parts)
    cells: list[int] = []
    done = 0.0
    for part in parts:
        done += part
        cells.append(round(width * done / total) - sum(cells))
    return tuple(cells)
