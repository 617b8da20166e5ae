"""Runs the guide over llama.cpp's C API, without our engine: tokens, answers, log probabilities.

It has only what measuring needs: one sequence, one batch at a time. `use_extra_bufts` is off because
some builds of llama.cpp crash on CPUs with AMX otherwise.
"""

import ctypes
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from localchat_llamacpp.native import library

KV_TYPES: Final = {"f16": 1, "q8_0": 8, "q4_0": 2}  # ggml's numbers of these types
BATCH: Final = 512


class LlamaText:
    """A loaded GGUF with a context of `context` tokens."""

    def __init__(
        self, path: Path, *, context: int = 4096, kv_type: str = "f16", threads: int = 2
    ) -> None:
        self.api = library().api
        model_params = self.api.llama_model_default_params()
        model_params.use_extra_bufts = False
        self.model = self.api.llama_model_load_from_file(str(path).encode(), model_params)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        params = self.api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context, BATCH, BATCH
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = KV_TYPES[kv_type]
        params.flash_attn_type = int(kv_type != "f16")
        self.context = self.api.llama_init_from_model(self.model, params)
        if not self.context:
            raise SystemExit("llama.cpp cannot make a context")
        self.vocabulary = self.api.llama_model_get_vocab(self.model)
        self.size = self.api.llama_vocab_n_tokens(self.vocabulary)
        self.eos = self.api.llama_vocab_eos(self.vocabulary)
        self.known: list[int] = []

    def tokens(self, text: str, *, special: bool) -> list[int]:
        """Token ids of `text`; with `special`, markers such as <|im_start|> are tokens, not text."""
        raw = text.encode()
        room = (ctypes.c_int32 * (len(raw) + 8))()
        count = self.api.llama_tokenize(
            self.vocabulary, raw, len(raw), room, len(room), False, special
        )
        return list(room[:count])

    def text(self, tokens: list[int]) -> str:
        """The text of token ids, without special tokens."""
        out = b""
        room = ctypes.create_string_buffer(256)
        for token in tokens:
            count = self.api.llama_token_to_piece(self.vocabulary, token, room, 256, 0, False)
            out += room.raw[: max(0, count)]
        return out.decode("utf-8", "replace")

    def _decode(self, tokens: list[int], *, every: bool) -> NDArray[np.float32]:
        """Logits of the last token, or of every one: (rows, vocabulary)."""
        rows: list[NDArray[np.float32]] = []
        for begin in range(0, len(tokens), BATCH):
            part = tokens[begin : begin + BATCH]
            batch = self.api.llama_batch_init(len(part), 0, 1)
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i] = token
                batch.pos[i] = len(self.known) + i
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = 0
                batch.logits[i] = every or begin + i == len(tokens) - 1
            if self.api.llama_decode(self.context, batch):
                raise RuntimeError("llama_decode failed")
            for i in range(len(part)):
                if batch.logits[i]:
                    at = self.api.llama_get_logits_ith(self.context, i)
                    rows.append(np.ctypeslib.as_array(at, (self.size,)).copy())
            self.known += part
            self.api.llama_batch_free(batch)
        return np.stack(rows)

    def _rewind(self, tokens: list[int]) -> list[int]:
        """Keep the common prefix in the cache; return the tokens that remain to compute (at least one)."""
        same = 0
        while same < min(len(self.known), len(tokens) - 1) and self.known[same] == tokens[same]:
            same += 1
        self.api.llama_memory_seq_rm(self.api.llama_get_memory(self.context), 0, same, -1)
        self.known = self.known[:same]
        return tokens[same:]

    def answer(self, messages: list[tuple[str, str]], max_tokens: int = 400) -> tuple[str, bool]:
        """The greedy answer to a conversation, and whether it ended by itself."""
        shown = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)
        logits = self._decode(
            self._rewind(self.tokens(f"{shown}<|im_start|>assistant\n", special=True)), every=False
        )
        said: list[int] = []
        while len(said) < max_tokens:
            token = int(logits[-1].argmax())
            if token == self.eos or self.api.llama_vocab_is_eog(self.vocabulary, token):
                return self.text(said), True
            said.append(token)
            logits = self._decode([token], every=False)
        return self.text(said), False

    def logprobs(self, tokens: list[int]) -> NDArray[np.float64]:
        """Log probability of each token after the first, natural log."""
        self._rewind([-1])
        logits = self._decode(tokens, every=True)[:-1].astype(np.float64)
        top = logits.max(axis=1, keepdims=True)
        total = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
        picked: NDArray[np.float64] = logits[np.arange(len(tokens) - 1), tokens[1:]] - total
        return picked
