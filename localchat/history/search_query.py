"""Words of a search: what the index holds, what a query means, and where it was found.

The index splits text at what is no letter or digit. Scripts that write no space between words (Chinese,
Japanese, Thai, Lao, Khmer, Burmese) would become one long word, so each of their characters is a word here,
in the index and in a query, where neighbours must stay neighbours. A query is words that must all occur,
each as the beginning of a word; text in double quotes must occur as it is (still as a beginning while the
second quote is missing). No text is a wrong query.
"""

import re
import unicodedata
from typing import Final, NamedTuple

_UNSPACED: Final = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff]"
)
_PART: Final = re.compile(r'"([^"]*)("?)|([^\s"]+)')
_FOLDED_CHARACTERS: Final = 200_000
"""How far into a text a match is looked for letter by letter, when only accents keep it from being found."""
_BEFORE, _AFTER = 40, 120


class Query(NamedTuple):
    """match: an expression of FTS5, empty where no part holds a letter or digit. like: patterns (escape
    sign backslash) that the text must match besides. plain: patterns that stand for the whole query where
    text is not in the index. parts: what the user looks for, to mark it."""

    match: str
    like: tuple[str, ...]
    plain: tuple[str, ...]
    parts: tuple[str, ...]


class Snippet(NamedTuple):
    """One line of text around a match; marks: (start, end) characters in it."""

    text: str
    marks: tuple[tuple[int, int], ...]


def segmented(text: str) -> str:
    """The text as the index takes it. Another way of doing it needs a migration that builds the index anew:
    it forgets a text only when it is told the same words again."""
    return _UNSPACED.sub(r" \g<0> ", text)


def parse(text: str) -> Query:
    """What `text` asks for. Empty `parts`: nothing."""
    match, like, plain, parts = [], [], [], []
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
    """The surroundings of the first match, on one line; the beginning of the text where there is none."""
    found = [place for part in parts if (place := _find(text, part)) is not None]
    at = min(found)[0] if found else 0
    start, end = max(0, at - _BEFORE), min(len(text), at + _AFTER)
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
