"""State that stays on the device between steps: one fixed row per slot.

Letters: S slots and one for padding, C columns (tokens of context). The token table contains each slot's tokens
by position. A step writes the tokens of its plan to the table, reads its inputs from there, and the sampler
writes the sampled tokens. So the next step reads LAST without the CPU. Two entries after the table serve
padding: one is read, and one receives results that no step reads.

Sampling settings have extra rows for forks, which sample before they have a slot. A fork has no tokens of its
own. It also has its parent's penalties, which count the tokens in its parent's slot.

The state table follows vLLM's second model runner, and the token pool mini-sglang.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from localchat.backend_api.interface import (
    LAST,
    Capabilities,
    Enter,
    SamplingParams,
    StepPlan,
    StepRow,
)
from localchat_cuda.runner.step_buffer import ALIGNED_WORDS, BufferSlice, StepBuffer

FORK_ROWS = 64


@dataclass(slots=True)
class SequenceSlot:
    """Host state of a sequence."""

    row: int
    """Row of the sampling settings; below `StateTable.slots` it is the slot."""
    sampling: SamplingParams
    prompt_tokens: int
    offset: int = 0
    """See Enter.offset."""


class TableWrites(NamedTuple):
    """New tokens and pages in the step buffer, as indices and values."""

    token_indices: BufferSlice
    tokens: BufferSlice
    page_indices: BufferSlice
    pages: BufferSlice


class StateTable:
    """Token table and block tables of all slots.

    Layers with a window may have block tables of their own."""

    def __init__(self, capabilities: Capabilities, device: torch.device) -> None:
        """Allocate tables for the sequences of a runner. Padding writes the pages after its blocks."""
        slots = capabilities.max_slots
        self.slots = slots
        self.columns = capabilities.context_tokens
        self.device = device
        self.width = -(-self.columns // capabilities.block_tokens)
        self.setting_rows = slots + 1 + FORK_ROWS
        self.sequences: dict[int, SequenceSlot] = {}
        # Padding is text of any length, all on one page. An entry of 0 would overwrite the page of a sequence.
        scratch = [capabilities.kv_tokens // capabilities.block_tokens]
        if capabilities.window_blocks:
            scratch.append(capabilities.window_blocks)
            # The second table starts after the first one.
            self.width += -self.width % ALIGNED_WORDS
        self._tables = torch.zeros(
            len(scratch), slots + 1, self.width, dtype=torch.int32, device=device
        )
        self._tables[:, slots] = torch.tensor(scratch, dtype=torch.int32, device=device)[:, None]
        self.block_tables = self._tables[0]
        self.window_tables = self._tables[-1]
        self.token_table = torch.zeros(self.padding_index + 2, dtype=torch.int32, device=device)
        self._pages_used = [0] * slots
        self._free_rows = list(range(slots + 1, self.setting_rows))
        self._unstored: dict[int, Sequence[int]] = {}
        """Tokens of each slot that penalties count and that the token table lacks."""

    @property
    def scratch(self) -> int:
        """Slot of padding."""
        return self.slots

    @property
    def padding_index(self) -> int:
        """Entry of the token table that padding reads."""
        return (self.slots + 1) * self.columns

    @property
    def discard_index(self) -> int:
        """Entry of the token table for tokens that no step reads."""
        return self.padding_index + 1

    @property
    def tokens_by_slot(self) -> torch.Tensor:
        """View of the token table, [S + 1, C]."""
        return self.token_table[: self.padding_index].view(self.slots + 1, self.columns)

    def remove(self, sequences: Iterable[int]) -> None:
        """Remove sequences, and free the rows of forks without a slot."""
        for seq in sequences:
            row = self.sequences.pop(seq).row
            if row > self.slots:
                self._free_rows.append(row)

    def add(self, entries: Sequence[Enter]) -> list[SequenceSlot]:
        """Assign rows to new sequences. The block table of a slot starts empty."""
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

    def write(self, rows: Sequence[StepRow], buffer: StepBuffer, *, compute: bool) -> TableWrites:
        """Write tokens and pages of a plan's rows to the buffer.

        Block tables grow even if `compute` is False."""
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
                if row.new_window_blocks:
                    # Both tables grow by the same number of pages.
                    begin += self.block_tables.numel()
                    page_indices.extend(range(begin, begin + len(row.new_window_blocks)))
                    pages.extend(row.new_window_blocks)
            # LAST is already on the device.
            if not compute or (row.tokens is LAST and not row.drafts):
                continue
            begin = row.slot * self.columns + row.start
            if isinstance(row.tokens, tuple):
                tokens.extend(row.tokens)
            else:
                # The first token, LAST, is already on the device.
                begin += 1
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

    def write_blocks(self, plan: StepPlan, buffer: StepBuffer) -> TableWrites:
        """Write the new pages of a plan with moved rows to the buffer."""
        page_indices: list[int] = []
        pages: list[int] = []
        for number, blocks in plan.new_blocks:
            slot = plan.rows[number].slot
            begin = slot * self.width + self._pages_used[slot]
            page_indices.extend(range(begin, begin + len(blocks)))
            pages.extend(blocks)
            self._pages_used[slot] += len(blocks)
        nothing = buffer.write(())
        page_slice = buffer.write(page_indices, int64=True)
        return TableWrites(nothing, nothing, page_slice, buffer.write(pages))

    def apply(self, writes: TableWrites) -> None:
        """Update the tables on the device, after the buffer is sent."""
        if writes.tokens.size:
            self.token_table.index_copy_(0, writes.token_indices.view(), writes.tokens.view())
        if writes.pages.size:
            flat = self._tables.view(-1)
            flat.index_copy_(0, writes.page_indices.view(), writes.pages.view())

    def store_tokens(self) -> None:
        """Write all tokens of new sequences with penalties, including a cached prefix.

        After an out-of-memory error, the next call writes them."""
        for slot, tokens in list(self._unstored.items()):
            values = torch.tensor(tokens, dtype=torch.int32)
            if self.device.type == "cuda":
                values = values.pin_memory()
            begin = slot * self.columns
            self.token_table[begin : begin + len(tokens)].copy_(values, non_blocking=True)
            del self._unstored[slot]
