"""Memory operations on llama.cpp's unified KV cache, whose sequence ids are the slots.

Measured facts that shape this file: copying a sequence within the unified cache is metadata only; it does not
clear the target; removing a tail is exact for a plain cache, does nothing for recurrent models, and for a
sliding window returns True even where the window is gone.
"""

import ctypes
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localchat.backend_api.interface import (
    Alias,
    Copy,
    Discard,
    Drop,
    MemoryOp,
    Restore,
    Save,
    Truncate,
)
from localchat_llamacpp.native import library

_BYTES = ctypes.POINTER(ctypes.c_uint8)


class _SavedState(NamedTuple):
    state: NDArray[np.uint8]
    tokens: int


class Slots:
    """KV cache of one context as numbered slots. Checks ids: out of range, native code ends the process."""

    def __init__(self, context: int, count: int, *, can_truncate: bool) -> None:
        """count: slots 0..count-1. can_truncate: whether a slot's tail can be removed."""
        self._api: Any = library().api
        self._context = context
        self._memory = self._api.llama_get_memory(context)
        self._cuttable = can_truncate
        self._saved: dict[int, _SavedState] = {}
        self.count = count
        self.lengths = [0] * count
        """Tokens whose KV each slot holds."""

    @property
    def saved_bytes(self) -> int:
        """Host memory of saved states."""
        return sum(saved.state.nbytes for saved in self._saved.values())

    @property
    def cells(self) -> int:
        """Tokens over all slots, shared ones counted each time."""
        return sum(self.lengths)

    def apply(self, operation: MemoryOp) -> bool:
        """Execute one operation. False: no room in the cache (only for a `Restore`)."""
        match operation:
            case Alias(src, dst, tokens):
                self._alias(src, dst, tokens)
            case Truncate(slot, tokens):
                self.truncate(slot, tokens)
            case Drop(slot):
                self.drop(slot)
            case Save(slot, key):
                self._save(slot, key)
            case Restore(key, slot, tokens):
                return self._restore(key, slot, tokens)
            case Discard(key):
                del self._saved[key]
            case Copy():
                raise ValueError("this cache has no blocks: Copy is not for it")
        return True

    def drop(self, slot: int) -> None:
        """Empty a slot. Works for every kind of model."""
        self._check(slot)
        self._api.llama_memory_seq_rm(self._memory, slot, -1, -1)
        self.lengths[slot] = 0

    def truncate(self, slot: int, tokens: int) -> None:
        """Keep the first `tokens` of a slot."""
        self._check(slot)
        if tokens == 0:
            self.drop(slot)
        if tokens >= self.lengths[slot]:
            assert tokens == self.lengths[slot], f"slot {slot} has no {tokens} tokens"
            return
        assert self._cuttable, "this model cannot rewind"
        removed = self._api.llama_memory_seq_rm(self._memory, slot, tokens, -1)
        assert removed, f"llama.cpp refused to truncate slot {slot} to {tokens} tokens"
        self.lengths[slot] = tokens

    def measure(self, slot: int) -> int:
        """Read from the cache how many tokens the slot holds, after a step that ended early."""
        self.lengths[slot] = int(self._api.llama_memory_seq_pos_max(self._memory, slot)) + 1
        return self.lengths[slot]

    def earliest(self, slot: int) -> int:
        """Lowest position that the slot still holds; 0 for an empty one."""
        return max(0, int(self._api.llama_memory_seq_pos_min(self._memory, slot)))

    def _alias(self, src: int, dst: int, tokens: int) -> None:
        self._check(src)
        self.drop(dst)
        assert tokens <= self.lengths[src], f"slot {src} has no {tokens} tokens to share"
        # Recurrent models copy their whole state, whatever range is asked for.
        assert self._cuttable or tokens == self.lengths[src], "this model shares whole states only"
        if tokens:
            self._api.llama_memory_seq_cp(self._memory, src, dst, 0, tokens)
        self.lengths[dst] = tokens

    def _save(self, slot: int, key: int) -> None:
        self._check(slot)
        size = int(self._api.llama_state_seq_get_size(self._context, slot))
        state = np.empty(size, np.uint8)
        out = state.ctypes.data_as(_BYTES)
        written = int(self._api.llama_state_seq_get_data(self._context, out, size, slot))
        assert written == size, f"a slot of {size} bytes saved as {written}"
        self._saved[key] = _SavedState(state, self.lengths[slot])

    def _restore(self, key: int, slot: int, tokens: int) -> bool:
        saved = self._saved[key]
        self.drop(slot)
        data = saved.state.ctypes.data_as(_BYTES)
        read = int(
            self._api.llama_state_seq_set_data(self._context, data, saved.state.nbytes, slot)
        )
        if read != saved.state.nbytes:
            self.drop(slot)
            return False
        self.lengths[slot] = saved.tokens
        self.truncate(slot, tokens)
        return True

    def _check(self, slot: int) -> None:
        assert 0 <= slot < self.count, f"slot {slot} is not one of {self.count}"
