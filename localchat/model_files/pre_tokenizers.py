"""Patterns that split a text into words before byte-level BPE merges the bytes of each word."""

from collections.abc import Mapping
from typing import Final

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
"""Words that also split before a capital letter; `%s`: contractions."""
_CASED_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}{{1,3}}|{_REST}"
GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PATTERNS: Final[Mapping[str, str]] = {
    "qwen2": f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}|{_REST}",
    "llama-bpe": _LLAMA3,
    "lfm2": _LLAMA3,
    "pixtral": _LLAMA3,
    "dbrx": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "seed-coder": f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}{{1}}| ?[^\\s\\p{{L}}\\p{{N}}\\r\\n]+|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt-2": GPT2,
    "smollm": GPT2,
    "refact": GPT2,
    "gpt-4o": f"{_CASED % ((f'{_CONTRACTIONS}?',) * 2)}|\\p{{N}}{{1,3}}|{_CASED_REST}",
    "tekken": f"{_CASED % ('', '')}|\\p{{N}}|{_CASED_REST}",
}
"""Patterns that split a text before merging, by `tokenizer.ggml.pre`, from the authors of the vocabularies."""
WHOLE_WORDS: Final = ("llama-bpe", "lfm2", "pixtral", "tekken")
"""Vocabularies in which a piece that equals a token skips the merges."""
LONE_DIGITS: Final = ("smollm", "refact")
"""Vocabularies that split off each digit first."""
