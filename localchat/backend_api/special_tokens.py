"""Tokens that a tokenizer recognizes by their written form, such as `<|im_end|>`."""

from typing import NamedTuple


class SpecialToken(NamedTuple):
    """Written form of a token, and its treatment by tokenizers."""

    text: str
    control: bool
    """Whether it is recognized only in trusted text. User-defined tokens are recognized in every text."""
    lstrip: bool = False
    """Whether the tokenizer removes white space before it."""
    rstrip: bool = False
    """Whether the tokenizer removes white space after it."""
