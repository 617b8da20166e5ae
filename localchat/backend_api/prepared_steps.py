"""Prepared steps, for runners whose steps are slow until their kind was prepared."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class DecodeRow(NamedTuple):
    """A row of a decode step that is being planned."""

    seq: int
    start: int
    width: int
    """Tokens of the row, drafts included."""


class PreparingRunner(Protocol):
    """Additional methods of a runner that `prepares_steps`."""

    def prepared(self, rows: Sequence[DecodeRow], *, masked: bool) -> bool:
        """Return True if a step with these rows is prepared: graph captured, kernels compiled.

        `masked`: the step may have masks. Called from the thread of `launch`. If it returns False, a later
        `warm_up_next` prepares the step.
        """
        ...

    def ready_rows(self, sequences: int) -> int:
        """Return how many sequences a step may have without a wait for kernels.

        That is `max_rows` once all kernels are compiled. `sequences`: those that run or wait. If they are more,
        kernels are compiled sooner.
        """
        ...
