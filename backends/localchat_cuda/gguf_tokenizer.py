"""Translates the tokenizer of a GGUF file to tokenizer.json: byte-level BPE or SentencePiece."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from localchat.model_files.gguf import Array, Header
from localchat.model_files.pre_tokenizers import LONE_DIGITS, PATTERNS, WHOLE_WORDS
from localchat_cuda.config.gguf import gguf_traits, tokenizer_kind
from localchat_cuda.tokenizer import TokenizerFiles

TOKENS: Final = "tokenizer.ggml.tokens"
MERGES: Final = "tokenizer.ggml.merges"
TYPES: Final = "tokenizer.ggml.token_type"
SCORES: Final = "tokenizer.ggml.scores"
ARRAYS: Final = (TOKENS, MERGES, TYPES, SCORES)
"""Arrays of the metadata that reading a header must load."""
_NORMAL: Final = 1
_UNKNOWN: Final = 2
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_SPACE: Final = "\u2581"
"""Space in the tokens of SentencePiece."""
_NORMALIZED: Final = ("qwen2",)
"""Vocabularies whose texts are normalized to NFC."""


def tokenizer_files(header: Header) -> TokenizerFiles:
    """Return the tokenizer as files of a checkpoint. Raises ModelInvalid for unsupported kinds."""
    kind = tokenizer_kind(header)
    tokens = tuple(map(str, _values(header, TOKENS)))
    # GGUF files do not store which tokens strip the white space after them.
    space_kept_after: tuple[str, ...] = ()
    if kind == "sentencepiece":
        space_kept_after = gguf_traits(header).space_kept_after
    added = [
        _added(
            number,
            text,
            special=type_ != _USER_DEFINED,
            rstrip=bool(space_kept_after) and text not in space_kept_after,
        )
        for number, (text, type_) in enumerate(zip(tokens, _values(header, TYPES), strict=False))
        if type_ in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    if kind == "sentencepiece":
        parts = _sentencepiece_parts(header, tokens)
    else:
        parts = _byte_level_parts(header, kind, tokens)
    raw = {"version": "1.0", "added_tokens": added, "post_processor": None, **parts}
    settings = _settings(header, tokens, kind)
    return TokenizerFiles(header.name, json.dumps(raw), settings, _ends(header))


def _byte_level_parts(header: Header, kind: str, tokens: tuple[str, ...]) -> dict[str, Any]:
    """Return normalizer, pre-tokenizer, decoder and model of a byte-level tokenizer."""
    split = {
        "type": "Split",
        "pattern": {"Regex": PATTERNS[kind]},
        "behavior": "Isolated",
        "invert": False,
    }
    letters = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    steps: list[dict[str, Any]] = [split, letters]
    if kind in LONE_DIGITS:
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    return {
        "normalizer": {"type": "NFC"} if kind in _NORMALIZED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": letters,
        "model": {
            "type": "BPE",
            "vocab": {text: number for number, text in enumerate(tokens)},
            "merges": list(_values(header, MERGES)),
            "ignore_merges": kind in WHOLE_WORDS,
            "byte_fallback": False,
        },
    }


def _sentencepiece_parts(header: Header, tokens: tuple[str, ...]) -> dict[str, Any]:
    """Return the parts of a SentencePiece tokenizer. Scores decide the order of merges."""
    marked: dict[str, Any] = {
        "type": "Replace",
        "pattern": {"String": " "},
        "content": _SPACE,
    }
    if header.metadata.get("tokenizer.ggml.add_space_prefix", True):
        first = {"type": "Prepend", "prepend": _SPACE}
        marked = {"type": "Sequence", "normalizers": [first, marked]}
    vocabulary = {text: number for number, text in enumerate(tokens)}
    usual = [
        text
        for text, type_ in zip(tokens, _values(header, TYPES), strict=False)
        if type_ in (_NORMAL, _USER_DEFINED)
    ]
    scores = dict(zip(tokens, _values(header, SCORES), strict=False))
    merges = _merges(usual, scores, vocabulary)
    unknown = header.metadata.get("tokenizer.ggml.unknown_token_id")
    unknown_text = None
    if isinstance(unknown, int) and 0 <= unknown < len(tokens):
        unknown_text = tokens[unknown]
    return {
        "normalizer": marked,
        "pre_tokenizer": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "vocab": vocabulary,
            "merges": merges,
            "unk_token": unknown_text,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
        },
    }


def _merges(
    texts: Iterable[str], scores: Mapping[str, float], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Return the pairs of tokens that make a token, with the highest score first."""
    scored: list[tuple[float, int, int, tuple[str, str]]] = []
    for text in texts:
        score = -scores.get(text, 0.0)
        for cut in range(1, len(text)):
            left = text[:cut]
            right = text[cut:]
            if left in vocabulary and right in vocabulary:
                scored.append((score, vocabulary[left], vocabulary[right], (left, right)))
    return [pair for *_, pair in sorted(scored)]


def _values(header: Header, key: str) -> tuple[Any, ...]:
    """Return an array of the metadata. Empty if the header lacks it."""
    array = header.metadata.get(key)
    if isinstance(array, Array):
        return tuple(array.values or ())
    return ()


def _added(number: int, text: str, *, special: bool, rstrip: bool) -> dict[str, Any]:
    return {
        "id": number,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": rstrip,
        "normalized": False,
        "special": special,
    }


def _settings(header: Header, tokens: tuple[str, ...], kind: str) -> dict[str, Any]:
    """Return the fields of tokenizer_config.json."""
    settings: dict[str, Any] = {}
    for field in ("bos", "eos"):
        number = header.metadata.get(f"tokenizer.ggml.{field}_token_id")
        if isinstance(number, int) and number < len(tokens):
            settings[f"{field}_token"] = tokens[number]
    add_bos = header.metadata.get("tokenizer.ggml.add_bos_token")
    if add_bos is None:
        add_bos = kind in ("llama-bpe", "lfm2", "pixtral", "tekken", "sentencepiece")
    settings["add_bos_token"] = bool(add_bos)
    return settings


def _ends(header: Header) -> tuple[int, ...]:
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    stated = (header.metadata.get(f"tokenizer.ggml.{name}") for name in names)
    return tuple(number for number in stated if isinstance(number, int))
