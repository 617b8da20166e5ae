"""WordPiece tokenizer of BERT models. llama.cpp's own differs from the training in many scripts."""

import unicodedata
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from localchat.model_files.gguf import Value

LOWERCASE: Final = "tokenizer.ggml.normalizer.lowercase"
STRIP_ACCENTS: Final = "tokenizer.ggml.normalizer.strip_accents"
_MAX_WORD_LENGTH = 100
"""Characters of a word. BERT reads a longer word as unknown."""
_WORD_START = "\u2581"
_IDEOGRAPHS = (
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B81F),
    # The gap up to here is the one of the tokenizers library, with which the models were trained.
    (0x2B920, 0x2CEAF),
    (0x2F800, 0x2FA1F),
)


class WordPiece:
    """Tokenizer of plain texts over the vocabulary of a BERT model."""

    def __init__(
        self, texts: Iterable[str], unknown: int, metadata: Mapping[str, Value] | None = None
    ) -> None:
        """texts: all tokens as GGUF files write them, with U+2581 before a word's first piece.

        unknown: id of the token for words without pieces.
        """
        self._firsts: dict[str, int] = {}
        self._others: dict[str, int] = {}
        for token, text in enumerate(texts):
            if text.startswith(_WORD_START):
                self._firsts[text.removeprefix(_WORD_START)] = token
            else:
                self._others[text] = token
        self._unknown = unknown
        self._longest = max(map(len, (*self._firsts, *self._others)), default=1)
        values = metadata or {}
        lowercase = values.get(LOWERCASE)
        # Older files omit it.
        self._lowercase = self._has_no_capitals() if lowercase is None else bool(lowercase)
        self._strips = bool(values.get(STRIP_ACCENTS, self._lowercase))
        self._cleaning = _Replacements(_cleaned)
        self._folding = _Replacements(self._folded)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without tokens that begin and end it."""
        text = text.translate(self._cleaning)
        if self._strips:
            text = unicodedata.normalize("NFD", text)
        words = text.translate(self._folding).split()
        return [token for word in words for token in self._pieces(word)]

    def _pieces(self, word: str) -> list[int]:
        """Take the longest known piece at each place of a word."""
        if len(word) > _MAX_WORD_LENGTH:
            return [self._unknown]
        start = 0
        tokens = []
        while start < len(word):
            ids = self._others if start else self._firsts
            for end in range(min(len(word), start + self._longest), start, -1):
                token = ids.get(word[start:end])
                if token is not None:
                    break
            else:
                return [self._unknown]
            tokens.append(token)
            start = end
        return tokens

    def _folded(self, character: str) -> str:
        """Fold case and accents of a cleaned text, and separate punctuation."""
        if self._strips and unicodedata.category(character) == "Mn":
            return ""
        if self._lowercase:
            character = character.lower()
        if len(character) == 1 and _is_punctuation(character):
            return f" {character} "
        return character

    def _has_no_capitals(self) -> bool:
        """Whether all words are in lower case, apart from tokens like `[CLS]`."""
        return all(text == text.lower() for text in self._firsts)


class _Replacements(dict[int, str]):
    """Table for `str.translate` that caches what a function returns for each character."""

    def __init__(self, replacement: Callable[[str], str]) -> None:
        super().__init__()
        self._replacement = replacement

    def __missing__(self, code: int) -> str:
        self[code] = text = self._replacement(chr(code))
        return text


def _cleaned(character: str) -> str:
    """Drop control characters, use one kind of space, and separate ideographs."""
    code = ord(character)
    category = unicodedata.category(character)
    if character in "\t\n\r" or (character.isspace() and category != "Cc"):
        return " "
    # Lone surrogates count as U+FFFD.
    if code in (0, 0xFFFD) or category in ("Cc", "Cf", "Co", "Cs"):
        return ""
    if any(first <= code <= last for first, last in _IDEOGRAPHS):
        return f" {character} "
    return character


def _is_punctuation(character: str) -> bool:
    """Whether BERT makes a word of this character: in ASCII also of symbols."""
    if character.isascii():
        return character.isprintable() and not (character.isalnum() or character == " ")
    return unicodedata.category(character).startswith("P")
