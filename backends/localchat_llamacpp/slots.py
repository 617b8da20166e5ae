"""Memory operations on llama.cpp's unified KV cache, whose sequence ids are the slots.

llama.cpp behaves as follows, which was measured. Copying a sequence within the unified cache changes metadata
only, and does not clear the target. Removing a tail is exact for a plain cache and does nothing for recurrent
models. For a sliding window it returns True even if the window is gone. If sliding-window layers store only
their window, a cell that two sequences hold is never overwritten, even after both windows have moved on.
"""

import ctypes
from typing import Any, NamedTuple

import numpy as np

from localchat.backend_api.interface import (
    Alias,
    Copy,
    Discard,
    Drop,
    Import,
    MemoryOp,
    Restore,
    Save,
    StateRange,
    Truncate,
)
from localchat_llamacpp.native import library
from localchat_llamacpp.positions import NO_TABLE, PositionTable

_BYTES = ctypes.POINTER(ctypes.c_uint8)
_WINDOW_LAYERS = 1
"""LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: the state of the sliding-window layers alone."""


class _SavedState(NamedTuple):
    ranges: tuple[StateRange, ...]
    """Ranges from position 0 on. A state of this process is one range."""
    tokens: int

    @property
    def size_bytes(self) -> int:
        return sum(len(range_.data) for range_ in self.ranges)


class Slots:
    """KV cache of one context as numbered slots. Checks ids: out of range, native code ends the process."""

    def __init__(
        self,
        context: int,
        count: int,
        *,
        can_truncate: bool,
        window_tokens: int = 0,
        mrope: bool = False,
    ) -> None:
        """count: slots 0..count-1. can_truncate: True if a slot's tail can be removed.

        window_tokens: tokens of each slot that sliding-window layers cache. 0 means all. mrope: True if the
        tokens of a picture share positions.
        """
        self._api: Any = library().api
        self._context = context
        self._memory = self._api.llama_get_memory(context)
        self._cuttable = can_truncate
        self._window_tokens = window_tokens
        self._saved: dict[int, _SavedState] = {}
        self.count = count
        self.lengths = [0] * count
        """Tokens whose KV each slot holds."""
        self.mrope = mrope
        self.shared_positions: list[PositionTable] = [NO_TABLE] * count
        """Positions of each slot whose tokens share them."""
        self.lost: set[int] = set()
        """Slots that could not be filled. They are empty until they are filled or dropped."""

    @property
    def saved_bytes(self) -> int:
        """Host memory of saved states."""
        return sum(saved.size_bytes for saved in self._saved.values())

    @property
    def cells(self) -> int:
        """Tokens over all slots, shared ones counted each time."""
        return sum(self.lengths)

    def apply(self, operation: MemoryOp, *, behind_short: bool = False) -> bool:
        """Execute one operation. Return False if the cache had no room, which loses the slot.

        Only `Restore` and `Alias` need room. behind_short: the operation was planned before the previous step
        returned fewer tokens than planned.
        """
        match operation:
            case Alias(src, dst, tokens):
                return self._alias(src, dst, tokens) or self._lose(dst)
            case Truncate(slot, tokens):
                missing = slot in self.lost or (behind_short and tokens > self.lengths[slot])
                if not missing:
                    self.truncate(slot, tokens)
            case Drop(slot):
                self.drop(slot)
            case Save(slot, key):
                self._save(slot, key)
            case Restore(key, slot, tokens):
                return self._restore(key, slot, tokens) or self._lose(slot)
            case Discard(key):
                del self._saved[key]
            case Import(key, ranges):
                self._saved[key] = _SavedState(ranges, ranges[-1].end)
            case Copy():
                raise ValueError("this cache has no blocks: Copy is not for it")
        return True

    def drop(self, slot: int) -> None:
        """Empty a slot. Works for every kind of model."""
        self._check(slot)
        self._api.llama_memory_seq_rm(self._memory, slot, -1, -1)
        self.lengths[slot] = 0
        self.shared_positions[slot] = NO_TABLE
        self.lost.discard(slot)

    def _lose(self, slot: int) -> bool:
        self.drop(slot)
        self.lost.add(slot)
        return False

    def truncate(self, slot: int, tokens: int) -> None:
        """Keep the first `tokens` of a slot."""
        self._check(slot)
        if tokens == 0:
            self.drop(slot)
        if tokens >= self.lengths[slot]:
            assert tokens == self.lengths[slot], f"slot {slot} has no {tokens} tokens"
            return
        assert self._cuttable, "this model cannot rewind"
        start = self.shared_positions[slot].position(tokens)
        removed = self._api.llama_memory_seq_rm(self._memory, slot, start, -1)
        assert removed, f"llama.cpp refused to truncate slot {slot} to {tokens} tokens"
        self.lengths[slot] = tokens

    def measure(self, slot: int) -> int:
        """Read from the cache how many tokens the slot holds, after a step that ended early."""
        if self.mrope:
            # Shared positions cannot be counted, but such a model computes all of a batch or nothing.
            return self.lengths[slot]
        self.lengths[slot] = int(self._api.llama_memory_seq_pos_max(self._memory, slot)) + 1
        return self.lengths[slot]

    def earliest(self, slot: int) -> int:
        """Return the lowest position that the slot still holds, 0 for an empty slot."""
        position = max(0, int(self._api.llama_memory_seq_pos_min(self._memory, slot)))
        return self.shared_positions[slot].token(position)

    def _alias(self, src: int, dst: int, tokens: int) -> bool:
        """Share the first `tokens` of a slot with another slot. Return False if there is no room."""
        self._check(src)
        self.drop(dst)
        if src in self.lost:
            return False
        assert tokens <= self.lengths[src], f"slot {src} has no {tokens} tokens to share"
        # For recurrent models, llama.cpp ignores the range and copies the whole state.
        assert self._cuttable or tokens == self.lengths[src], "this model shares whole states only"
        table = self.shared_positions[src]
        if tokens:
            self._api.llama_memory_seq_cp(self._memory, src, dst, 0, table.position(tokens))
        self.lengths[dst] = tokens
        self.shared_positions[dst] = table
        # A text longer than the window may fill its layers, and shared cells would stay occupied.
        return not 0 < self._window_tokens < tokens or self._copy_window(dst)

    def _copy_window(self, slot: int) -> bool:
        """Copy shared cells of the sliding-window layers for this slot. Return False if there is no room."""
        size = int(self._api.llama_state_seq_get_size_ext(self._context, slot, _WINDOW_LAYERS))
        if size == int(self._api.llama_state_seq_get_size(self._context, slot)):
            return True  # this library keeps all layers in one cache
        state = np.empty(size, np.uint8).ctypes.data_as(_BYTES)
        arguments = self._context, state, size, slot, _WINDOW_LAYERS
        written = int(self._api.llama_state_seq_get_data_ext(*arguments))
        assert written == size, f"a window of {size} bytes saved as {written}"
        return int(self._api.llama_state_seq_set_data_ext(*arguments)) == size

    def _save(self, slot: int, key: int) -> None:
        self._check(slot)
        tokens = self.lengths[slot]
        state = self._state(slot, self.shared_positions[slot].part(0, tokens))
        self._saved[key] = _SavedState((StateRange(0, tokens, state),), tokens)

    def _state(self, slot: int, table: PositionTable) -> memoryview:
        """Return the state of a slot, followed by its position table if tokens share positions."""
        trailer = table.encode() if self.mrope else b""
        size = int(self._api.llama_state_seq_get_size(self._context, slot))
        state = np.empty(size + len(trailer), np.uint8)
        out = state.ctypes.data_as(_BYTES)
        written = int(self._api.llama_state_seq_get_data(self._context, out, size, slot))
        assert written == size, f"a slot of {size} bytes saved as {written}"
        state[size:] = np.frombuffer(trailer, np.uint8)
        return state.data

    def _restore(self, key: int, slot: int, tokens: int) -> bool:
        """Load the first `tokens` of a saved state into a slot. Return False if there is no room."""
        saved = self._saved[key]
        self.drop(slot)
        single = len(saved.ranges) == 1
        for range_ in saved.ranges:
            if range_.start >= tokens and not single:
                break
            # Loading empties its target first, so several ranges pass through the scratch slot.
            target = slot if single else self._scratch
            table = self.shared_positions[slot]
            if not self._load(range_.data, target):
                return False
            table = table.plus(self.shared_positions[target])
            if not single:
                start, end = table.position(range_.start), table.position(range_.end)
                self._api.llama_memory_seq_cp(self._memory, target, slot, start, end)
                self.drop(target)
            self.lengths[slot] = range_.end
            self.shared_positions[slot] = table
        self.truncate(slot, tokens)
        return True

    def _load(self, state: memoryview, slot: int) -> bool:
        """Load a state into a slot. Return False without room, or if the library rejects the state."""
        table = NO_TABLE
        if self.mrope:
            state, table = PositionTable.split(state)
        data = np.frombuffer(state, np.uint8).ctypes.data_as(_BYTES)
        read = int(self._api.llama_state_seq_set_data(self._context, data, len(state), slot))
        if read != len(state):
            self.drop(slot)
            return False
        self.shared_positions[slot] = table
        return True

    @property
    def _scratch(self) -> int:
        """The slot that no sequence gets."""
        return self.count - 1

    def export_slot(self, slot: int, start: int, end: int) -> memoryview:
        """See ExportingRunner."""
        self._check(slot)
        assert 0 <= start < end <= self.lengths[slot], f"slot {slot} has no {end} tokens"
        table = self.shared_positions[slot]
        part = table.part(start, end)
        if (start, end) == (0, self.lengths[slot]):
            return self._state(slot, part)
        assert self._cuttable, "this model exports whole states only"
        self.drop(self._scratch)
        positions = table.position(start), table.position(end)
        self._api.llama_memory_seq_cp(self._memory, slot, self._scratch, *positions)
        state = self._state(self._scratch, part)
        self.drop(self._scratch)
        return state

    def export_saved(self, key: int, start: int, end: int) -> memoryview | None:
        """See ExportingRunner."""
        saved = self._saved[key]
        if len(saved.ranges) == 1 and (start, end) == (0, saved.tokens):
            return saved.ranges[0].data
        if len(saved.ranges) > 1 or not self._load(saved.ranges[0].data, self._scratch):
            return None
        table = self.shared_positions[self._scratch]
        if end < saved.tokens:
            self._api.llama_memory_seq_rm(self._memory, self._scratch, table.position(end), -1)
        self._api.llama_memory_seq_rm(self._memory, self._scratch, 0, table.position(start))
        state = self._state(self._scratch, table.part(start, end))
        self.drop(self._scratch)
        return state

    def _check(self, slot: int) -> None:
        assert 0 <= slot < self.count, f"slot {slot} is not one of {self.count}"
