"""A reusable llama_batch over numpy arrays, and arrays over what the library computes.

Filling 512 tokens by slices takes 2 µs. The binding fills batches token by token through ctypes.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localchat_llamacpp.native import library

_FLOATS = ctypes.POINTER(ctypes.c_float)


def float_array(address: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return an array of this shape at an address or a pointer of the library."""
    return np.ctypeslib.as_array(ctypes.cast(address, _FLOATS), shape)


class Batch:
    """A batch of up to `capacity` tokens. The native struct points into its arrays permanently."""

    def __init__(self, capacity: int, max_seqs: int, state_width: int = 0) -> None:
        """state_width: numbers of the hidden state that comes with each token, for a prediction head."""
        api = library().api
        self.capacity = capacity
        self.size = 0
        self._token = np.zeros(capacity, np.int32)
        self._position = np.zeros(capacity, np.int32)
        self._output_flags = np.zeros(capacity, np.int8)
        self._count = np.ones(capacity, np.int32)
        # seq_id is a pointer per token, to the cell with the sequence's number.
        self._numbers = np.arange(max_seqs, dtype=np.int32)
        self._addresses = self._numbers.ctypes.data + 4 * np.arange(max_seqs, dtype=np.uint64)
        self._seq = np.zeros(capacity, np.uint64)
        self.native: Any = api.llama_batch()
        pointer = ctypes.POINTER
        i32 = ctypes.c_int32
        i8 = ctypes.c_int8
        self._states = np.zeros((capacity, state_width), np.float32)
        self.native.embd = None
        if state_width:
            self.native.embd = ctypes.cast(self._states.ctypes.data, pointer(ctypes.c_float))
        self.native.token = ctypes.cast(self._token.ctypes.data, pointer(i32))
        self.native.pos = ctypes.cast(self._position.ctypes.data, pointer(i32))
        self.native.n_seq_id = ctypes.cast(self._count.ctypes.data, pointer(i32))
        self.native.seq_id = ctypes.cast(self._seq.ctypes.data, pointer(pointer(i32)))
        self.native.logits = ctypes.cast(self._output_flags.ctypes.data, pointer(i8))
        self._ramp = np.arange(capacity, dtype=np.int32)

    def clear(self) -> None:
        """Begin a new batch."""
        self.size = self.native.n_tokens = 0

    def add(
        self,
        slot: int,
        start: int,
        tokens: Sequence[int],
        outputs_at: Sequence[int] = (),
        states: NDArray[np.float32] | None = None,
    ) -> None:
        """Append `tokens` of `slot` from position `start`.

        outputs_at: ascending offsets whose logits are kept. states: (tokens, state_width).
        """
        begin = self.size
        end = self.size + len(tokens)
        assert end <= self.capacity, f"{end} tokens in a batch of {self.capacity}"
        self._token[begin:end] = tokens
        self._position[begin:end] = self._ramp[: end - begin]
        self._position[begin:end] += start
        self._seq[begin:end] = self._addresses[slot]
        self._output_flags[begin:end] = 0
        for offset in outputs_at:
            self._output_flags[begin + offset] = 1
        if states is not None:
            self._states[begin:end] = states
        self.size = self.native.n_tokens = end

    def advance(self) -> None:
        """Move all tokens one position on."""
        self._position[: self.size] += 1

    def replace(self, index: int, token: int) -> None:
        """Replace the token at an index."""
        self._token[index] = token


class EmbeddingBatch:
    """A batch of embeddings of one slot. It keeps its arrays alive."""

    def __init__(
        self, slot: int, positions: NDArray[np.int32], embeddings: NDArray[np.float32]
    ) -> None:
        """positions: (1 or 4, tokens). embeddings: (tokens, width)."""
        tokens = positions.shape[1]
        pointer = ctypes.POINTER
        self._positions = np.ascontiguousarray(positions)
        self._embeddings = np.ascontiguousarray(embeddings)
        self._slot = np.array([slot], np.int32)
        self._addresses = np.full(tokens, self._slot.ctypes.data, np.uint64)
        self._count = np.ones(tokens, np.int32)
        self._output_flags = np.zeros(tokens, np.int8)
        i32 = ctypes.c_int32
        self.native: Any = library().api.llama_batch()
        self.native.n_tokens = tokens
        self.native.token = None
        self.native.embd = ctypes.cast(self._embeddings.ctypes.data, pointer(ctypes.c_float))
        self.native.pos = ctypes.cast(self._positions.ctypes.data, pointer(i32))
        self.native.n_seq_id = ctypes.cast(self._count.ctypes.data, pointer(i32))
        self.native.seq_id = ctypes.cast(self._addresses.ctypes.data, pointer(pointer(i32)))
        self.native.logits = ctypes.cast(self._output_flags.ctypes.data, pointer(ctypes.c_int8))

    def keep_logits(self, offset: int) -> None:
        """Keep the logits of the token at an offset."""
        self._output_flags[offset] = 1
