"""What the device keeps between steps: one fixed row for each slot.

Letters: S rows (slots, one for padding, then rows for forks that draw before they have a slot), C columns
(tokens of context). `known` holds each row's tokens by position. A step writes the tokens that its plan
brings, reads its inputs back from there, and the sampler writes what it draws: so the next step finds LAST
without the CPU. Two places behind the table serve padding: one is read, one takes what nobody wants.

The state table follows vLLM's second model runner, the token pool mini-sglang.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from localchat.backend_api.interface import Enter, SamplingParams, StepRow
from localchat_cuda.runner.step_buffer import BufferSlice, StepBuffer

FORKS = 64


@dataclass(slots=True)
class SequenceSlot:
    """What the host knows of a sequence: its row, its sampling, and how many of its tokens are prompt."""

    row: int
    sampling: SamplingParams
    prompt_tokens: int


class Writes(NamedTuple):
    """Where in the inbox lie tokens for `known` and pages for the block tables: places and values."""

    token_places: BufferSlice
    tokens: BufferSlice
    page_places: BufferSlice
    pages: BufferSlice


class StateTable:
    """The rows of all slots. `of`: what is known of each sequence. `moved`: whether `known` has another address
    than before; who reads it by address sets it back."""

    def __init__(
        self, slots: int, columns: int, page_tokens: int, scratch_page: int, device: torch.device
    ) -> None:
        """`slots` sequences of at most `columns` tokens. `scratch_page`: the page that padding writes to."""
        self.slots, self.columns, self.device = slots, columns, device
        self.width = -(-columns // page_tokens)
        self.rows = slots + 1 + FORKS
        self.of: dict[int, SequenceSlot] = {}
        self.moved = False
        self.tables = torch.zeros(slots + 1, self.width, dtype=torch.int32, device=device)
        # Padding is a text of any length, all of it on one page: behind an entry of 0 it would overwrite a
        # sequence's.
        self.tables[slots] = scratch_page
        self.known = torch.zeros(self.rows * columns + 2, dtype=torch.int32, device=device)
        self._filled = [0] * slots
        self._free = list(range(slots + 1, self.rows))

    @property
    def scratch(self) -> int:
        """The slot of padding."""
        return self.slots

    @property
    def nothing(self) -> int:
        """The place in `known` that padding reads."""
        return self.rows * self.columns

    @property
    def nowhere(self) -> int:
        """The place in `known` for tokens that nobody wants."""
        return self.rows * self.columns + 1

    @property
    def grid(self) -> torch.Tensor:
        """Known tokens [S, C]: a view."""
        return self.known[: self.rows * self.columns].view(self.rows, self.columns)

    # ------------------------------------------------------------------------ coming and going

    def leave(self, sequences: Iterable[int]) -> None:
        """Forget sequences; one that had no slot gives its row back."""
        for seq in sequences:
            row = self.of.pop(seq).row
            if row > self.slots:
                self._free.append(row)

    def enter(self, entries: Sequence[Enter]) -> list[SequenceSlot]:
        """Rows for new sequences. The block table of a slot begins empty."""
        found = []
        for one in entries:
            if one.slot >= 0:
                row = one.slot
                self._filled[row] = 0
            else:
                row = self._fork_row()
            entered = SequenceSlot(row, one.sampling, one.prompt_tokens)
            self.of[one.seq] = entered
            found.append(entered)
        return found

    def _fork_row(self) -> int:
        if not self._free:
            more = self.rows
            grown = torch.zeros(
                (self.rows + more) * self.columns + 2, dtype=torch.int32, device=self.device
            )
            grown[: self.nothing] = self.known[: self.nothing]
            self._free = list(range(self.rows, self.rows + more))
            self.known, self.rows, self.moved = grown, self.rows + more, True
        return self._free.pop()

    # ------------------------------------------------------------------------ a step's writes

    def put(self, rows: Sequence[StepRow], buffer: StepBuffer, *, compute: bool) -> Writes:
        """Put tokens and pages of a plan's rows into the inbox. Tables grow also where nothing is computed."""
        token_places: list[NDArray[np.int64]] = []
        tokens: list[int] = []
        page_places: list[int] = []
        pages: list[int] = []
        for row in rows:
            if row.new_blocks:
                filled = self._filled[row.slot]
                begin = row.slot * self.width + filled
                page_places.extend(range(begin, begin + len(row.new_blocks)))
                pages.extend(row.new_blocks)
                self._filled[row.slot] = filled + len(row.new_blocks)
            if not compute:
                continue
            begin = row.slot * self.columns + row.start
            if isinstance(row.tokens, tuple):
                tokens.extend(row.tokens)
            else:
                begin += 1  # the first is on the device already
            tokens.extend(row.drafts)
            end = row.slot * self.columns + row.start + row.width
            if begin < end:
                token_places.append(np.arange(begin, end))
        places = np.concatenate(token_places) if token_places else np.empty(0, np.int64)
        return Writes(
            buffer.put(places, wide=True), buffer.put(tokens),
            buffer.put(page_places, wide=True), buffer.put(pages),
        )  # fmt: skip

    def apply(self, writes: Writes, buffer: StepBuffer) -> None:
        """On the device, after the inbox was sent."""
        if writes.tokens.size:
            self.known.index_copy_(0, buffer.view(writes.token_places), buffer.view(writes.tokens))
        if writes.pages.size:
            flat = self.tables.view(-1)
            flat.index_copy_(0, buffer.view(writes.page_places), buffer.view(writes.pages))

    def remember(self, row: int, tokens: Sequence[int]) -> None:
        """All tokens of a row: penalties look at those too that no step of it brings."""
        held = torch.tensor(tokens, dtype=torch.int32)
        if self.device.type == "cuda":
            held = held.pin_memory()
        begin = row * self.columns
        self.known[begin : begin + len(tokens)].copy_(held, non_blocking=True)
