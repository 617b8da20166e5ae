"""Warms up a loaded model: reads the weights, reveals faults of the build, and tests the cache."""

from typing import Any

from localchat_llamacpp.batch import Batch
from localchat_llamacpp.native import library


class WarmUp:
    """Warm-up in slot `slot` of a fresh context, which stays empty afterwards."""

    def __init__(self, context: int, batch: Batch, slot: int, vocab_size: int) -> None:
        self._api: Any = library().api
        self._context = context
        self._memory = self._api.llama_get_memory(context)
        self._batch = batch
        self._slot = slot
        self._vocab_size = vocab_size

    def run(self, tokens: int) -> bool:
        """Decode a batch of `tokens`, then one token. Return whether a slot's tail can be removed.

        Raises RuntimeError if the library fails. The wide batch comes first, because the fault of AMX builds
        needs two rows and should show here.
        """
        try:
            self._decode(0, tokens, [tokens - 1])
            can_truncate = bool(
                self._api.llama_memory_seq_rm(self._memory, self._slot, tokens - 1, -1)
            )
            self._decode(tokens - 1 if can_truncate else tokens, 1, [0])
            return can_truncate
        finally:
            self._api.llama_memory_seq_rm(self._memory, self._slot, -1, -1)

    def _decode(self, start: int, rows: int, outputs_at: list[int]) -> None:
        self._batch.clear()
        ids = [(start + i) * 7919 % self._vocab_size for i in range(rows)]
        self._batch.add(self._slot, start, ids, outputs_at)
        status = self._api.llama_decode(self._context, self._batch.native)
        self._api.llama_synchronize(self._context)
        if status != 0:
            tail = "; ".join(library().log.tail(3))
            raise RuntimeError(f"llama.cpp failed in warm-up (status {status}): {tail}")
