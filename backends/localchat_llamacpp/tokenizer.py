"""Tokenizer of a GGUF file: llama.cpp's own, over a vocabulary-only load.

Callable from any thread: the native calls only read, and caches are written whole. A token id is checked
before it reaches native code, because one out of range ends the process there.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from ctypes import create_string_buffer
from functools import cached_property
from typing import Any, Final

import numpy as np

from localchat.backend_api.sealed_text import PromptSplitter, TextFinder, unused_seal
from localchat.backend_api.special_tokens import SpecialToken
from localchat.model_files.gguf import Array, Value
from localchat_llamacpp.native import library
from localchat_llamacpp.wordpiece import WordPiece

_SURROGATE = re.compile("[\ud800-\udfff]")
_LOGGED_EOG = re.compile(r"EOG token\s*=\s*(\d+)")
_LOGGED_LENGTH = re.compile(r"max token length\s*=\s*(\d+)")
TYPES: Final = "tokenizer.ggml.token_type"
"""Key of the token types, which must be read with the header."""
UNKNOWN: Final = "tokenizer.ggml.unknown_token_id"
_NORMAL: Final = 1
_USER_DEFINED_TYPE: Final = 4
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_COMPOSED = ("qwen2", "qwen35", "command-r", "mpt", "olmo")
"""Vocabularies whose own tokenizers normalize to NFC, by `tokenizer.ggml.pre`. llama.cpp does not."""
_FRAMED = re.compile(r"<[|\uff5c].+[|\uff5c]>")
_WORDPIECE = 3
_UNIGRAM = 4
_BERT_UNKNOWN = "[UNK]"
# Bits of llama_token_attr.
_UNKNOWN = 1 << 0
_CONTROL = 1 << 3
_USER_DEFINED = 1 << 4
_LSTRIP = 1 << 7
_RSTRIP = 1 << 8
_SPECIAL = ("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep", "eot", "sep")
"""Special tokens that llama.cpp has a function for, `llama_vocab_NAME`."""


class LlamaTokenizer:
    """Tokenizer of one model. Owns its native vocabulary until `close`."""

    def __init__(
        self,
        model: int,
        log_lines: Sequence[str] = (),
        metadata: Mapping[str, Value] | None = None,
    ) -> None:
        """model: a loaded llama_model (vocabulary alone suffices), which this object then owns.

        log_lines: the library's log lines of that load, which spare two walks over all tokens (0.1 s for
        152k).

        metadata: of the file, with its token types. llama.cpp makes a control token of every token whose text
        it knows as an end, such as `</s>`, which is ordinary text in Gemma's and Qwen's vocabularies.
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
        ends = self._ends(log_lines)
        self._mistaken = _mistaken_ends(metadata or {}, {end: self._text(end) for end in ends})
        self.eog = ends - self._mistaken.keys()
        self._user_defined = self._mistaken_texts(_USER_DEFINED_TYPE)
        self._normal = self._mistaken_texts(_NORMAL)
        self._metadata = metadata or {}
        self._composes = self._metadata.get("tokenizer.ggml.pre") in _COMPOSED
        # NFC shortens a text to a third at most.
        self.longest_piece = self._longest(log_lines) * (3 if self._composes else 1)

    def encode(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        """Tokenize a text. Lone surrogates become U+FFFD, so no text raises an error."""
        begin = [self.bos] if add_bos and self.add_bos and self.bos >= 0 else []
        if text:
            return begin + self._checked(text, special=special)
        return begin

    def encode_whole(self, text: str) -> list[int]:
        """Tokenize a text as embedding models were trained, with its begin and end tokens."""
        if self.kind != _WORDPIECE:
            return self._native_tokens(text, ends=True, special=False)
        begin, *end = self._native_tokens("", ends=True, special=False)
        return [begin, *self._wordpiece.encode(text), *end]

    def _composed(self, text: str) -> str:
        """Normalize a text to NFC between special tokens."""
        if not self._composes or unicodedata.is_normalized("NFC", text):
            return text
        pieces = self._special_texts.pieces(text)
        return "".join(unicodedata.normalize("NFC", piece) + token for piece, token in pieces)

    @cached_property
    def _wordpiece(self) -> WordPiece:
        texts = [self._text(token) for token in range(self.vocab_size)]
        unknown = self._metadata.get(UNKNOWN)
        if not isinstance(unknown, int):
            unknown = texts.index(_BERT_UNKNOWN) if _BERT_UNKNOWN in texts else self.bos
        return WordPiece(texts, unknown, self._metadata)

    @cached_property
    def _special_texts(self) -> TextFinder:
        return TextFinder(token.text for token in self.special_tokens)

    def _checked(self, text: str, *, special: bool) -> list[int]:
        """Tokenize a text in which llama.cpp would mistake text for control tokens, or the reverse."""
        if special and any(mistaken in text for mistaken in self._normal):
            return self._without_normal(text)
        if not special and any(mistaken in text for mistaken in self._user_defined):
            return self._with_user_defined(text)
        return self._tokens(text, special=special)

    def _without_normal(self, text: str) -> list[int]:
        """Tokenize a text with control tokens, and treat tokens marked as normal as text."""
        seal = unused_seal(text)
        for mistaken in self._normal:
            text = text.replace(mistaken, f"{mistaken[0]}{seal}{mistaken[1:]}")
        sealed_tokens = [SpecialToken(mistaken, control=True) for mistaken in self._normal]
        _, parts = PromptSplitter((*self.special_tokens, *sealed_tokens)).split(text, seal)
        return [token for part in parts for token in self._checked(part.text, special=part.special)]

    def _with_user_defined(self, text: str) -> list[int]:
        """Tokenize a plain text, recognizing tokens that the file marks as user-defined."""
        tokens: list[int] = []
        pattern = "|".join(map(re.escape, self._user_defined))
        for piece in re.split(f"({pattern})", text):
            if piece:
                token = self._user_defined.get(piece)
                if token is None:
                    tokens += self._tokens(piece, special=False)
                else:
                    tokens.append(token)
        return tokens

    def _tokens(self, text: str, *, special: bool) -> list[int]:
        if self.kind == _WORDPIECE:
            return self._words(text, special=special)
        return self._native_tokens(text, ends=False, special=special)

    def _words(self, text: str, *, special: bool) -> list[int]:
        """Tokenize a text by WordPiece; special: between the special tokens in it."""
        if not special:
            return self._wordpiece.encode(text)
        tokens: list[int] = []
        for piece, token in self._special_texts.pieces(text):
            tokens += self._wordpiece.encode(piece)
            tokens += self._native_tokens(token, ends=False, special=True) if token else []
        return tokens

    def _native_tokens(self, text: str, *, ends: bool, special: bool) -> list[int]:
        data = _SURROGATE.sub("\ufffd", self._composed(text)).encode()
        # A token is one byte at least; white-space marks of SentencePiece add a few.
        room = len(data) + 16
        while True:
            ids = np.empty(room, np.int32)
            out = ids.ctypes.data_as(self._api.llama_token_p)
            count = self._api.llama_tokenize(
                self._handle(), data, len(data), out, room, ends, special
            )
            if count >= 0:
                tokens: list[int] = ids[:count].tolist()
                return tokens
            if count <= -(1 << 31):
                raise OverflowError("a text of more than two thousand million tokens")
            room = -count

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of a token. Control tokens are empty unless `special`. Raises ValueError."""
        special = special or token in self._mistaken
        cached = self._pieces.get((token, special))
        if cached is not None:
            return cached
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
        handle = self._handle()
        attributes_of = self._api.llama_vocab_get_attr
        tokens = []
        for token in range(self.vocab_size):
            bits = attributes_of(handle, token)
            if bits & (_UNKNOWN | _CONTROL | _USER_DEFINED):
                text = self._text(token)
                if text in self._normal:
                    continue
                control = bool(bits & (_UNKNOWN | _CONTROL)) and text not in self._user_defined
                strips = bool(bits & _LSTRIP), bool(bits & _RSTRIP)
                tokens.append(SpecialToken(text, control, *strips))
        return tuple(token for token in tokens if token.text)

    def special(self, name: str) -> int:
        """Return the id of a special token such as `fim_pre` or `eot` (_SPECIAL), or -1."""
        if name in _SPECIAL:
            return int(getattr(self._api, f"llama_vocab_{name}")(self._handle()))
        return -1

    def close(self) -> None:
        """Release the native vocabulary. Idempotent. No call may follow."""
        if self._model is not None:
            self._api.llama_model_free(self._model)
            self._model = None

    def _ends(self, log_lines: Sequence[str]) -> frozenset[int]:
        """Return the tokens that end a generation, including those that llama.cpp recognizes by their text."""
        logged = {int(match[1]) for line in log_lines if (match := _LOGGED_EOG.search(line))}
        ids = logged & set(range(self.vocab_size)) or range(self.vocab_size)
        return frozenset(t for t in ids if self._api.llama_vocab_is_eog(self._vocab, t))

    def _text(self, token: int) -> str:
        """Return the vocabulary's spelling of a token."""
        spelling: bytes = self._api.llama_vocab_get_text(self._vocab, token) or b""
        return spelling.decode("utf-8", "replace")

    def _mistaken_texts(self, kind: int) -> dict[str, int]:
        """Return the mistaken ends of one type, as ids by text."""
        return {
            self._text(token): token for token, type_ in self._mistaken.items() if type_ == kind
        }

    def _longest(self, log_lines: Sequence[str]) -> int:
        """Return an upper bound of a token's bytes: the vocabulary's spelling is never shorter than the text.

        Tokenizers that fold or drop white space have no such bound, hence the huge number.
        """
        if self.kind in (_WORDPIECE, _UNIGRAM):
            return 1 << 40
        logged = [int(match[1]) for line in log_lines if (match := _LOGGED_LENGTH.search(line))]
        if logged:
            return max(logged[-1], 1)
        text = self._api.llama_vocab_get_text
        vocab = self._vocab
        return max([1, *(len(text(vocab, t) or b"") for t in range(self.vocab_size))])

    def _handle(self) -> int:
        if self._model is None:
            raise ValueError("this vocabulary is closed")
        return self._vocab


def _mistaken_ends(metadata: Mapping[str, Value], ends: Mapping[int, str]) -> dict[int, int]:
    """Return the types of end tokens that are ordinary text in this file.

    Early files mark real ends as user-defined. Real ends are listed in the metadata, framed like `<|im_end|>`,
    or part of the chat template.
    """
    array = metadata.get(TYPES)
    types = array.values if isinstance(array, Array) and array.values else ()
    stated = {metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS}
    template = str(metadata.get("tokenizer.chat_template", ""))
    return {
        end: int(types[end])
        for end, text in ends.items()
        if end < len(types)
        and types[end] in (_NORMAL, _USER_DEFINED_TYPE)
        and not (end in stated or _FRAMED.fullmatch(text) or text in template)
    }
