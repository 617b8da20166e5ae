"""Tokens that a tokenizer recognizes by their written form, such as `<|im_end|>`."""

from typing import NamedTuple


class SpecialToken(NamedTuple):
    """Written form of a token, and how a tokenizer treats it."""

    text: str
    control: bool
    """Recognized only where control tokens are wanted. User-defined tokens are recognized in every text."""
    lstrip: bool = False
    """White space before it is dropped."""
    rstrip: bool = False
    """White space after it is dropped."""
