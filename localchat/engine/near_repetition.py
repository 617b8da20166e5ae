"""Loops without an exact period: repeats that differ in a number.

Lists, tables, code and songs count too, so a loop requires a long run of prose.
"""

import re
from typing import Final

import msgspec

from localchat.engine.periods import periods, run_length

_MIN_COUNTED_REPEATS: Final = 12
_MIN_COUNTED_CHARS: Final = 1200
"""Shortest run of repeats that differ in one number."""
_MIN_COUNTED_LETTERS: Final = 32
"""Letters per repeat. Shorter repeats are numbered lists."""
_MAX_SYMBOL_SHARE: Final = 0.03
"""Largest share of symbols of code, markup and tables in prose."""

_UNITS: Final = (
    "one|two|three|four|five|six|seven|eight|nine"
    "|first|second|third|fourth|fifth|sixth|seventh|eighth|ninth"
)
_NUMBER: Final = re.compile(
    r"\d+(?:(?:st|nd|rd|th)\b)?"
    r"|\b(?:twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety)(?:[- ](?:" + _UNITS + r"))?\b"
    r"|\b(?:" + _UNITS + r"|ten|eleven|twelve|\w+teen|tenth|eleventh|twelfth|\w+teenth|\w+tieth)\b"
    # Roman numerals are in capitals. The word "I" is not a numeral.
    r"|\b(?!I\b)[IVXLC]+\b|(?<=[a-z] )I(?=[,.:;])",
)
_SYMBOL: Final = re.compile(r"[(){}\[\]<>|=;_\\/\"`$&@^~+*#%]")
_WORD: Final = re.compile(r"\w+")
_PROBE_CHARS: Final = 128
"""Characters at the end of a text whose words are looked up first."""
_MIN_PROBE_COUNT: Final = _MIN_COUNTED_REPEATS // 2
"""Occurrences of a word near the end of a counting loop. The last repeats may be shorter than the probe."""


class NearLoop(msgspec.Struct, frozen=True):
    """Repeats from `start` to the end of a text. Only the first `kept` characters are worth keeping."""

    piece: str
    times: int
    start: int
    kept: int


def recount(text: str) -> NearLoop | None:
    """Find prose at the end of a text whose repeats differ in one number only."""
    if _ends_with_rare_word(text):
        return None
    numbers = list(_NUMBER.finditer(text))
    if len(numbers) < _MIN_COUNTED_REPEATS:
        return None
    masked, offsets = _masked(text, numbers)
    for period in periods(masked):
        run = run_length(masked, period)
        times = run // period
        piece = masked[-period:]
        if times < _MIN_COUNTED_REPEATS or "\0" not in piece:
            continue
        start = offsets[len(masked) - times * period]
        if (
            not _has_words(piece)
            or len(text) - start < _MIN_COUNTED_CHARS
            or not _is_prose(text[start:])
        ):
            continue
        values = [number[0] for number in numbers if number.start() >= start]
        per_piece = piece.count("\0")
        if _changing([values[column::per_piece] for column in range(per_piece)]) <= 1:
            kept = offsets[len(masked) - (times - 1) * period] - start
            return NearLoop(text[start : start + kept], times, start, kept)
    return None


def _ends_with_rare_word(text: str) -> bool:
    """Return whether a rare word, other than a number, ends a text.

    Such a text cannot end with a counting loop, whose words occur in every repeat.
    """
    # The first one may be cut off.
    terms = _WORD.findall(text[-_PROBE_CHARS:])[1:]
    return any(
        text.count(term) < _MIN_PROBE_COUNT
        for term in terms
        if term.isalpha() and term != "I" and not _NUMBER.search(term)
    )


def _masked(text: str, numbers: list[re.Match[str]]) -> tuple[str, list[int]]:
    """Replace each number by one character. Also return the offset of each character in `text`."""
    parts: list[str] = []
    offsets: list[int] = []
    end = 0
    for number in numbers:
        parts += (text[end : number.start()], "\0")
        offsets += range(end, number.start() + 1)
        end = number.end()
    offsets += range(end, len(text) + 1)
    return "".join(parts) + text[end:], offsets


def _changing(columns: list[list[str]]) -> int:
    """Return how many numbers change independently of each other. columns: each number in all repeats."""
    changing = set()
    for column in columns:
        if len(set(column)) == 1:
            continue
        digits = [re.match(r"\d+", number) for number in column]
        values = [int(match[0]) if match else None for match in digits]
        first = values[0]
        if first is None or None in values:
            changing.add(tuple(column[:_MIN_COUNTED_REPEATS]))
            continue
        steps = [value - first for value in values[:_MIN_COUNTED_REPEATS] if value is not None]
        if steps[-1] < 0:
            # A countdown ends by itself.
            return len(columns) + 1
        changing.add(tuple(map(str, steps)))
    return len(changing)


def _has_words(piece: str) -> bool:
    return sum(letter.isalpha() for letter in piece) >= _MIN_COUNTED_LETTERS


def _is_prose(text: str) -> bool:
    return len(_SYMBOL.findall(text)) <= _MAX_SYMBOL_SHARE * len(text)
