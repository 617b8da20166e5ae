"""First steps of a loaded model: they read the weights, meet faults of the build, and test the cache.

The KV cache manager needs two findings: can a slot be truncated, and which numbers of rows compute bit-equal
logits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localchat.backend_api.interface import RowClass
from localchat_llamacpp.batch import Batch
from localchat_llamacpp.native import library

_WIDEST = 7


class Findings(NamedTuple):
    """Results of the warm-up."""

    can_truncate: bool
    """A slot's tail can be removed."""
    equal_rows: tuple[RowClass, ...]
    """See RowClass."""


def row_classes(
    bits: Callable[[int], NDArray[np.uint32]], *, lone_joins: bool
) -> tuple[RowClass, ...]:
    """Classes of bit-equal rows up to 7 rows.

    bits: the logits' bits of a step's first row, by the step's number of rows; two logits rows or more must
    be requested where there are several rows (float weights have a path of their own for a single one).
    lone_joins: whether one row may be in a class with several; on a float cache it differs at some lengths
    and not at others (0.5B: at 600 tokens, not at 60 or 1,500), so that a check in a short context cannot
    vouch for it.

    Plain weights make one class of 2 to 7 rows; repacked ones take another path from 4 on. From 8 on,
    attention changes with the length of the context: no class is claimed.
    """
    lone, pair, widest = bits(1), bits(2), bits(_WIDEST)
    if np.array_equal(pair, widest):
        if lone_joins and np.array_equal(lone, pair):
            return (RowClass(1, _WIDEST),)
        return RowClass(1, 1), RowClass(2, _WIDEST)
    found = [RowClass(1, 1)]
    if np.array_equal(pair, bits(3)):
        found.append(RowClass(2, 3))
    if np.array_equal(bits(4), widest):
        found.append(RowClass(4, _WIDEST))
    return tuple(found)


class WarmUp:
    """Runs in slot `slot` of a fresh context and leaves it empty."""

    def __init__(
        self, context: int, batch: Batch, slot: int, vocab_size: int, kv_type: str
    ) -> None:
        self._api: Any = library().api
        self._context = context
        self._memory = self._api.llama_get_memory(context)
        self._batch = batch
        self._slot = slot
        self._vocab_size = vocab_size
        self._quantized_cache = kv_type.startswith("q")

    def run(self, tokens: int) -> Findings:
        """Decode a batch of `tokens`, then narrow ones after it. Raises RuntimeError when the library fails.

        The wide batch comes first: the fault of AMX builds needs two rows, and the process should meet it
        here.
        """
        try:
            self._decode(0, tokens, [tokens - 1])
            can_truncate = bool(
                self._api.llama_memory_seq_rm(self._memory, self._slot, tokens - 1, -1)
            )
            if not can_truncate:
                self._decode(tokens, 1, [0])
                return Findings(can_truncate=False, equal_rows=())
            return Findings(can_truncate=True, equal_rows=self._classes(tokens - 1))
        finally:
            self._api.llama_memory_seq_rm(self._memory, self._slot, -1, -1)

    def _classes(self, start: int) -> tuple[RowClass, ...]:
        if self._batch.capacity < _WIDEST:
            return (RowClass(1, 1),)
        return row_classes(
            lambda rows: self._first_row(start, rows), lone_joins=self._quantized_cache
        )

    def _first_row(self, start: int, rows: int) -> NDArray[np.uint32]:
        """Bits of the logits of the first of `rows` rows after `start` tokens; then removes them."""
        self._decode(start, rows, [0, rows - 1] if rows > 1 else [0])
        logits = self._api.llama_get_logits(self._context)
        row = np.ctypeslib.as_array(logits, (self._vocab_size,)).view(np.uint32).copy()
        self._api.llama_memory_seq_rm(self._memory, self._slot, start, -1)
        return row

    def _decode(self, start: int, rows: int, outputs_at: list[int]) -> None:
        self._batch.clear()
        ids = [(start + i) * 7919 % self._vocab_size for i in range(rows)]
        self._batch.add(self._slot, start, ids, outputs_at)
        status = self._api.llama_decode(self._context, self._batch.native)
        self._api.llama_synchronize(self._context)
        if status != 0:
            tail = "; ".join(library().log.tail(3))
            raise RuntimeError(f"llama.cpp failed in warm-up (status {status}): {tail}")
