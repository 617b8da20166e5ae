"""Tokenizes a prompt whose parts differ in whether control tokens are recognized.

The ids equal those of the whole text with its control tokens recognized, except where a part is plain text.
"""

from collections.abc import Sequence
from functools import cached_property

from localchat.backend_api.interface import Tokenizer
from localchat.backend_api.sealed_text import TextPart

_LEAD = "\n"
"""Text before a part that continues another: it takes the space that a tokenizer puts before a text."""


class PromptEncoder:
    """Tokenizes prompts part by part. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, parts: Sequence[TextPart], *, add_bos: bool) -> list[int]:
        """Return the token ids of all parts."""
        tokenizer = self._tokenizer
        tokens: list[int] = []
        if add_bos and tokenizer.add_bos and tokenizer.bos >= 0:
            tokens.append(tokenizer.bos)
        for index, part in enumerate(parts):
            if index == 0 or not (part.joins or self._first_only):
                tokens += self._encode(part)
            else:
                tokens += self._continued(part)
        return tokens

    def _encode(self, part: TextPart) -> list[int]:
        return self._tokenizer.encode(part.text, special=part.special)

    def _continued(self, part: TextPart) -> list[int]:
        """Tokenize a part without the space that tokenizers put before the beginning of a text."""
        if not self._adds_space:
            return self._encode(part)
        lead = self._tokenizer.encode(_LEAD)
        tokens = self._encode(part._replace(text=_LEAD + part.text))
        # A part that begins with white space may share a token with the lead.
        if tokens[: len(lead)] == lead:
            return tokens[len(lead) :]
        return self._encode(part)

    @cached_property
    def _adds_space(self) -> bool:
        """Whether the tokenizer puts a space before a text."""
        return self._starts_with_space(self._tokenizer.encode("a"))

    @cached_property
    def _first_only(self) -> bool:
        """Whether it puts one before the first text only, and not after control tokens."""
        marks = (token.text for token in self._tokenizer.special_tokens if token.control)
        mark = next((text for text in marks if len(self._special(text)) == 1), None)
        if mark is None or not self._adds_space:
            return False
        return not self._starts_with_space(self._special(f"{mark}a")[1:])

    def _special(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, special=True)

    def _starts_with_space(self, tokens: Sequence[int]) -> bool:
        return bool(tokens) and self._tokenizer.piece(tokens[0]).startswith(b" ")
