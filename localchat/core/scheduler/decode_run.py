"""Decode runs: consecutive steps with the same rows, each one token further on.

While the same sequences decode, their plans differ only in positions and new blocks. A run keeps what the first
plan has, so the steps after it need neither new rows nor a look at every condition. Anything else ends the run:
a request that arrives, ends or is cancelled, and a step that fails.
"""

from localchat.core.scheduler.step_builder import ScheduledRow, ScheduledStep
from localchat.core.sequence import State


class DecodeRun:
    """The first step of a run, and how many steps followed it."""

    def __init__(self, step: ScheduledStep, block_tokens: int) -> None:
        """`step` has been launched, and `may_repeat` is True for its rows."""
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


def may_repeat(row: ScheduledRow) -> bool:
    """Return whether the next step may have the same row, one token further on.

    Nothing but the sampled token decides what follows the row: no grammar, budget, draft or fork.
    """
    sequence = row.sequence
    return (
        row.width == 1
        and len(row.positions) == 1
        and not (row.drafts or row.forks or row.recomputed or row.prompt_positions)
        and row.start >= sequence.request_state.prompt_tokens
        and sequence.state is State.RUNNING
        and not sequence.blocked
        and sequence.grammar_matcher is None
        and sequence.think_budget is None
        and sequence.end_ban is None
        and sequence.sampling.top_logprobs < 0
    )
