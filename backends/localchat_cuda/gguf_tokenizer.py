"""The tokenizer of a GGUF file's metadata, in the form of tokenizer.json: byte-level BPE."""

import json
from typing import Any, Final

from localchat.model_files.gguf import Array, Header
from localchat_cuda.gguf_config import TokenizerKind, strings_of, tokenizer_kind
from localchat_cuda.tokenizer import TokenizerFiles

TOKENS: Final = "tokenizer.ggml.tokens"
MERGES: Final = "tokenizer.ggml.merges"
TYPES: Final = "tokenizer.ggml.token_type"
ARRAYS: Final = (TOKENS, MERGES, TYPES)
"""Arrays of the metadata that must be kept when a header is read."""
_CONTROL, _USER_DEFINED = 3, 4
_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS: Final[dict[TokenizerKind, str]] = {
    "qwen2": f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}|{_REST}",
    "llama-bpe": f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}{{1,3}}|{_REST}",
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}
"""How a text is cut before merging, by `tokenizer.ggml.pre`: as the makers of the vocabularies state it."""
_WHOLE_WORDS: Final = ("llama-bpe",)
"""Vocabularies in which a piece that is a token needs no merges."""
_NORMALIZED: Final = ("qwen2",)
"""Vocabularies whose texts are brought to NFC."""


def tokenizer_files(header: Header) -> TokenizerFiles:
    """What a checkpoint's folder states of its tokenizer. Raises ModelInvalid for other kinds."""
    pre = tokenizer_kind(header)
    tokens, merges = strings_of(header, TOKENS), strings_of(header, MERGES)
    held = header.metadata.get(TYPES)
    types = held.values if isinstance(held, Array) and held.values is not None else ()
    added = [
        _added(number, text, special=type_ == _CONTROL)
        for number, (text, type_) in enumerate(zip(tokens, types, strict=False))
        if type_ in (_CONTROL, _USER_DEFINED)
    ]
    model = {
        "type": "BPE",
        "vocab": {text: number for number, text in enumerate(tokens)},
        "merges": list(merges),
        "ignore_merges": pre in _WHOLE_WORDS,
        "byte_fallback": False,
    }
    split = {
        "type": "Split",
        "pattern": {"Regex": _PATTERNS[pre]},
        "behavior": "Isolated",
        "invert": False,
    }
    letters = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    raw = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre in _NORMALIZED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, letters]},
        "post_processor": None,
        "decoder": letters,
        "model": model,
    }
    return TokenizerFiles(header.name, json.dumps(raw), _settings(header, tokens), _ends(header))


def _added(number: int, text: str, *, special: bool) -> dict[str, Any]:
    return {
        "id": number,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def _settings(header: Header, tokens: tuple[str, ...]) -> dict[str, Any]:
    """Fields of tokenizer_config.json."""
    found: dict[str, Any] = {}
    for field in ("bos", "eos"):
        number = header.metadata.get(f"tokenizer.ggml.{field}_token_id")
        if isinstance(number, int) and number < len(tokens):
            found[f"{field}_token"] = tokens[number]
    add_bos = header.metadata.get("tokenizer.ggml.add_bos_token")
    default = header.metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    found["add_bos_token"] = bool(default if add_bos is None else add_bos)
    return found


def _ends(header: Header) -> tuple[int, ...]:
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    stated = (header.metadata.get(f"tokenizer.ggml.{name}") for name in names)
    return tuple(number for number in stated if isinstance(number, int))
