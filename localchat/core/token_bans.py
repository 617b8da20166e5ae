"""Tokens that may not end an answer before it has its minimum length."""

from collections.abc import Iterable

import numpy as np


class EndBan:
    """Bans the end tokens of a request from the first `min_tokens` tokens of each choice."""

    def __init__(self, min_tokens: int, ends: Iterable[int], vocab_size: int) -> None:
        """`ends`: the tokens that would end the answer."""
        self.min_tokens = min_tokens
        allowed = np.ones(32 * ((vocab_size + 31) // 32), np.bool_)
        allowed[list(ends)] = False
        self._mask = np.packbits(allowed, bitorder="little").tobytes()

    def mask(self, generated: int) -> bytes | None:
        """Return the mask of the token after `generated` others. None: any token may follow."""
        if generated >= self.min_tokens:
            return None
        return self._mask
