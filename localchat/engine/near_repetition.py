"""Loops without an exact period: repeats that only count on, and few phrases in varying order.

Lists, tables, code and songs repeat too, so both kinds need a long run of prose.
"""

import re
from collections import Counter
from typing import Final

import msgspec

from localchat.engine.periods import periods, run_length

_COUNTED_REPEATS: Final = 12
_COUNTED_CHARS: Final = 1200
"""Shortest run of repeats that differ in one number."""
_COUNTED_LETTERS: Final = 32
"""Letters that such a piece has at least: a shorter one is a list that counts."""
_STALE_WORDS: Final = 300
"""Words at the end whose phrases all occurred before."""
_STALE_FEW_WORDS: Final = 600
"""The same for a vocabulary of less than _FEW words."""
_FEW: Final = 15
_LEAST_VOCABULARY: Final = 4
"""Fewer words are coin flips, answers to yes or no, or a board."""
_PHRASE: Final = 4
"""Words of a phrase."""
_EARLIER: Final = 3
"""Times that a phrase occurred before the one at the end."""
_FRESH_SHARE: Final = 0.06
"""Share of other phrases that the words at the end may contain."""
_SYMBOL_SHARE: Final = 0.03
"""Share of symbols of code, markup and tables that prose may contain."""

_UNITS: Final = (
    "one|two|three|four|five|six|seven|eight|nine"
    "|first|second|third|fourth|fifth|sixth|seventh|eighth|ninth"
)
_NUMBER: Final = re.compile(
    r"\d+(?:st|nd|rd|th)?\b"
    r"|\b(?:twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety)(?:[- ](?:" + _UNITS + r"))?\b"
    r"|\b(?:" + _UNITS + r"|ten|eleven|twelve|\w+teen|tenth|eleventh|twelfth|\w+teenth|\w+tieth)\b"
    # Roman numerals are in capitals; the word "I" is none.
    r"|\b(?!I\b)[IVXLC]+\b|(?<=[a-z] )I(?=[,.:;])",
)
_SYMBOL: Final = re.compile(r"[(){}\[\]<>|=;_\\/\"`$&@^~+*#%]")
_WORD: Final = re.compile(r"\w+")
_MARKUP: Final = re.compile(r"<[^<>]*>")


class NearLoop(msgspec.Struct, frozen=True):
    """Repeats from `start` to the end of a text; the first `kept` characters are worth keeping."""

    piece: str
    times: int
    start: int
    kept: int


def recount(text: str) -> NearLoop | None:
    """Find prose at the end of a text whose repeats differ in one number only."""
    numbers = list(_NUMBER.finditer(text))
    if len(numbers) < _COUNTED_REPEATS:
        return None
    masked, places = _masked(text, numbers)
    for period in periods(masked):
        run = run_length(masked, period)
        times = run // period
        piece = masked[-period:]
        if times < _COUNTED_REPEATS or "\0" not in piece or not _has_words(piece):
            continue
        start = places[len(masked) - times * period]
        if len(text) - start < _COUNTED_CHARS or not _is_prose(text[start:]):
            continue
        inside = [number[0] for number in numbers if number.start() >= start]
        width = piece.count("\0")
        if _changing([inside[column::width] for column in range(width)]) <= 1:
            kept = places[len(masked) - (times - 1) * period] - start
            return NearLoop(text[start : start + kept], times, start, kept)
    return None


def stale_words(text: str, wanted: int = 0) -> NearLoop | None:
    """Find a long end of a text that has nothing but phrases from before.

    `wanted`: repeats that the prompt asks for.
    """
    words = list(_WORD.finditer(_MARKUP.sub(lambda tag: " " * len(tag[0]), text)))
    spoken = [word[0].casefold() for word in words]
    if len(words) < _STALE_WORDS + wanted:
        return None
    phrases = [tuple(spoken[at : at + _PHRASE]) for at in range(len(spoken) - _PHRASE + 1)]
    end = spoken[-_STALE_WORDS:]
    # A word that has just come up is no part of the loop.
    often = Counter(word for word in end if len(word) > 1 and word.isalpha())
    vocabulary = [word for word, times in often.items() if times >= _EARLIER]
    least = (_STALE_WORDS if len(vocabulary) >= _FEW else _STALE_FEW_WORDS) + wanted
    if len(phrases) < least or len(vocabulary) < _LEAST_VOCABULARY:
        return None
    if 2 * sum(word.isalpha() for word in end) < len(end):
        return None
    counts = Counter(phrases[:-least])
    fresh = 0
    for phrase in phrases[-least:]:
        fresh += counts[phrase] < _EARLIER
        if fresh > _FRESH_SHARE * least:
            return None
        counts[phrase] += 1
    start = words[len(phrases) - least].start()
    if not _is_prose(text[start:]):
        return None
    (phrase, times), *_ = Counter(phrases[-least:]).most_common(1)
    first = phrases.index(phrase, len(phrases) - least)
    piece = text[words[first].start() : words[first + _PHRASE - 1].end()]
    return NearLoop(piece, times, start, 0)


def _masked(text: str, numbers: list[re.Match[str]]) -> tuple[str, list[int]]:
    """Replace each number by one character. Returns also where each character was."""
    parts: list[str] = []
    places: list[int] = []
    at = 0
    for number in numbers:
        parts += (text[at : number.start()], "\0")
        places += range(at, number.start() + 1)
        at = number.end()
    places += range(at, len(text) + 1)
    return "".join(parts) + text[at:], places


def _changing(columns: list[list[str]]) -> int:
    """Return how many numbers change independently of each other."""
    changing = set()
    for column in columns:
        if len(set(column)) == 1:
            continue
        digits = [re.match(r"\d+", number) for number in column]
        values = [int(match[0]) if match else None for match in digits]
        first = values[0]
        if first is None or None in values:
            changing.add(tuple(column[:_COUNTED_REPEATS]))
            continue
        steps = [value - first for value in values[:_COUNTED_REPEATS] if value is not None]
        if steps[-1] < 0:
            # A countdown ends by itself.
            return len(columns) + 1
        changing.add(tuple(map(str, steps)))
    return len(changing)


def _has_words(piece: str) -> bool:
    return sum(letter.isalpha() for letter in piece) >= _COUNTED_LETTERS


def _is_prose(text: str) -> bool:
    return len(_SYMBOL.findall(text)) <= _SYMBOL_SHARE * len(text)
