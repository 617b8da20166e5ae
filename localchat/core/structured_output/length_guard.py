"""Length guard: brings a constrained answer to its end while there is room; cut off, it would be invalid.

The grammar decides which tokens may come, the classes here which of them end the text soonest: the end
itself, closing brackets, a closing quote, `null`, and so on. The number of tokens to an end is measured now
and then, seldom while there is much room; when it takes nearly all that is left, only the best class is
allowed. Before that nothing changes.
"""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localchat.backend_api.interface import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

_TEXT_PROBES = (b"x", b"q", b"K")
"""Where one of these letters may come, a closing bracket is text."""
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
"""The best first; a token belongs to the first that it matches. The first counts outside text only. An
opening bracket alone is better than one that begins the first item too, and the last character of a call
better than one with the line break before the next call: after it the end may come."""
_TEXT_CLASS = 5
_MOST_STEPS = 400
_RESERVE = 4
"""Tokens left over on purpose: sampled text may take more tokens than the measured path."""
_RESERVED_PART = 8
"""Of an answer of few tokens only an eighth is left over: it would be closed at its first token."""

Bits = NDArray[np.uint8]


class ClosingState(NamedTuple):
    """Whether the text is being closed."""

    closing: bool = False
    """Only tokens that end the text soonest are allowed."""
    check_at: int = 0
    """Number of generated tokens at which the path to an end is measured next."""


class LengthGuard:
    """The classes as masks over one vocabulary. Shared and only read."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = [tokenizer.piece(token) for token in range(tokenizer.vocab_size)]
        self._ends = _mask([token in tokenizer.eog for token in range(len(pieces))])
        self._text_probes = _mask([piece in _TEXT_PROBES for piece in pieces])
        self._blanks = _mask([not piece.strip() for piece in pieces])
        self._bytes = self._ends.size
        kinds = [_class(piece) for piece in pieces]
        self._brackets, *self._classes = (
            _mask([kind == place for kind in kinds]) for place in range(len(_CLASSES))
        )

    def allowed(self, matcher: "LLMatcher") -> bytes:
        """Mask of the tokens that the grammar allows next, ceil(V / 32) words."""
        words: bytes = matcher.compute_bitmask()  # may be a word longer
        return words[: self._bytes]

    def closing_tokens(self, words: bytes) -> bytes:
        """The allowed tokens of the best class; the mask itself where none is in any class."""
        allowed = np.frombuffer(words, np.uint8)
        for kind in self._order(allowed):
            best = allowed & kind
            if best.any():
                return best.tobytes()
        return words

    def narrows(self, allowed: bytes, closing: bytes) -> bool:
        """Whether the closing tokens leave out any that say something. White space does not count."""
        left_out = np.frombuffer(allowed, np.uint8) & ~np.frombuffer(closing, np.uint8)
        return bool((left_out & ~self._blanks & ~self._ends).any())

    def _order(self, allowed: Bits) -> list[Bits]:
        structure = [] if (allowed & self._text_probes).any() else [self._brackets]
        return [self._ends, *structure, *self._classes]

    def steps(self, matcher: "LLMatcher", most: int) -> int | None:
        """Tokens from here to an end by `closing_tokens`; None: more than `most`. Leaves the matcher as
        it was."""
        way = self._shortest_path(matcher, most, _last)
        if way is None:
            return self._shortest_path(matcher, most, _first)
        return way

    def _shortest_path(
        self, matcher: "LLMatcher", most: int, pick: Callable[[bytes], int]
    ) -> int | None:
        taken = 0
        found = None
        while taken <= most:
            if matcher.is_stopped() or matcher.is_accepting():
                found = taken
                break
            forced = matcher.compute_ff_tokens()
            token = forced[0] if forced else pick(self.closing_tokens(self.allowed(matcher)))
            if not matcher.consume_token(token):
                break
            taken += 1
        if taken:
            matcher.rollback(taken)
        return found

    def check(self, matcher: "LLMatcher", generated: int, left: int) -> ClosingState:
        """Whether to close the text now. `generated`: its tokens so far; `left`: how many more it may
        have."""
        steps = self.steps(matcher, min(left, _MOST_STEPS))
        if steps is None:
            return ClosingState(False, generated + max(1, left // 8))
        reserve = left - steps - min(_RESERVE, (generated + left) // _RESERVED_PART)
        return ClosingState(reserve <= 0, generated + max(1, reserve // 4))


def _class(piece: bytes) -> int:
    """Number of a token's class, -1 where it is in none."""
    if piece[:1].isalpha() and piece[:1] not in b"eEn" and b"\n" not in piece:
        return _TEXT_CLASS  # most tokens, without trying every pattern
    return next((place for place, kind in enumerate(_CLASSES) if kind.match(piece)), -1)


def _mask(chosen: list[bool]) -> Bits:
    words = np.zeros(4 * ((len(chosen) + 31) // 32), np.uint8)
    packed = np.packbits(np.asarray(chosen), bitorder="little")
    words[: packed.size] = packed
    return words


def _first(words: bytes) -> int:
    """The lowest allowed token: the tag that ends all calls may come before the one that begins another."""
    found = np.flatnonzero(np.frombuffer(words, np.uint8))
    byte = int(found[0])
    return byte * 8 + (words[byte] & -words[byte]).bit_length() - 1


def _last(words: bytes) -> int:
    """The highest allowed token: nines rather than zeros, which may go on for ever."""
    found = np.flatnonzero(np.frombuffer(words, np.uint8))
    byte = int(found[-1])
    return byte * 8 + words[byte].bit_length() - 1
