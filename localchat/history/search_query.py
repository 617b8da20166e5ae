"""Parses search queries, segments text for the index, and cuts snippets.

The index splits text at everything except letters and digits. Scripts without spaces between words (Chinese,
Japanese, Thai, Lao, Khmer, Burmese) would become one long word, so each of their characters is a word, in the
index and in queries, where adjacent characters must stay adjacent.

All words of a query must occur, each as a word or the start of one. Text in double quotes must occur exactly,
or as the start of a word if the closing quote is missing. Any text is a valid query.
"""

import re
import unicodedata
from functools import cache
from typing import Final, NamedTuple

_UNSPACED: Final = (
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff]"
)
_PART: Final = re.compile(r'"([^"]*)("?)|([^\s"]+)')
_FOLDED_CHARACTERS: Final = 200_000
"""Characters of a text that are searched without accents if nothing else matches."""
_CHARACTERS_BEFORE = 40
_CHARACTERS_AFTER = 120


class Query(NamedTuple):
    """A parsed query. LIKE patterns use a backslash as the escape character."""

    match: str
    """FTS5 expression, empty if no part has a letter or digit."""
    like: tuple[str, ...]
    """Patterns that the text must match too."""
    plain: tuple[str, ...]
    """Patterns equivalent to the query, for text outside the index."""
    parts: tuple[str, ...]
    """Words and phrases to mark in results."""


class Snippet(NamedTuple):
    """A line of text around a match."""

    text: str
    marks: tuple[tuple[int, int], ...]
    """(start, end) of each match, in characters."""


def segmented(text: str) -> str:
    """Separate the characters of scripts without spaces, for the index.

    A change here requires a migration that rebuilds the index, because a contentless index needs the inserted
    words to delete a text.
    """
    return _unspaced().sub(r" \g<0> ", text)


@cache
def _unspaced() -> re.Pattern[str]:
    # Compile it at the first use. It takes 3 ms, which would delay opening the history.
    return re.compile(_UNSPACED)


def parse(text: str) -> Query:
    """Parse a query. A blank query has no `parts`."""
    match = []
    like = []
    plain = []
    parts = []
    # Search for quotes themselves if there is no other text.
    groups = _PART.findall(text) if text.strip(' "') else [("", "", text)]
    for quoted, closing_quote, unquoted in groups:
        part = " ".join((quoted or unquoted).split())
        if not part:
            continue
        parts.append(part)
        pattern = f"%{_escaped(part)}%"
        plain.append(pattern)
        has_words = any(letter.isalnum() for letter in part)
        if has_words:
            # A part with letters contains no quotes.
            prefix_mark = "*" if part[-1].isalnum() and not closing_quote else ""
            match.append(f'"{segmented(part)}"{prefix_mark}')
        if not has_words or (unquoted and part.isascii() and not part.isalnum()):
            like.append(pattern)
    return Query(" ".join(match), tuple(like), tuple(plain), tuple(parts))


def _escaped(part: str) -> str:
    return re.sub(r"([\\%_])", r"\\\1", part)


def snippet(text: str, parts: tuple[str, ...]) -> Snippet:
    """Return the text around the first match on one line.

    Without a match, return the start of the text.
    """
    position = match_start(text, parts) or 0
    start = max(0, position - _CHARACTERS_BEFORE)
    end = min(len(text), position + _CHARACTERS_AFTER)
    line = " ".join(text[start:end].split())
    if start:
        line = f"…{line}"
    if end < len(text):
        line = f"{line}…"
    return Snippet(line, tuple(sorted(_spans(line, parts))))


def match_start(text: str, parts: tuple[str, ...]) -> int | None:
    """Return the position of the first match. None without a match."""
    return min((start for start, _ in _spans(text, parts)), default=None)


def _spans(text: str, parts: tuple[str, ...]) -> set[tuple[int, int]]:
    """Return (start, end) of the first match of each part."""
    spans = (_find(text, part) for part in parts)
    return {span for span in spans if span is not None}


def _find(text: str, part: str) -> tuple[int, int] | None:
    pattern = re.escape(part).replace(r"\ ", r"\s+")
    # The index finds starts of words. Scripts without spaces have them anywhere.
    for start in (r"(?<!\w)", ""):
        if match := re.search(start + pattern, text, re.IGNORECASE):
            return match.span()
    position = _folded(text[:_FOLDED_CHARACTERS]).find(_folded(part))
    if position < 0:
        return None
    return position, position + len(part)


def _folded(text: str) -> str:
    """Remove accents and case without changing the number of characters."""
    return "".join(unicodedata.normalize("NFD", letter)[0].lower()[0] for letter in text)
