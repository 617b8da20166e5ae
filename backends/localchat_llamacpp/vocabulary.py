"""The tokenizer of a GGUF file: llama.cpp's own, over a vocabulary-only load.

Callable from any thread: the native calls only read, and what is kept here is written whole. A token id
never reaches native code unchecked, because one out of range ends the process there.
"""

import re
from ctypes import create_string_buffer
from functools import cached_property
from typing import Any

import numpy as np

from localchat_llamacpp.library import library

_SURROGATE = re.compile("[\ud800-\udfff]")
_WORDPIECE, _UNIGRAM = 3, 4
_SPECIAL = {
    "fim_pre": "llama_vocab_fim_pre",
    "fim_suf": "llama_vocab_fim_suf",
    "fim_mid": "llama_vocab_fim_mid",
    "fim_pad": "llama_vocab_fim_pad",
    "fim_rep": "llama_vocab_fim_rep",
    "fim_sep": "llama_vocab_fim_sep",
    "eot": "llama_vocab_eot",
    "sep": "llama_vocab_sep",
}


class Vocabulary:
    """Tokenizer of one model. Holds its native vocabulary until `close`; see backend.Tokenizer."""

    def __init__(self, model: int) -> None:
        """`model`: a loaded llama_model (vocabulary alone suffices), which this object then owns."""
        self._api: Any = library().api
        self._model: int | None = model
        self._vocab: int = self._api.llama_model_get_vocab(model)
        self.kind = int(self._api.llama_vocab_type(self._vocab))
        self.vocab_size = int(self._api.llama_vocab_n_tokens(self._vocab))
        self.bos = int(self._api.llama_vocab_bos(self._vocab))
        self.eos = int(self._api.llama_vocab_eos(self._vocab))
        self.add_bos = bool(self._api.llama_vocab_get_add_bos(self._vocab))
        self._pieces: dict[tuple[int, bool], bytes] = {}

    @cached_property
    def eog(self) -> frozenset[int]:
        """Every token that ends a generation, also those that llama.cpp recognises by their text."""
        ends, vocab = self._api.llama_vocab_is_eog, self._handle()
        return frozenset(token for token in range(self.vocab_size) if ends(vocab, token))

    @cached_property
    def longest_piece(self) -> int:
        """Bytes of the longest token, from above: the vocabulary's own spelling is never shorter than what
        it stands for. Tokenizers that fold or drop white space promise nothing, hence the huge number."""
        if self.kind in (_WORDPIECE, _UNIGRAM):
            return 1 << 40
        text, vocab = self._api.llama_vocab_get_text, self._handle()
        return max((len(text(vocab, t) or b"") for t in range(self.vocab_size)), default=1) or 1

    def encode(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        """Token ids of `text`. Lone surrogates become U+FFFD; never raises for any str."""
        data = _SURROGATE.sub("\ufffd", text).encode()
        begin = [self.bos] if add_bos and self.add_bos and self.bos >= 0 else []
        if not data:
            return begin
        # A token is one byte at least; white-space marks of SentencePiece add a few.
        room = len(data) + 16
        while True:
            ids = np.empty(room, np.int32)
            out = ids.ctypes.data_as(self._api.llama_token_p)
            count = self._api.llama_tokenize(
                self._handle(), data, len(data), out, room, False, special
            )
            if count >= 0:
                found: list[int] = ids[:count].tolist()
                return begin + found
            if count <= -(1 << 31):
                raise OverflowError("a text of more than two thousand million tokens")
            room = -count

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token; control tokens are empty unless `special`. ValueError out of range."""
        known = self._pieces.get((token, special))
        if known is not None:
            return known
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token {token} is outside the vocabulary 0..{self.vocab_size - 1}")
        room = 64
        while True:
            buffer = create_string_buffer(room)
            size = self._api.llama_token_to_piece(self._handle(), token, buffer, room, 0, special)
            if size >= 0:
                break
            room = -size
        self._pieces[token, special] = piece = buffer.raw[:size]
        return piece

    def special(self, name: str) -> int:
        """Id of `fim_pre`, `fim_suf`, `fim_mid`, `fim_pad`, `fim_rep`, `fim_sep`, `eot`, `sep`; -1: none."""
        call = _SPECIAL.get(name)
        return int(getattr(self._api, call)(self._handle())) if call else -1

    def text(self, token: int) -> str:
        """How the vocabulary writes a token, for templates' bos_token and eos_token; empty for -1."""
        return self.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""

    def close(self) -> None:
        """Give the native vocabulary back. Idempotent; nothing may be asked afterwards."""
        if self._model is not None:
            self._api.llama_model_free(self._model)
            self._model = None

    def _handle(self) -> int:
        if self._model is None:
            raise ValueError("this vocabulary is closed")
        return self._vocab
