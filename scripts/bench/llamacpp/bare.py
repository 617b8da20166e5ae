"""The bare library: llama_decode in a loop and the largest logit, nothing else."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from localchat_llamacpp.native import library
from localchat_llamacpp.native_model import ContextSpec, Weights, open_context


class Bare:
    """A separate context on the weights that our runner uses, made with the same settings."""

    def __init__(self, weights: Weights, options: ContextSpec, vocab_size: int) -> None:
        self._api: Any = library().api
        self._context, _ = open_context(weights, options)
        self._memory = self._api.llama_get_memory(self._context)
        self._batch = self._api.llama_batch_init(options.step_tokens, 0, 1)
        self._step_tokens = options.step_tokens
        self._vocab_size = vocab_size
        self._cached: tuple[tuple[int, ...], ...] = ()

    def generate(self, prompts: Sequence[tuple[int, ...]], tokens: int) -> None:
        """Decode `tokens` greedy tokens of each prompt, all prompts in one batch a step.

        Prompts of the previous call are cached but for their last token, as in our engine.
        """
        if tuple(prompts) != self._cached:
            self._prefill(prompts)
        for seq, prompt in enumerate(prompts):
            self._api.llama_memory_seq_rm(self._memory, seq, len(prompt) - 1, -1)
        last = [prompt[-1] for prompt in prompts]
        for step in range(tokens):
            rows = [(seq, len(prompt) - 1 + step, last[seq]) for seq, prompt in enumerate(prompts)]
            self._decode(rows, logits=True)
            last = [self._largest(row) for row in range(len(rows))]

    def rows(self, start: int, sequences: int, each: int) -> None:
        """One decode of `each` rows of each of the first sequences, with logits on all, then rolled back."""
        self._decode(
            [(s, start + i, 1000 + i) for s in range(sequences) for i in range(each)], logits=True
        )
        self._api.llama_get_logits(self._context)
        for seq in range(sequences):
            self._api.llama_memory_seq_rm(self._memory, seq, start, -1)

    def use_threads(self, threads: int) -> None:
        """Compute with so many threads from now on."""
        self._api.llama_set_n_threads(self._context, threads, threads)

    def close(self) -> None:
        """Free the context; the weights belong to the runner."""
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._context)

    def _prefill(self, prompts: Sequence[tuple[int, ...]]) -> None:
        self._api.llama_memory_clear(self._memory, True)
        for seq, prompt in enumerate(prompts):
            for begin in range(0, len(prompt), self._step_tokens):
                piece = prompt[begin : begin + self._step_tokens]
                self._decode(
                    [(seq, begin + i, token) for i, token in enumerate(piece)], logits=False
                )
        self._cached = tuple(prompts)

    def _decode(self, rows: list[tuple[int, int, int]], *, logits: bool) -> None:
        """`rows`: (sequence, position, token)."""
        batch = self._batch
        for row, (seq, position, token) in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = seq
            batch.logits[row] = logits
        batch.n_tokens = len(rows)
        status = self._api.llama_decode(self._context, batch)
        assert status == 0, f"llama_decode: {status}"

    def _largest(self, row: int) -> int:
        pointer = self._api.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(pointer, (self._vocab_size,)).argmax())
