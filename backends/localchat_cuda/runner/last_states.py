"""Last states of each slot's latest tokens on the device, from which prediction heads draft.

Each slot has a ring of STATE_WINDOW states, and padding has one, too. A step writes the states of its tokens. A
head writes the states of its draft tokens, and the next step overwrites them with the model's.
"""

from collections.abc import Sequence

import torch

from localchat.backend_api.interface import StepRow
from localchat_cuda.plan.memory_plan import STATE_WINDOW


class LastStates:
    """Rings of states, and the positions that each sequence has filled."""

    def __init__(self, slots: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate `slots` for running sequences, and one more for padding."""
        self.states = torch.zeros(slots + 1, STATE_WINDOW, hidden, dtype=dtype, device=device)
        self.offsets = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        """Position in each slot's text that the heads count as 0."""
        self._filled: dict[int, tuple[int, int]] = {}
        """First position in the ring of each sequence, and the end position."""

    def forget(self, seq: int) -> None:
        """Forget a sequence that left or moved to another slot."""
        self._filled.pop(seq, None)

    def note(self, rows: Sequence[StepRow]) -> None:
        """Record the rows of a launched step."""
        for row in rows:
            first, end = self._filled.get(row.seq, (row.start, row.start))
            self._filled[row.seq] = min(first, row.start), max(end, row.start + row.width)

    def earliest(self, seq: int) -> int:
        """Return the first token from which on the ring has the state before each token."""
        first, end = self._filled.get(seq, (1 << 30, 0))
        return max(first, end - STATE_WINDOW) + 1

    def end(self, seq: int) -> int:
        """Return the position after the last token of a sequence that a step computed."""
        return self._filled.get(seq, (0, 0))[1]

    def spoil(self, seq: int, end: int) -> None:
        """Mark the states before `end` as overwritten by a head."""
        first, filled = self._filled.get(seq, (end, end))
        self._filled[seq] = max(first, end), max(filled, end)

    def store(
        self,
        states: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        *,
        head: bool = False,
    ) -> None:
        """Write states [T, hidden] of tokens at `positions` [T] of `slots` [T].

        `head`: positions count as the heads do."""
        entries = self._entries(slots, positions, head=head)
        flat = self.states.view(-1, self.states.shape[2])
        # Tokens of a step are consecutive in their slot, so entries within a window differ.
        for first in range(0, states.shape[0], STATE_WINDOW):
            window = slice(first, first + STATE_WINDOW)
            flat.index_copy_(0, entries[window], states[window])

    def before(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the states [T, hidden] of the tokens before `positions`, counted as the heads do."""
        entries = self._entries(slots, positions - 1, head=True)
        return torch.index_select(self.states.view(-1, self.states.shape[2]), 0, entries)

    def _entries(self, slots: torch.Tensor, positions: torch.Tensor, *, head: bool) -> torch.Tensor:
        """Return the entries of positions in the flat view of all rings."""
        indices = slots.long()
        if head:
            positions = positions + self.offsets[indices]
        return indices * STATE_WINDOW + positions.remainder(STATE_WINDOW)
