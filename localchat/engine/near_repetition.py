"""Loops without an exact period: repeats that differ in a number, and a few phrases in varying order.

Lists, tables, code and songs repeat too, so both kinds require a long run of prose.
"""

import re
from collections import Counter
from typing import Final

import msgspec

from localchat.engine.periods import periods, run_length

_MIN_COUNTED_REPEATS: Final = 12
_MIN_COUNTED_CHARS: Final = 1200
"""Shortest run of repeats that differ in one number."""
_MIN_COUNTED_LETTERS: Final = 32
"""Letters per repeat. Shorter repeats are numbered lists."""
_MIN_COUNTED_KEYS: Final = 60
_MIN_COUNTED_KEYS_CHARS: Final = 1200
_MIN_LONG_KEYS_CHARS: Final = 5000
"""Shortest run of JSON keys that differ in one number, with equal values: `"item1": {}, "item2": {}`.

Fewer keys count if they are long.
"""
_MIN_COUNTED_STRINGS: Final = 80
_MIN_COUNTED_STRINGS_CHARS: Final = 1200
"""Shortest run of items of a JSON list that differ in one number: `"item 1", "item 2"`."""
_STALE_WORDS: Final = 300
"""Words at the end of a text whose phrases all occurred before."""
_STALE_WORDS_SMALL: Final = 600
"""Like _STALE_WORDS, for a small vocabulary."""
_SMALL_VOCABULARY: Final = 15
_MIN_VOCABULARY: Final = 4
"""Texts with fewer words are coin flips, answers to yes-or-no questions, or game boards."""
_PHRASE_WORDS: Final = 4
_STALE_COUNT: Final = 3
"""Earlier occurrences that make a phrase stale."""
_MAX_FRESH_SHARE: Final = 0.06
"""Largest share of phrases in a loop that are not stale."""
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
_COUNTED_KEY: Final = re.compile(r'"[^"\n]*\0[^"\n]*"\s*:')
_COUNTED_STRING: Final = re.compile(r'"[^"\n]*[^\W\d_][^"\n]*\0[^"\n]*",\s*')
"""Key and string of JSON with a masked number. A string has a letter before it."""
_WORD: Final = re.compile(r"\w+")
_BETWEEN_WORDS: Final = {code: " " for code in range(128) if not _WORD.match(chr(code))}
_MARKUP: Final = re.compile(r"<[^<>]*>")
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
    """Find an end of prose or JSON whose repeats differ in one number only.

    Objects of a JSON list do not count, because they may be many records. Numbered keys and strings do.
    """
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
        if not _is_counted_json(piece, times, len(text) - start) and (
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


def stale_words(text: str, wanted: int = 0) -> NearLoop | None:
    """Find a long end of a text that contains only phrases from before.

    wanted: repeats that the prompt asks for.
    """
    plain = _MARKUP.sub(lambda tag: " " * len(tag[0]), text)
    words = _words(plain)
    if len(words) < _STALE_WORDS + wanted:
        return None
    end = words[-_STALE_WORDS:]
    # A word without enough earlier occurrences makes its phrase fresh. This ends nearly every search.
    occurrences = Counter(words)
    starts = map(occurrences.__getitem__, end[: 1 - _PHRASE_WORDS])
    rare_starts = sum(count <= _STALE_COUNT for count in starts)
    if rare_starts > _MAX_FRESH_SHARE * (_STALE_WORDS_SMALL + wanted):
        return None
    # Rare words are not part of a loop.
    counts = Counter(word for word in end if len(word) > 1 and word.isalpha())
    vocabulary = sum(times >= _STALE_COUNT for times in counts.values())
    if vocabulary < _MIN_VOCABULARY or 2 * sum(word.isalpha() for word in end) < len(end):
        return None
    length = wanted + (_STALE_WORDS if vocabulary >= _SMALL_VOCABULARY else _STALE_WORDS_SMALL)
    phrases = [
        tuple(words[start : start + _PHRASE_WORDS])
        for start in range(len(words) - _PHRASE_WORDS + 1)
    ]
    if len(phrases) < length or not _is_stale(phrases[:-length], phrases[-length:]):
        return None
    matches = list(_WORD.finditer(plain))
    start = matches[len(phrases) - length].start()
    if not _is_prose(text[start:]):
        return None
    (phrase, times), *_ = Counter(phrases[-length:]).most_common(1)
    first = phrases.index(phrase, len(phrases) - length)
    piece = text[matches[first].start() : matches[first + _PHRASE_WORDS - 1].end()]
    return NearLoop(piece, times, start, 0)


def _words(text: str) -> list[str]:
    """Return the words of a text, without case."""
    if text.isascii():
        # Three times as fast as the pattern, which matches the same words.
        return text.lower().translate(_BETWEEN_WORDS).split()
    return list(map(str.casefold, _WORD.findall(text)))


def _is_stale(earlier: list[tuple[str, ...]], phrases: list[tuple[str, ...]]) -> bool:
    """Whether nearly all phrases occurred several times before."""
    counts = Counter(earlier)
    fresh = 0
    for phrase in phrases:
        fresh += counts[phrase] < _STALE_COUNT
        if fresh > _MAX_FRESH_SHARE * len(phrases):
            return False
        counts[phrase] += 1
    return True


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


def _is_counted_json(piece: str, times: int, chars: int) -> bool:
    """Return True for many pieces that are counted keys or strings of JSON."""
    twice = piece * 2  # a piece may begin within a key
    if _COUNTED_KEY.search(twice):
        is_long = chars >= _MIN_LONG_KEYS_CHARS
        return is_long or (times >= _MIN_COUNTED_KEYS and chars >= _MIN_COUNTED_KEYS_CHARS)
    match = _COUNTED_STRING.search(twice)
    if match is None or len(match[0]) != len(piece):
        return False
    return times >= _MIN_COUNTED_STRINGS and chars >= _MIN_COUNTED_STRINGS_CHARS


def _has_words(piece: str) -> bool:
    return sum(letter.isalpha() for letter in piece) >= _MIN_COUNTED_LETTERS


def _is_prose(text: str) -> bool:
    return len(_SYMBOL.findall(text)) <= _MAX_SYMBOL_SHARE * len(text)
