"""Length guard: ends a constrained answer before its limit, because a truncated answer would be invalid.

The grammar decides which tokens are allowed. The classes here decide which of them end the text soonest: the
end itself, closing brackets, a closing quote, `null`, and so on. The number of tokens to an end is measured at
intervals that shrink with the room left. Once the end takes nearly all that is left, only the best class is
allowed. Before that, nothing changes.
"""

import re
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localchat.backend_api.interface import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

_TEXT_PROBES = (b"x", b"q", b"K")
"""If one of these letters is allowed, a closing bracket is text."""
_CLASSES = (
    re.compile(rb" ?[}\]]+\Z"),
    re.compile(rb'"[}\]]*\Z'),
    re.compile(rb" ?null[}\]]*\Z"),
    re.compile(rb' ?(\[\]|\{\}|"")[}\]]*\Z'),
    re.compile(rb","),
    re.compile(rb"[^0-9.eE+\-\[{, \n][^\n]*\Z"),
    re.compile(rb" ?[0-9]"),
    re.compile(rb" ?[\[{]\Z"),
    re.compile(rb"[^0-9.eE+\-\[{, ]"),
)
"""Classes of tokens, best first. A token belongs to the first class that it matches. The first class counts
only outside text. An opening bracket alone is better than one with the start of the first item. The last
character of a call is better than one with the line break before the next call, because the end may follow it.
"""
_SEPARATOR = re.compile(rb" ?[,\[{]")
_TEXT_CLASS = 5
_MAX_STEPS = 400
_RESERVE = 4
"""Reserved tokens, because sampled text may take more tokens than the measured path."""
_NEAR_TOKENS = 96
"""Reserve below which the path after another item is measured at each token."""
_RESERVED_PART = 8
"""Short answers reserve only an eighth. Otherwise they would be closed at their first token."""

Bits = NDArray[np.uint8]


class _ClassMasks(NamedTuple):
    """Masks of tokens over one vocabulary. Takes 0.2 s for 152k tokens."""

    ends: Bits
    text_probes: Bits
    blanks: Bits
    brackets: Bits
    classes: tuple[Bits, ...]
    """The other classes, best first."""
    separators: Bits
    """Commas and opening brackets, which start another item."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "_ClassMasks":
        pieces = [tokenizer.piece(token) for token in range(tokenizer.vocab_size)]
        kinds = [_class(piece) for piece in pieces]
        brackets, *classes = (
            _mask([kind == number for kind in kinds]) for number in range(len(_CLASSES))
        )
        return cls(
            _mask([token in tokenizer.eog for token in range(len(pieces))]),
            _mask([piece in _TEXT_PROBES for piece in pieces]),
            _mask([not piece.strip() for piece in pieces]),
            brackets,
            tuple(classes),
            _mask([_SEPARATOR.match(piece) is not None for piece in pieces]),
        )


class ClosingState(NamedTuple):
    """State of closing a text."""

    closing: bool = False
    """Allow only the tokens that end the text soonest."""
    check_at: int = 0
    """Number of generated tokens at which the path to an end is measured again."""


class LengthGuard:
    """Closes texts over one vocabulary. Shared by all requests."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _masks(self) -> "_ClassMasks":
        """Masks of the classes. Most answers end early and never need them."""
        return _ClassMasks.of(self._tokenizer)

    def allowed(self, matcher: "LLMatcher") -> bytes:
        """Return the mask of the tokens that the grammar allows next, ceil(V / 32) words."""
        # llguidance's mask may be a word longer.
        words: bytes = matcher.compute_bitmask()
        return words[: 4 * ((self._tokenizer.vocab_size + 31) // 32)]

    def closing_tokens(self, words: bytes) -> bytes:
        """Return the allowed tokens of the best class, or all if no class matches."""
        allowed = np.frombuffer(words, np.uint8)
        for kind in self._order(allowed):
            best = allowed & kind
            if best.any():
                return best.tobytes()
        return words

    def closing_mask(self, words: bytes) -> bytes:
        """Return the mask while the text is closed: the tokens of `closing_tokens`, but one bracket alone.

        Brackets that are several tokens would take more room than the path that was measured.
        """
        closing = self.closing_tokens(words)
        bits = np.frombuffer(closing, np.uint8)
        if not bits.any() or (bits & ~self._masks.brackets).any():
            return closing
        token = _last(closing)
        mask = bytearray(len(closing))
        mask[token >> 3] = 1 << (token & 7)
        return bytes(mask)

    def narrows(self, allowed: bytes, closing: bytes) -> bool:
        """Return whether the closing tokens exclude any besides white space."""
        left_out = np.frombuffer(allowed, np.uint8) & ~np.frombuffer(closing, np.uint8)
        return bool((left_out & ~self._masks.blanks & ~self._masks.ends).any())

    def _order(self, allowed: Bits) -> list[Bits]:
        masks = self._masks
        if (allowed & masks.text_probes).any():
            return [masks.ends, *masks.classes]
        return [masks.ends, masks.brackets, *masks.classes]

    def steps(self, matcher: "LLMatcher", limit: int) -> int | None:
        """Return the number of tokens to an end by `closing_tokens`. None: more than `limit`.

        Restores the state of the matcher.
        """
        path = self._shortest_path(matcher, limit, _last)
        if path is None:
            return self._shortest_path(matcher, limit, _first)
        return path

    def _shortest_path(
        self, matcher: "LLMatcher", limit: int, pick: Callable[[bytes], int]
    ) -> int | None:
        consumed = 0
        steps = None
        while consumed <= limit:
            if matcher.is_stopped() or matcher.is_accepting():
                steps = consumed
                break
            forced = matcher.compute_ff_tokens()
            if forced:
                token = forced[0]
            else:
                words = self.closing_tokens(self.allowed(matcher))
                if not any(words):
                    break
                token = pick(words)
            if not matcher.consume_token(token):
                break
            consumed += 1
        if consumed:
            matcher.rollback(consumed)
        return steps

    def check(self, matcher: "LLMatcher", generated: int, left: int) -> ClosingState:
        """Decide whether to close the text now, after `generated` tokens with `left` to go."""
        steps = self.steps(matcher, min(left, _MAX_STEPS))
        if steps is None:
            return ClosingState(check_at=generated + max(1, left // 8))
        reserve = left - steps - min(_RESERVE, (generated + left) // _RESERVED_PART)
        if 0 < reserve < _NEAR_TOKENS:
            # Another item may be longer than the reserve.
            continued = self._steps_if_continued(matcher, left)
            return ClosingState(continued is None or continued > left, generated + 1)
        return ClosingState(reserve <= 0, generated + max(1, reserve // 4))

    def _steps_if_continued(self, matcher: "LLMatcher", limit: int) -> int | None:
        """Return the tokens to an end after a token that does not close the text. None: more than `limit`.

        Restores the state of the matcher.
        """
        allowed = self.allowed(matcher)
        masks = self._masks
        left_out = np.frombuffer(allowed, np.uint8) & ~np.frombuffer(
            self.closing_tokens(allowed), np.uint8
        )
        others = left_out & ~masks.blanks & ~masks.ends
        # The last classes take most tokens. Text and digits add one token each.
        separators = others & masks.separators
        if not separators.any():
            return 0
        if not matcher.consume_token(_last(separators.tobytes())):
            return None
        steps = self.steps(matcher, limit)
        matcher.rollback(1)
        return None if steps is None else steps + 1


def _class(piece: bytes) -> int:
    """Return the number of a token's class. -1: none."""
    if piece[:1].isalpha() and piece[:1] not in b"eEn" and b"\n" not in piece:
        # This covers most tokens without trying every pattern.
        return _TEXT_CLASS
    return next((number for number, kind in enumerate(_CLASSES) if kind.match(piece)), -1)


def _mask(chosen: list[bool]) -> Bits:
    words = np.zeros(4 * ((len(chosen) + 31) // 32), np.uint8)
    packed = np.packbits(np.asarray(chosen), bitorder="little")
    words[: packed.size] = packed
    return words


def _first(words: bytes) -> int:
    """Return the lowest allowed token. The tag that ends all calls may precede one that starts another."""
    nonzero = np.flatnonzero(np.frombuffer(words, np.uint8))
    byte = int(nonzero[0])
    return byte * 8 + (words[byte] & -words[byte]).bit_length() - 1


def _last(words: bytes) -> int:
    """Return the highest allowed token: nines rather than zeros, which may continue forever."""
    nonzero = np.flatnonzero(np.frombuffer(words, np.uint8))
    byte = int(nonzero[-1])
    return byte * 8 + words[byte].bit_length() - 1
