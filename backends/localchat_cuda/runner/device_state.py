"""State that the device keeps between steps: one fixed row per slot.

Letters: S slots and one for padding, C columns (tokens of context). The token table holds each slot's tokens
by position. A step writes the tokens that its plan brings, reads its inputs back from there, and the sampler
writes the tokens that it samples: so the next step finds LAST without the CPU. Two entries after the table
serve padding: one is read, one takes results that nothing reads.

Sampling settings have rows beyond the slots': for forks, which sample before they have a slot. A fork has no
tokens of its own: it has its parent's penalties, too, and those count the tokens in its parent's slot.

The state table follows vLLM's second model runner, the token pool mini-sglang.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from localchat.backend_api.interface import Enter, SamplingParams, StepRow
from localchat_cuda.runner.step_buffer import ALIGNED_WORDS, BufferSlice, StepBuffer

FORK_ROWS = 64


@dataclass(slots=True)
class SequenceSlot:
    """A sequence as the host knows it."""

    row: int
    """Of the sampling settings; below `StateTable.slots` it is the slot."""
    sampling: SamplingParams
    prompt_tokens: int
    offset: int = 0
    """As Enter has it."""


class TableWrites(NamedTuple):
    """A step's new tokens and pages in the step buffer, each as indices and values."""

    token_indices: BufferSlice
    tokens: BufferSlice
    page_indices: BufferSlice
    pages: BufferSlice


class StateTable:
    """Token table and block tables of all slots; windowed layers may have block tables of their own."""

    def __init__(
        self,
        slots: int,
        columns: int,
        page_tokens: int,
        scratch_page: int,
        device: torch.device,
        scratch_window_page: int | None = None,
    ) -> None:
        """`slots` sequences of at most `columns` tokens. `scratch_page`: the page that padding writes to;
        `scratch_window_page`: the same of windowed layers with pages of their own, None: there are none."""
        self.slots = slots
        self.columns = columns
        self.device = device
        self.width = -(-columns // page_tokens)
        self.setting_rows = slots + 1 + FORK_ROWS
        self.sequences: dict[int, SequenceSlot] = {}
        # Padding is text of any length, all of it on one page: an entry of 0 would let it overwrite the
        # page of a sequence.
        scratch = [scratch_page]
        if scratch_window_page is not None:
            scratch.append(scratch_window_page)
            self.width += -self.width % ALIGNED_WORDS  # the second table begins after the first
        self._tables = torch.zeros(
            len(scratch), slots + 1, self.width, dtype=torch.int32, device=device
        )
        self._tables[:, slots] = torch.tensor(scratch, dtype=torch.int32, device=device)[:, None]
        self.block_tables = self._tables[0]
        self.window_tables = self._tables[-1]
        self.token_table = torch.zeros((slots + 1) * columns + 2, dtype=torch.int32, device=device)
        self._pages_used = [0] * slots
        self._free_rows = list(range(slots + 1, self.setting_rows))
        self._unstored: dict[int, Sequence[int]] = {}
        """By slot, tokens that penalties need and that are not in the token table yet."""

    @property
    def scratch(self) -> int:
        """The slot of padding."""
        return self.slots

    @property
    def padding_index(self) -> int:
        """The entry of the token table that padding reads."""
        return (self.slots + 1) * self.columns

    @property
    def discard_index(self) -> int:
        """The entry of the token table for tokens that nothing reads."""
        return self.padding_index + 1

    @property
    def tokens_by_slot(self) -> torch.Tensor:
        """The token table [S + 1, C]: a view."""
        return self.token_table[: self.padding_index].view(self.slots + 1, self.columns)

    # ------------------------------------------------------------------------ sequences

    def remove(self, sequences: Iterable[int]) -> None:
        """Forget sequences; a fork that had no slot gives its row back."""
        for seq in sequences:
            row = self.sequences.pop(seq).row
            if row > self.slots:
                self._free_rows.append(row)

    def add(self, entries: Sequence[Enter]) -> list[SequenceSlot]:
        """Assign rows to new sequences. The block table of a slot begins empty."""
        added = []
        for entry in entries:
            if entry.slot >= 0:
                row = entry.slot
                self._pages_used[row] = 0
                self._unstored.pop(row, None)
                if entry.sampling.penalised:
                    self._unstored[row] = entry.tokens
            else:
                row = self._fork_row()
            sequence = SequenceSlot(row, entry.sampling, entry.prompt_tokens, entry.offset)
            self.sequences[entry.seq] = sequence
            added.append(sequence)
        return added

    def _fork_row(self) -> int:
        if not self._free_rows:
            more = self.setting_rows
            self._free_rows = list(range(more, 2 * more))
            self.setting_rows = 2 * more
        return self._free_rows.pop()

    # ------------------------------------------------------------------------ a step's writes

    def write(self, rows: Sequence[StepRow], buffer: StepBuffer, *, compute: bool) -> TableWrites:
        """Put tokens and pages of a plan's rows into the buffer. Block tables grow even without `compute`."""
        token_indices: list[NDArray[np.int64]] = []
        tokens: list[int] = []
        page_indices: list[int] = []
        pages: list[int] = []
        for row in rows:
            if row.new_blocks:
                used = self._pages_used[row.slot]
                begin = row.slot * self.width + used
                page_indices.extend(range(begin, begin + len(row.new_blocks)))
                pages.extend(row.new_blocks)
                self._pages_used[row.slot] = used + len(row.new_blocks)
                if row.new_window_blocks:  # as many: both tables grow together
                    begin += self.block_tables.numel()
                    page_indices.extend(range(begin, begin + len(row.new_window_blocks)))
                    pages.extend(row.new_window_blocks)
            if not compute:
                continue
            begin = row.slot * self.columns + row.start
            if isinstance(row.tokens, tuple):
                tokens.extend(row.tokens)
            else:
                begin += 1  # LAST: its first token is on the device already
            tokens.extend(row.drafts)
            end = row.slot * self.columns + row.start + row.width
            if begin < end:
                token_indices.append(np.arange(begin, end))
        indices = np.concatenate(token_indices) if token_indices else np.empty(0, np.int64)
        return TableWrites(
            buffer.write(indices, int64=True),
            buffer.write(tokens),
            buffer.write(page_indices, int64=True),
            buffer.write(pages),
        )

    def apply(self, writes: TableWrites) -> None:
        """Update the tables on the device, after the buffer was sent."""
        if writes.tokens.size:
            self.token_table.index_copy_(0, writes.token_indices.view(), writes.tokens.view())
        if writes.pages.size:
            flat = self._tables.view(-1)
            flat.index_copy_(0, writes.page_indices.view(), writes.pages.view())

    def store_tokens(self) -> None:
        """Write all tokens of new sequences with penalties, which read those, too, that come from the prefix
        cache. May run out of memory; the next call then writes them."""
        for slot, tokens in list(self._unstored.items()):
            values = torch.tensor(tokens, dtype=torch.int32)
            if self.device.type == "cuda":
                values = values.pin_memory()
            begin = slot * self.columns
            self.token_table[begin : begin + len(tokens)].copy_(values, non_blocking=True)
            del self._unstored[slot]
