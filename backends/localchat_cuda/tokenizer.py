"""Tokenizer of a checkpoint folder: tokenizer.json, chat template and end-of-generation tokens.

Callable from any thread: the tokenizers library locks where it must, and the cache here is only written whole.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from localchat.backend_api.special_tokens import SpecialToken
from localchat.errors import ModelInvalid, ModelMissing, reason
from localchat_cuda.config.reader import token_ids

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
"""By the core's name of a special token, its spellings in vocabularies."""
_EOG_TOKENS = (
    *("<|eot_id|>", "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "</s>"),
    *("<end_of_turn>", "<eos>", "<|end|>"),
)
"""Names of tokens that end a generation, as in llama.cpp."""

_DAMAGED_HINT = "The file may be cut off or damaged: download it again."
_SPACES_MARKED = [{"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]
"""The normalizer of Gemma: it marks spaces."""


def _byte_of_letter() -> dict[str, int]:
    """The byte of each letter in a byte-level vocabulary (GPT-2, Radford et al., 2019): printable characters
    stand for themselves, the other bytes for U+0100 and on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


class TokenizerFiles(NamedTuple):
    """Contents of a checkpoint's files that describe its tokenizer."""

    name: str
    """For messages."""
    text: str
    """tokenizer.json."""
    settings: Mapping[str, Any]
    """tokenizer_config.json."""
    eos_ids: tuple[int, ...]
    """Tokens that end a generation, as other files state them."""


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read a checkpoint's folder. Raises ModelMissing, ModelInvalid."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelMissing(
            f"{folder} has no tokenizer.json.",
            hint="Download the whole checkpoint again, or take a GGUF of the model for llama.cpp.",
        )
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    files = ("generation_config.json", "config.json")
    stated = [token_ids(_read_object(folder / name).get("eos_token_id")) for name in files]
    ends = tuple(token for ids in stated for token in ids)
    return TokenizerFiles(str(path), text, _read_object(folder / "tokenizer_config.json"), ends)


class CheckpointTokenizer:
    """See localchat.backend_api.interface.Tokenizer."""

    def __init__(self, source: Path | TokenizerFiles, vocab_size: int = 0) -> None:
        """`source`: the folder of a checkpoint, or its files. `vocab_size`: rows of the model's embedding;
        0: as many as there are tokens. Rows beyond the tokenizer's last token have no text; tokens added beyond
        the last row are plain text. Raises ModelMissing, ModelInvalid."""
        files = source if isinstance(source, TokenizerFiles) else read_tokenizer_files(source)
        path = files.name
        try:
            raw, text = _with_rows(files.text, vocab_size)
            self._with_special = Tokenizer.from_str(text)
            self._without_special = _twin(self._with_special, text)
        except Exception as error:  # the library raises bare Exception
            raise _unreadable(path, error) from error
        # Control tokens that are written in a text stay plain text.
        self._without_special.encode_special_tokens = True
        self.settings = files.settings
        self.vocab_size = vocab_size or self._without_special.get_vocab_size(with_added_tokens=True)
        vocabulary = self._without_special.get_vocab()
        last_id = max(vocabulary.values(), default=0)
        if last_id >= self.vocab_size:
            raise ModelInvalid(
                f"{path} has tokens up to number {last_id:,}, and config.json says {self.vocab_size:,} in all.",
                hint="config.json and tokenizer belong to different models: download both again.",
            )
        self._letters = _byte_of_letter() if _is_byte_level(raw) else {}
        added = raw.get("added_tokens") or []
        self._added = {int(each["id"]): str(each["content"]) for each in added}
        self._control = {int(each["id"]) for each in added if each.get("special")}
        self.special_tokens = tuple(map(_special_token, added))
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self.bos = self._token_of("bos_token")
        self.eos = self._token_of("eos_token")
        self.eog = self._eog_ids(files.eos_ids)
        configured = self.settings.get("add_bos_token")
        begun = self._with_special.encode("").ids[:1]
        self.add_bos = (
            bool(configured) if configured is not None else bool(begun) and begun[0] == self.bos
        )
        self.longest_piece = self._longest_piece(raw, vocabulary)

    def encode(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        """Token ids of `text`. Lone surrogates become U+FFFD; never raises for any str."""
        chosen = self._with_special if special else self._without_special
        texts = [_SURROGATE.sub("\ufffd", text)]
        # As a batch, because that lets other threads run meanwhile, which the encoding of one text does not.
        (found,) = chosen.encode_batch_fast(texts, add_special_tokens=False)
        begin = [self.bos] if add_bos and self.add_bos and self.bos >= 0 else []
        return begin + list(found.ids)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token; control tokens are empty unless `special`. ValueError out of range."""
        vocabulary = self._pieces.get((token, special))
        if vocabulary is None:
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"token {token} is outside the vocabulary 0..{self.vocab_size - 1}"
                )
            vocabulary = self._pieces[token, special] = self._bytes(token, special)
        return vocabulary

    def special(self, name: str) -> int:
        """Id of `fim_pre`, `fim_suf`, `fim_mid`, `fim_pad`, `fim_rep`, `fim_sep`, `eot`, `sep`; -1: none."""
        if name == "sep":
            return self._token_of("sep_token")
        found = (self._id(text) for text in _SPECIAL.get(name, ()))
        return next((token for token in found if token >= 0), -1)

    def _id(self, text: str) -> int:
        found = self._without_special.token_to_id(text)
        return -1 if found is None else int(found)

    def _token_of(self, field: str) -> int:
        found = self.settings.get(field)
        text = found.get("content") if isinstance(found, dict) else found
        return self._id(text) if isinstance(text, str) else -1

    def _eog_ids(self, stated: Iterable[int]) -> frozenset[int]:
        named = [self._id(text) for text in _EOG_TOKENS if self._id(text) in self._control]
        found = {self.eos, *named, *stated}
        return frozenset(token for token in found if 0 <= token < self.vocab_size)

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
        found = _HEX.match(text)
        if found:
            return bytes([int(found[1], 16)])
        return text.replace("\u2581", " ").encode()

    def _longest_piece(self, raw: Mapping[str, Any], vocabulary: Iterable[str]) -> int:
        """Bytes of the longest token. Vocabularies that normalize text before they split it have none, except
        those that only mark spaces and have a token for every byte."""
        normalizer = raw.get("normalizer")
        if normalizer in _SPACES_MARKED and (raw.get("model") or {}).get("byte_fallback"):
            texts = (*vocabulary, *self._added.values())
            return max(len(text.replace("\u2581", " ").encode()) for text in texts)
        if normalizer is not None and normalizer.get("type") != "NFC":
            return 1 << 40
        if not self._letters:
            return 1 << 40
        # A letter of a byte-level token is one byte; NFC may halve a text or better, hence the factor.
        longest = max((len(text) for text in vocabulary), default=1)
        written = max((len(text.encode()) for text in self._added.values()), default=1)
        return max(longest, written, 1) * (1 if normalizer is None else 4)


def _special_token(added: Mapping[str, Any]) -> SpecialToken:
    """Read an entry of `added_tokens` in tokenizer.json."""
    lstrip = bool(added.get("lstrip"))
    rstrip = bool(added.get("rstrip"))
    return SpecialToken(str(added["content"]), bool(added.get("special")), lstrip, rstrip)


def _with_rows(text: str, vocab_size: int) -> tuple[dict[str, Any], str]:
    """tokenizer.json without added tokens that the model has no row for: parsed, and as text.

    Gemma 3's have one for images, even in text-only models."""
    raw: dict[str, Any] = json.loads(text)
    if not isinstance(raw, dict):
        raise ValueError("no JSON object")
    added = raw.get("added_tokens") or []
    kept = [each for each in added if not vocab_size or int(each["id"]) < vocab_size]
    if len(kept) == len(added):
        return raw, text
    raw["added_tokens"] = kept
    held = raw["model"].get("vocab")
    for each in added if isinstance(held, dict) else ():
        if each not in kept:
            held.pop(each["content"], None)
    return raw, json.dumps(raw)


def _twin(tokenizer: Tokenizer, text: str) -> Tokenizer:
    """A second tokenizer of the text, with settings of its own. It shares the vocabulary, which takes 0.3 s
    to build, unless added tokens would get other numbers."""
    twin = Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (found := getattr(tokenizer, part)) is not None:
            setattr(twin, part, found)
    added = tokenizer.get_added_tokens_decoder()
    twin.add_tokens([added[number] for number in sorted(added)])
    if twin.get_added_tokens_decoder() == added:
        return twin
    return Tokenizer.from_str(text)


def _is_byte_level(raw: Mapping[str, Any]) -> bool:
    decoder = raw.get("decoder") or {}
    parts = [decoder, *(decoder.get("decoders") or [])]
    return any(part.get("type") == "ByteLevel" for part in parts)


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if there is no file. Raises ModelInvalid."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(found, dict):
        raise ModelInvalid(f"{path} is not a JSON object.", hint=_DAMAGED_HINT)
    return found


def _unreadable(path: Path | str, error: Exception) -> ModelInvalid:
    return ModelInvalid(f"{path} cannot be read: {reason(error)}.", hint=_DAMAGED_HINT)


def chat_template(folder: Path) -> str | None:
    """The model's chat template; None if it has none. Raises ModelInvalid.

    Looks in chat_template.jinja, tokenizer_config.json (of several, the one named default), and in
    chat_template.json, where models that see images have it."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error
    found = _read_object(folder / "tokenizer_config.json").get("chat_template")
    if found is None:
        found = _read_object(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def sampling_defaults(folder: Path) -> tuple[tuple[str, float], ...]:
    """The model's own sampling settings, by our names, from generation_config.json. Raises ModelInvalid."""
    stated = _read_object(folder / "generation_config.json")
    fields = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    found = ((field, stated.get(field)) for field in fields)
    return tuple((field, float(value)) for field, value in found if isinstance(value, int | float))
