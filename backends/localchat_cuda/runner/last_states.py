"""Last states of each slot's latest tokens, on the device: what prediction heads go on from.

A ring of WINDOW states per slot, and one for padding. A step writes the states of its tokens; a head that
guesses writes its own in their place, which the next step overwrites by the model's.
"""

from collections.abc import Sequence

import torch

from localchat.backend_api.interface import StepRow
from localchat_cuda.plan.memory_plan import STATE_WINDOW


class LastStates:
    """The rings, and from which position on that of a sequence is filled."""

    def __init__(self, slots: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        """`slots` of running sequences, and one after them for padding."""
        self.states = torch.zeros(slots + 1, STATE_WINDOW, hidden, dtype=dtype, device=device)
        self.offsets = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        """By slot, the position in its text that the heads count as 0."""
        self._filled: dict[int, tuple[int, int]] = {}
        """By sequence, first and end position that its ring was filled with."""

    # ------------------------------------------------------------------------ on the host

    def forget(self, seq: int) -> None:
        """A sequence left, or comes back in another slot."""
        self._filled.pop(seq, None)

    def note(self, rows: Sequence[StepRow]) -> None:
        """Rows of a step that is launched."""
        for row in rows:
            first, end = self._filled.get(row.seq, (row.start, row.start))
            self._filled[row.seq] = min(first, row.start), max(end, row.start + row.width)

    def earliest(self, seq: int) -> int:
        """The first token of a sequence before which, and before all after it, a state is held."""
        first, end = self._filled.get(seq, (1 << 30, 0))
        return max(first, end - STATE_WINDOW) + 1

    def spoil(self, seq: int, end: int) -> None:
        """States before `end` are those of a head from now on."""
        first, filled = self._filled.get(seq, (end, end))
        self._filled[seq] = max(first, end), max(filled, end)

    # ------------------------------------------------------------------------ on the device

    def store(
        self,
        states: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        *,
        head: bool = False,
    ) -> None:
        """Write states [T, hidden] of tokens at `positions` [T] of `slots` [T]; of a `head`'s count."""
        places = self._places(slots, positions, head=head)
        flat = self.states.view(-1, self.states.shape[2])
        # Tokens of a step follow each other in their slot, so that no two of a window have the same place.
        for at in range(0, states.shape[0], STATE_WINDOW):
            flat.index_copy_(0, places[at : at + STATE_WINDOW], states[at : at + STATE_WINDOW])

    def before(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """States [T, hidden] of the tokens before those at `positions`, as a head counts."""
        places = self._places(slots, positions - 1, head=True)
        return torch.index_select(self.states.view(-1, self.states.shape[2]), 0, places)

    def _places(self, slots: torch.Tensor, positions: torch.Tensor, *, head: bool) -> torch.Tensor:
        own = slots.long()
        counted = positions + self.offsets[own] if head else positions
        return own * STATE_WINDOW + counted.remainder(STATE_WINDOW)
