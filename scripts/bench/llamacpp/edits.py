"""A file and the same file edited."""

import numpy as np

EVERY_TOKENS = 80
"""Between two edits."""
MOST_TOKENS = 3
"""Replaced, put in or left out by one edit."""


def edited(source: tuple[int, ...], draw: np.random.Generator) -> tuple[int, ...]:
    """`source` with an edit about every EVERY_TOKENS tokens: tokens replaced, inserted or removed, in
    turn. The first tokens stay.
    """
    result: list[int] = []
    position, kind = 0, 0
    while position < len(source):
        end = position + int(draw.integers(EVERY_TOKENS * 3 // 4, EVERY_TOKENS * 5 // 4))
        result += source[position:end]
        position = end
        if position < len(source):
            count = int(draw.integers(1, MOST_TOKENS + 1))
            if kind != 2:
                result += draw.integers(1000, 100_000, count).tolist()
            if kind != 1:
                position += count
            kind = (kind + 1) % 3
    return tuple(result)
