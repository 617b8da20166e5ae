"""Tokenizer of a GGUF file: llama.cpp's own, over a vocabulary-only load.

Callable from any thread: the native calls only read, and caches are written whole. A token id is checked
before it reaches native code, because one out of range ends the process there.
"""

import re
from collections.abc import Sequence
from ctypes import create_string_buffer
from functools import cached_property
from typing import Any

import numpy as np

from localchat.backend_api.special_tokens import SpecialToken
from localchat_llamacpp.native import library

_SURROGATE = re.compile("[\ud800-\udfff]")
_LOGGED_EOG = re.compile(r"EOG token\s*=\s*(\d+)")
_LOGGED_LENGTH = re.compile(r"max token length\s*=\s*(\d+)")
_WORDPIECE, _UNIGRAM = 3, 4
_UNKNOWN, _CONTROL, _USER_DEFINED, _LSTRIP, _RSTRIP = 1 << 0, 1 << 3, 1 << 4, 1 << 7, 1 << 8
"""Bits of llama_token_attr."""
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


class LlamaTokenizer:
    """Tokenizer of one model. Owns its native vocabulary until `close`."""

    def __init__(self, model: int, log_lines: Sequence[str] = ()) -> None:
        """model: a loaded llama_model (vocabulary alone suffices), which this object then owns.

        log_lines: the library's log lines of that load, which spare two walks over all tokens (0.1 s for
        152k).
        """
        self._api: Any = library().api
        self._model: int | None = model
        self._vocab: int = self._api.llama_model_get_vocab(model)
        self.kind = int(self._api.llama_vocab_type(self._vocab))
        self.vocab_size = int(self._api.llama_vocab_n_tokens(self._vocab))
        self.bos = int(self._api.llama_vocab_bos(self._vocab))
        self.eos = int(self._api.llama_vocab_eos(self._vocab))
        self.add_bos = bool(self._api.llama_vocab_get_add_bos(self._vocab))
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self.eog = self._ends(log_lines)
        self.longest_piece = self._longest(log_lines)

    def encode(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        """Token ids of `text`. Lone surrogates become U+FFFD; never raises for any str."""
        begin = [self.bos] if add_bos and self.add_bos and self.bos >= 0 else []
        return begin + self._tokens(text, ends=False, special=special) if text else begin

    def encode_whole(self, text: str) -> list[int]:
        """Tokens of a text as embedding models were trained: with those that begin and end one."""
        return self._tokens(text, ends=True, special=False)

    def _tokens(self, text: str, *, ends: bool, special: bool) -> list[int]:
        data = _SURROGATE.sub("\ufffd", text).encode()
        # A token is one byte at least; white-space marks of SentencePiece add a few.
        room = len(data) + 16
        while True:
            ids = np.empty(room, np.int32)
            out = ids.ctypes.data_as(self._api.llama_token_p)
            count = self._api.llama_tokenize(
                self._handle(), data, len(data), out, room, ends, special
            )
            if count >= 0:
                found: list[int] = ids[:count].tolist()
                return found
            if count <= -(1 << 31):
                raise OverflowError("a text of more than two thousand million tokens")
            room = -count

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Bytes of one token; control tokens are empty unless `special`. Raises ValueError out of range."""
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

    @cached_property
    def special_tokens(self) -> tuple[SpecialToken, ...]:
        """Control and user-defined tokens. Takes 0.1 s for 152k tokens."""
        handle, attributes_of = self._handle(), self._api.llama_vocab_get_attr
        tokens = []
        for token in range(self.vocab_size):
            bits = attributes_of(handle, token)
            if bits & (_UNKNOWN | _CONTROL | _USER_DEFINED):
                text = (self._api.llama_vocab_get_text(handle, token) or b"").decode(
                    "utf-8", "replace"
                )
                control = bool(bits & (_UNKNOWN | _CONTROL))
                strips = bool(bits & _LSTRIP), bool(bits & _RSTRIP)
                tokens.append(SpecialToken(text, control, *strips))
        return tuple(token for token in tokens if token.text)

    def special(self, name: str) -> int:
        """Id of `fim_pre`, `fim_suf`, `fim_mid`, `fim_pad`, `fim_rep`, `fim_sep`, `eot`, `sep`; -1: none."""
        call = _SPECIAL.get(name)
        return int(getattr(self._api, call)(self._handle())) if call else -1

    def close(self) -> None:
        """Release the native vocabulary. Idempotent; no call may follow."""
        if self._model is not None:
            self._api.llama_model_free(self._model)
            self._model = None

    def _ends(self, log_lines: Sequence[str]) -> frozenset[int]:
        """Tokens that end a generation, also those that llama.cpp recognises by their text."""
        logged = {int(found[1]) for line in log_lines if (found := _LOGGED_EOG.search(line))}
        ids = logged & set(range(self.vocab_size)) or range(self.vocab_size)
        return frozenset(t for t in ids if self._api.llama_vocab_is_eog(self._vocab, t))

    def _longest(self, log_lines: Sequence[str]) -> int:
        """Upper bound of a token's bytes: the vocabulary's spelling is never shorter than the text it stands
        for.

        Tokenizers that fold or drop white space promise nothing, hence the huge number.
        """
        if self.kind in (_WORDPIECE, _UNIGRAM):
            return 1 << 40
        logged = [int(found[1]) for line in log_lines if (found := _LOGGED_LENGTH.search(line))]
        if logged:
            return max(logged[-1], 1)
        text, vocab = self._api.llama_vocab_get_text, self._vocab
        return max([1, *(len(text(vocab, t) or b"") for t in range(self.vocab_size))])

    def _handle(self) -> int:
        if self._model is None:
            raise ValueError("this vocabulary is closed")
        return self._vocab
