"""Bringing a bound answer to its end while there is room: what is cut off by its length has no form at all.

The grammar says what may come, these classes which of it ends soonest: the end itself, closing brackets, a
closing quote, `null`, and so on. How many tokens an end takes is tried out now and then, seldom while there is
much room; when it takes nearly all that is left, only the best class is allowed. Nothing changes before that.
"""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localchat.backend_api.interface import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

_FREE = (b"x", b"q", b"K")
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
"""The best first; a token belongs to the first that it matches. The first one counts outside text only. An
opening bracket alone is better than one that begins the first item too, and the last sign of a call better than
one with the line break before the next: behind it the end may come."""
_OTHER = 5
_MOST_STEPS = 400
_SPARE = 24
"""Left over on purpose, beside as much again as the way to an end takes: the next item of a list may begin
meanwhile, and what is drawn takes more tokens than what was tried out."""

Bits = NDArray[np.uint8]


class ClosingState(NamedTuple):
    """`closing`: only what ends soonest is allowed. `look_at`: tokens said when the way to an end is tried
    next."""

    closing: bool = False
    look_at: int = 0


class LengthGuard:
    """The classes, as masks over one vocabulary. Shared and only read."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = [tokenizer.piece(token) for token in range(tokenizer.vocab_size)]
        self._ends = _mask([token in tokenizer.eog for token in range(len(pieces))])
        self._free = _mask([piece in _FREE for piece in pieces])
        self._bytes = self._ends.size
        kinds = [_class(piece) for piece in pieces]
        self._brackets, *self._classes = (
            _mask([kind == place for kind in kinds]) for place in range(len(_CLASSES))
        )

    def allowed(self, matcher: "LLMatcher") -> bytes:
        """The mask of what the grammar allows next, ceil(V / 32) words."""
        words: bytes = matcher.compute_bitmask()  # may be a word longer
        return words[: self._bytes]

    def soonest(self, words: bytes) -> bytes:
        """Of the tokens that a mask allows, those of the best class; the mask itself where none is in any."""
        allowed = np.frombuffer(words, np.uint8)
        for kind in self._order(allowed):
            best = allowed & kind
            if best.any():
                return best.tobytes()
        return words

    def _order(self, allowed: Bits) -> list[Bits]:
        structure = [] if (allowed & self._free).any() else [self._brackets]
        return [self._ends, *structure, *self._classes]

    def steps(self, matcher: "LLMatcher", most: int) -> int | None:
        """Tokens to an end from here, on the ways that `soonest` shows; None: more than `most`. The matcher
        stands where it stood, afterwards."""
        way = self._way(matcher, most, _last)
        return self._way(matcher, most, _first) if way is None else way

    def _way(self, matcher: "LLMatcher", most: int, pick: Callable[[bytes], int]) -> int | None:
        taken = 0
        found = None
        while taken <= most:
            if matcher.is_stopped() or matcher.is_accepting():
                found = taken
                break
            forced = matcher.compute_ff_tokens()
            token = forced[0] if forced else pick(self.soonest(self.allowed(matcher)))
            if not matcher.consume_token(token):
                break
            taken += 1
        if taken:
            matcher.rollback(taken)
        return found

    def look(self, matcher: "LLMatcher", said: int, left: int) -> ClosingState:
        """Whether to bring the text to an end now. `said`: its tokens so far; `left`: how many more it may
        have."""
        steps = self.steps(matcher, min(left, _MOST_STEPS))
        if steps is None:
            return ClosingState(False, said + max(1, left // 8))
        spare = left - 2 * steps - _SPARE
        return ClosingState(spare <= 0, said + max(1, spare // 4))


def _class(piece: bytes) -> int:
    """The number of a token's class, -1 where it is in none."""
    if piece[:1].isalpha() and piece[:1] not in b"eEn" and b"\n" not in piece:
        return _OTHER  # most tokens, without a look at every pattern
    return next((place for place, kind in enumerate(_CLASSES) if kind.match(piece)), -1)


def _mask(chosen: list[bool]) -> Bits:
    words = np.zeros(4 * ((len(chosen) + 31) // 32), np.uint8)
    packed = np.packbits(np.asarray(chosen), bitorder="little")
    words[: packed.size] = packed
    return words


def _first(words: bytes) -> int:
    """The lowest allowed token: the tag that ends all calls may stand before the one that begins another."""
    found = np.flatnonzero(np.frombuffer(words, np.uint8))
    byte = int(found[0])
    return byte * 8 + (words[byte] & -words[byte]).bit_length() - 1


def _last(words: bytes) -> int:
    """The highest allowed token: nines rather than zeros, which may go on for ever."""
    found = np.flatnonzero(np.frombuffer(words, np.uint8))
    byte = int(found[-1])
    return byte * 8 + words[byte].bit_length() - 1
