"""Parses search queries, segments text for the index, and cuts snippets.

The index splits text at whatever is not a letter or digit. Scripts without spaces between words (Chinese,
Japanese, Thai, Lao, Khmer, Burmese) would become one long word, so each of their characters is a word, in the
index and in a query, where neighbours must stay neighbours. A query is words that must all occur, each as the
beginning of a word; text in double quotes must occur as it is (as a beginning while the second quote is
missing). Any text is a valid query.
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
"""Searched letter by letter in a text where only accents hide a match."""
_BEFORE = 40
_AFTER = 120


class Query(NamedTuple):
    """A parsed query. LIKE patterns escape with a backslash."""

    match: str
    """An FTS5 expression; empty where no part holds a letter or digit."""
    like: tuple[str, ...]
    """Patterns that the text must match as well."""
    plain: tuple[str, ...]
    """Patterns that stand for the whole query where text is not in the index."""
    parts: tuple[str, ...]
    """The words and phrases, to mark them in results."""


class Snippet(NamedTuple):
    """One line of text around a match."""

    text: str
    marks: tuple[tuple[int, int], ...]
    """(start, end) characters of the text that match."""


def segmented(text: str) -> str:
    """Separate the characters of scripts without spaces, for the index.

    A change here needs a migration that rebuilds the index: a contentless index deletes a text only when given
    the same words again.
    """
    return _unspaced().sub(r" \g<0> ", text)


@cache
def _unspaced() -> re.Pattern[str]:
    # Compiled when a text is indexed: it takes 3 ms, which opening the history need not wait for.
    return re.compile(_UNSPACED)


def parse(text: str) -> Query:
    """Parse a query; one without a searchable sign has no `parts`."""
    match = []
    like = []
    plain = []
    parts = []
    found = _PART.findall(text) if text.strip(' "') else [("", "", text)]
    for quoted, closed, bare in found:
        part = " ".join((quoted or bare).split())
        if not part:
            continue
        parts.append(part)
        pattern = f"%{_escaped(part)}%"
        plain.append(pattern)
        wordy = any(letter.isalnum() for letter in part)
        if wordy:
            beginning = "*" if part[-1].isalnum() and not closed else ""
            match.append(f'"{segmented(part)}"{beginning}')  # no part with letters holds a quote
        if not wordy or (bare and part.isascii() and not part.isalnum()):
            like.append(pattern)
    return Query(" ".join(match), tuple(like), tuple(plain), tuple(parts))


def _escaped(part: str) -> str:
    return re.sub(r"([\\%_])", r"\\\1", part)


def snippet(text: str, parts: tuple[str, ...]) -> Snippet:
    """The text around the first match, on one line; the beginning of the text where nothing matches."""
    found = [place for part in parts if (place := _find(text, part)) is not None]
    at = min(found)[0] if found else 0
    start = max(0, at - _BEFORE)
    end = min(len(text), at + _AFTER)
    line = " ".join(text[start:end].split())
    line = f"{'…' if start else ''}{line}{'…' if end < len(text) else ''}"
    marks = {place for part in parts if (place := _find(line, part)) is not None}
    return Snippet(line, tuple(sorted(marks)))


def _find(text: str, part: str) -> tuple[int, int] | None:
    if found := re.search(re.escape(part).replace(r"\ ", r"\s+"), text, re.IGNORECASE):
        return found.span()
    at = _folded(text[:_FOLDED_CHARACTERS]).find(_folded(part))
    return (at, at + len(part)) if at >= 0 else None


def _folded(text: str) -> str:
    """Without accents and case, character for character."""
    return "".join(unicodedata.normalize("NFD", sign)[0].lower()[0] for sign in text)
