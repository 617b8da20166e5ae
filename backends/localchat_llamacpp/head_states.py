"""Last hidden states of each sequence, from which the model's prediction head drafts.

A prediction head reads each token together with the model's state of the token before it. The states of a
prompt exist only while the model computes it, so the latest ones are stored in a ring for each sequence. A
restored or reused prefix has no states: the head then reads the text from the first token computed after it.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localchat_llamacpp.plan.buffers import STATE_WINDOW

PROMPT_STATES = 256
"""States stored of a prompt's end.

Storing a state makes the model compute its last layer for that token, which a prompt's other tokens skip.
"""
_NOWHERE = 1 << 30


class _Ring:
    """States of one sequence from position `first` up to `end`, each at its position modulo the size."""

    __slots__ = ("end", "first", "states")

    def __init__(self, width: int) -> None:
        self.states = np.empty((STATE_WINDOW, width), np.float32)
        self.first = 0
        self.end = 0


class HeadStates:
    """States of all running sequences. Shape letters: T tokens, E numbers of a state."""

    def __init__(self, width: int) -> None:
        """width: numbers of a state."""
        self.width = width
        self._rings: dict[int, _Ring] = {}

    def write(self, seq: int, start: int, states: NDArray[np.float32]) -> None:
        """Store the states (T, E) of the tokens from position `start`. Later ones become invalid."""
        ring = self._rings.get(seq)
        if ring is None:
            ring = self._rings[seq] = _Ring(self.width)
        if not ring.first <= start <= ring.end:
            ring.first = start
        ring.end = start + len(states)
        ring.first = max(ring.first, ring.end - STATE_WINDOW)
        begin = max(start, ring.first)
        ring.states[np.arange(begin, ring.end) % STATE_WINDOW] = states[begin - start :]

    def before(self, seq: int, start: int, end: int) -> NDArray[np.float32] | None:
        """Return the states (T, E) of the tokens before each position from `start` up to `end`.

        None if one of them is not stored.
        """
        ring = self._rings.get(seq)
        if ring is None or start <= ring.first or end > ring.end + 1:
            return None
        return ring.states[np.arange(start - 1, end - 1) % STATE_WINDOW]

    def earliest(self, seq: int) -> int:
        """Return the first position from which on the state before each token is stored."""
        ring = self._rings.get(seq)
        if ring is None:
            return _NOWHERE
        return ring.first + 1

    def forget(self, seqs: Sequence[int]) -> None:
        """Drop the states of sequences that left."""
        for seq in seqs:
            self._rings.pop(seq, None)
