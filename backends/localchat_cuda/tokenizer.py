"""Tokenizer of a checkpoint folder: tokenizer.json, chat template and end-of-generation tokens.

Safe to call from any thread: the tokenizers library locks, and the cache is only written one entry at a time.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from localchat.backend_api.special_tokens import SpecialToken
from localchat.errors import ModelInvalid, ModelMissing, reason
from localchat.model_files.checkpoint import optional_object
from localchat.model_files.gguf import SAMPLING_KEYS

_SURROGATE = re.compile("[\ud800-\udfff]")
_HEX = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")
_SPECIAL = {
    "fim_pre": ("<|fim_prefix|>", "<fim_prefix>", "<PRE>"),
    "fim_suf": ("<|fim_suffix|>", "<fim_suffix>", "<SUF>"),
    "fim_mid": ("<|fim_middle|>", "<fim_middle>", "<MID>"),
    "fim_pad": ("<|fim_pad|>", "<fim_pad>"),
    "fim_rep": ("<|repo_name|>", "<fim_repo>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
    "eot": ("<|eot_id|>", "<|im_end|>", "<|end_of_turn|>", "<end_of_turn>", "<|end|>"),
}
"""Spellings of special tokens in vocabularies, by the name of the token in the core."""
_EOG_TOKENS = (
    *("<|eot_id|>", "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "</s>"),
    *("<end_of_turn>", "<eos>", "<|end|>"),
)
"""Names of tokens that end a generation, as in llama.cpp."""

_DAMAGED_HINT = "The file may be incomplete or damaged: download it again."
_SPACES_MARKED = [{"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]
"""Normalizer of Gemma, which marks spaces."""


def _byte_of_letter() -> dict[str, int]:
    """Return the byte of each letter in a byte-level vocabulary (GPT-2, Radford et al., 2019).

    Printable characters represent themselves, and the other bytes start at U+0100, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


class TokenizerFiles(NamedTuple):
    """Contents of a checkpoint's files that describe its tokenizer."""

    name: str
    """Name for messages."""
    text: str
    """Content of tokenizer.json."""
    settings: Mapping[str, Any]
    """Content of tokenizer_config.json."""
    eos_ids: tuple[int, ...]
    """Tokens that end a generation, from other files."""


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read a checkpoint's folder. Raises ModelMissing, ModelInvalid."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelMissing(
            f"{folder} has no tokenizer.json.",
            hint="Download the whole checkpoint again, or use a GGUF file with llama.cpp.",
        )
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    files = ("generation_config.json", "config.json")
    ends: list[int] = []
    for name in files:
        # Null, a number, or a list.
        stated = optional_object(folder / name).get("eos_token_id")
        tokens = stated if isinstance(stated, list) else [stated]
        ends += (token for token in tokens if isinstance(token, int) and token >= 0)
    return TokenizerFiles(
        str(path), text, optional_object(folder / "tokenizer_config.json"), tuple(ends)
    )


class CheckpointTokenizer:
    """See localchat.backend_api.interface.Tokenizer."""

    def __init__(self, source: Path | TokenizerFiles, vocab_size: int = 0) -> None:
        """Build the tokenizer from a checkpoint's folder or files. Raises ModelMissing, ModelInvalid.

        `vocab_size`: rows of the model's embedding; 0: one per token. Rows beyond the last token have no text.
        Tokens beyond the last row are plain text."""
        if isinstance(source, TokenizerFiles):
            files = source
        else:
            files = read_tokenizer_files(source)
        path = files.name
        try:
            raw, text = _with_rows(files.text, vocab_size)
            self._with_special = Tokenizer.from_str(text)
            self._without_special = _twin(self._with_special, text)
        # The library raises bare Exception.
        except Exception as error:
            raise _unreadable(path, error) from error
        # Control tokens that are written in a text stay plain text.
        self._without_special.encode_special_tokens = True
        self.settings = files.settings
        self.vocab_size = vocab_size or self._without_special.get_vocab_size(with_added_tokens=True)
        vocabulary = self._without_special.get_vocab()
        last_id = max(vocabulary.values(), default=0)
        if last_id >= self.vocab_size:
            raise ModelInvalid(
                f"{path} has tokens up to number {last_id:,}, but config.json states {self.vocab_size:,}.",
                hint="config.json and tokenizer belong to different models: download both again.",
            )
        self._letters = _byte_of_letter() if _is_byte_level(raw) else {}
        added = raw.get("added_tokens") or []
        self._added = {int(token["id"]): str(token["content"]) for token in added}
        self._control = {int(token["id"]) for token in added if token.get("special")}
        self.special_tokens = tuple(map(_special_token, added))
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self.bos = self._token_of("bos_token")
        self.eos = self._token_of("eos_token")
        self.eog = self._eog_ids(files.eos_ids)
        configured = self.settings.get("add_bos_token")
        if configured is None:
            # Then the post-processor of tokenizer.json decides.
            configured = self._with_special.encode("").ids[:1] == [self.bos]
        self.add_bos = bool(configured)
        self.longest_piece = self._longest_piece(raw, vocabulary)

    def encode(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        """Return the token ids of any text. Lone surrogates become U+FFFD."""
        tokenizer = self._without_special
        if special:
            tokenizer = self._with_special
        texts = [_SURROGATE.sub("\ufffd", text)]
        # Encoding a batch lets other threads run meanwhile. Encoding one text does not.
        (encoding,) = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids = list(encoding.ids)
        if add_bos and self.add_bos and self.bos >= 0:
            ids.insert(0, self.bos)
        return ids

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of a token. Control tokens are empty unless `special`. ValueError out of range."""
        piece = self._pieces.get((token, special))
        if piece is None:
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"token {token} is outside the vocabulary 0..{self.vocab_size - 1}"
                )
            piece = self._pieces[token, special] = self._bytes(token, special)
        return piece

    def special(self, name: str) -> int:
        """Return the id of a special token such as `fim_pre` or `eot`; -1: missing."""
        if name == "sep":
            return self._token_of("sep_token")
        ids = (self._id(text) for text in _SPECIAL.get(name, ()))
        return next((token for token in ids if token >= 0), -1)

    def _id(self, text: str) -> int:
        try:
            token = self._without_special.token_to_id(text)
        except UnicodeEncodeError:
            # JSON may contain lone surrogates, which no token has.
            return -1
        return -1 if token is None else int(token)

    def _token_of(self, field: str) -> int:
        text = self.settings.get(field)
        if isinstance(text, dict):
            text = text.get("content")
        return self._id(text) if isinstance(text, str) else -1

    def _eog_ids(self, stated: Iterable[int]) -> frozenset[int]:
        named = [self._id(text) for text in _EOG_TOKENS if self._id(text) in self._control]
        tokens = {self.eos, *named, *stated}
        return frozenset(token for token in tokens if 0 <= token < self.vocab_size)

    def _bytes(self, token: int, special: bool) -> bytes:
        if token in self._control and not special:
            return b""
        if token in self._added:
            return self._added[token].encode()
        text = self._without_special.id_to_token(token)
        if text is None:
            return b""
        if self._letters:
            return bytes(self._letters[letter] for letter in text if letter in self._letters)
        match = _HEX.match(text)
        if match:
            return bytes([int(match[1], 16)])
        return text.replace("\u2581", " ").encode()

    def _longest_piece(self, raw: Mapping[str, Any], vocabulary: Iterable[str]) -> int:
        """Return the bytes of text that the longest token covers; 1 << 40: unlimited.

        Normalization before the split makes it unlimited, unless it only marks spaces and every byte has a
        token."""
        normalizer = raw.get("normalizer")
        if normalizer in _SPACES_MARKED and (raw.get("model") or {}).get("byte_fallback"):
            texts = (*vocabulary, *self._added.values())
            return max(len(text.replace("\u2581", " ").encode()) for text in texts)
        if normalizer is not None and normalizer.get("type") != "NFC":
            return 1 << 40
        if not self._letters:
            return 1 << 40
        # A letter of a byte-level token is one byte.
        longest = max((len(text) for text in vocabulary), default=1)
        longest_added = max((len(text.encode()) for text in self._added.values()), default=1)
        # NFC may shorten a text to less than a half.
        factor = 1 if normalizer is None else 4
        return max(longest, longest_added, 1) * factor


def _special_token(added: Mapping[str, Any]) -> SpecialToken:
    """Read an entry of `added_tokens` in tokenizer.json."""
    lstrip = bool(added.get("lstrip"))
    rstrip = bool(added.get("rstrip"))
    return SpecialToken(str(added["content"]), bool(added.get("special")), lstrip, rstrip)


def _with_rows(text: str, vocab_size: int) -> tuple[dict[str, Any], str]:
    """Return tokenizer.json without added tokens beyond the model's rows: parsed, and as text.

    Gemma 3 has such a token for images, even in text-only models."""
    raw: dict[str, Any] = json.loads(text)
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    added = raw.get("added_tokens") or []
    with_rows = [token for token in added if not vocab_size or int(token["id"]) < vocab_size]
    if len(with_rows) == len(added):
        return raw, text
    raw["added_tokens"] = with_rows
    vocabulary = raw["model"].get("vocab")
    if isinstance(vocabulary, dict):
        for token in added:
            if token not in with_rows:
                vocabulary.pop(token["content"], None)
    return raw, json.dumps(raw)


def _twin(tokenizer: Tokenizer, text: str) -> Tokenizer:
    """Return a second tokenizer of the text, with its own settings.

    It shares the vocabulary, which takes 0.3 s to build, unless added tokens would get other numbers."""
    twin = Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        value = getattr(tokenizer, part)
        if value is not None:
            setattr(twin, part, value)
    added = tokenizer.get_added_tokens_decoder()
    twin.add_tokens([added[number] for number in sorted(added)])
    if twin.get_added_tokens_decoder() == added:
        return twin
    return Tokenizer.from_str(text)


def _is_byte_level(raw: Mapping[str, Any]) -> bool:
    decoder = raw.get("decoder") or {}
    parts = [decoder, *(decoder.get("decoders") or [])]
    return any(part.get("type") == "ByteLevel" for part in parts)


def _unreadable(path: Path | str, error: Exception) -> ModelInvalid:
    return ModelInvalid(f"{path} cannot be read: {reason(error)}.", hint=_DAMAGED_HINT)


def sampling_defaults(folder: Path) -> tuple[tuple[str, float], ...]:
    """Return the sampling defaults of generation_config.json. Raises ModelInvalid."""
    stated = optional_object(folder / "generation_config.json")
    values = ((field, stated.get(field)) for field in SAMPLING_KEYS)
    return tuple((field, float(value)) for field, value in values if isinstance(value, int | float))
