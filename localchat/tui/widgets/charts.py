"""Bars, sparklines and histograms of block characters, as text."""

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


def bar(part: float, whole: float, width: int) -> str:
    """`part` of `whole` as a bar of `width` cells, to an eighth of a cell; any part above 0 shows."""
    share = min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
    eighths = round(share * width * 8)
    if part > 0 and not eighths:
        eighths = 1
    full, rest = divmod(eighths, 8)
    text = _EIGHTHS[8] * full + (_EIGHTHS[rest] if rest else "")
    return text.ljust(width)


def shares(parts: Sequence[float], width: int) -> tuple[int, ...]:
    """`width` cells divided among the parts in proportion; rounding errors do not add up."""
    whole = sum(parts)
    if whole <= 0:
        return tuple(0 for _ in parts)
    cells: list[int] = []
    done = 0.0
    for part in parts:
        done += part
        cells.append(round(width * done / whole) - sum(cells))
    return tuple(cells)


def histogram(values: Sequence[float], width: int) -> tuple[str, float, float]:
    """Histogram of `width` bins from the minimum to the 99th percentile, and these limits. The last
    bin also holds what is above."""
    if not values:
        return "", 0.0, 0.0
    ranked = sorted(values)
    low = ranked[0]
    high = ranked[min(len(ranked) - 1, int(len(ranked) * 0.99))]
    if high <= low:
        return _LEVELS[-1], low, high
    counts = [0] * width
    for value in ranked:
        counts[min(width - 1, int((value - low) / (high - low) * width))] += 1
    top = max(counts)
    drawn = (
        _LEVELS[max(0, round(count / top * len(_LEVELS)) - 1)] if count else " " for count in counts
    )
    return "".join(drawn), low, high
