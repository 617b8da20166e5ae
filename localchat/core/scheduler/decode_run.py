"""Decode runs: consecutive steps with the same rows, each one token further on.

While the same sequences decode, their plans differ only in positions and new blocks. A run keeps what the first
plan has, so the steps after it need neither new rows nor a look at every condition. Anything else ends the run:
a request that arrives, ends or is cancelled, and a step that fails.
"""

from localchat.core.scheduler.step_builder import ScheduledStep


class DecodeRun:
    """The first step of a run, and how many steps followed it."""

    def __init__(self, step: ScheduledStep, block_tokens: int) -> None:
        """`step` has been launched, and all its rows are plain."""
        self.step = step
        self.sequences = [row.sequence for row in step.rows]
        self.moved = 0
        """Tokens between the rows of the first step and those of the last."""
        self.max_moved = min(sequence.limit - sequence.virtual for sequence in self.sequences)
        self._block_tokens = block_tokens
        self._rows_by_phase: list[list[int]] = [[] for _ in range(block_tokens)]
        for number, sequence in enumerate(self.sequences):
            self._rows_by_phase[-sequence.launched % block_tokens].append(number)

    @property
    def rows_at_end_of_block(self) -> list[int]:
        """Numbers of the rows whose next token may need a new block."""
        return self._rows_by_phase[self.moved % self._block_tokens]
