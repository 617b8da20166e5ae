"""Where the last tokens stood before: every position of a text, chained by its last three tokens.

The idea is the match finder of LZ77 as gzip has it: a position knows the one before it that ends with the
same three tokens; how long the match is shows by comparing backwards, and how often something followed by
walking the chain. Measured on 30,000 tokens with Zipf frequencies, two shared cores: 14 ms and 3.4 MB; a
suffix automaton of dicts, which finds the same longest matches, took 40 ms and would have to be built anew
where a text is cut.
"""

from array import array
from collections.abc import Iterator, Sequence

SPAN = 3
"""Shorter matches are too weak to draft from."""
LONGEST = 32
"""Lengths of matches are counted up to here: beyond, they say nothing more."""


class NgramIndex:
    """One growing text of token ids below 2**21, with its chains. About 110 bytes a token."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = array("i")
        self._before = array("i")
        self._last: dict[int, int] = {}
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        start = max(0, len(self.tokens) - SPAN + 1)
        self.tokens.extend(tokens)
        text, before, last = self.tokens[start:], self._before, self._last
        before.extend([-1] * (min(SPAN - 1, len(self.tokens)) - len(before)))
        position = len(before)
        for a, b, c in zip(text, text[1:], text[2:], strict=False):
            key = a << 42 ^ b << 21 ^ c
            before.append(last.get(key, -1))
            last[key] = position
            position += 1

    def copy(self) -> "NgramIndex":
        """An independent index of the same text, in a fraction of the time that taking it took."""
        twin = NgramIndex()
        twin.tokens, twin._before, twin._last = self.tokens[:], self._before[:], self._last.copy()
        return twin

    def ends(self, context: Sequence[int], most: int) -> Iterator[int]:
        """Positions that end with the last SPAN tokens of `context`, the latest first, `most` at most;
        the end of the text itself is left out, because nothing follows it."""
        if len(context) < SPAN:
            return
        position = self._last.get(context[-3] << 42 ^ context[-2] << 21 ^ context[-1], -1)
        if position == len(self.tokens) - 1 and position >= 0:
            position = self._before[position]
        while position >= 0 and most > 0:
            yield position
            position = self._before[position]
            most -= 1

    def matched(self, context: Sequence[int], position: int) -> int:
        """How many last tokens of `context` equal those up to and with `position`, LONGEST at most."""
        tokens = self.tokens
        most = min(LONGEST, len(context), position + 1)
        length = 0
        while length < most and context[-1 - length] == tokens[position - length]:
            length += 1
        return length


class EarlierTexts:
    """What was said before under each salt, bounded. Nothing of one salt is ever seen under another, because
    the speed of an answer would tell of it.

    A salt has two generations: when the young one is full it becomes the old one, and the oldest is
    forgotten; so nothing is ever rebuilt. Salts that were not used for longest go first.
    """

    def __init__(self, salts: int = 16, tokens_per_salt: int = 65_536) -> None:
        self._salts = salts
        self._generation_tokens = max(1, tokens_per_salt // 2)
        self._kept: dict[str, tuple[NgramIndex, ...]] = {}

    def add(self, salt: str, tokens: Sequence[int]) -> None:
        """Remember a text, of which the end is kept if it is longer than a generation."""
        tokens = tokens[-self._generation_tokens :]
        generations = self._kept.pop(salt, ()) or (NgramIndex(),)
        if len(generations[0]) + len(tokens) >= self._generation_tokens and len(generations[0]):
            generations = (NgramIndex(), generations[0])
        young = generations[0]
        if len(young):
            young.extend((-1,))
        young.extend(tokens)
        self._kept[salt] = generations
        while len(self._kept) > self._salts:
            del self._kept[next(iter(self._kept))]

    def of(self, salt: str) -> tuple[NgramIndex, ...]:
        """The texts of this salt, the younger first. They may still grow; -1 stands between texts."""
        generations = self._kept.pop(salt, ())
        if generations:
            self._kept[salt] = generations
        return generations
