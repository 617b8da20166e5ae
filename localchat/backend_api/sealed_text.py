"""Untrusted text inside a prompt whose control tokens are recognized.

A seal is a few characters that occur nowhere else in the prompt. Before untrusted text is joined with markup,
a seal is inserted into everything that could become a control token. Control tokens of the joined prompt
without a seal are genuine. Text with a seal is tokenized as plain text.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

from localchat.backend_api.special_tokens import SpecialToken

_SEAL_ALPHABET = "".join(map(chr, range(0x4DC0, 0x4E00)))
"""Hexagrams: printable, caseless, unchanged by Unicode normalization, and rare in text."""
_SEAL_LENGTH = 4
_BRACKETS = re.compile(r"^\W+|\W+$")
"""Characters around the name in a marker."""


class TextPart(NamedTuple):
    """A piece of a prompt that is tokenized on its own."""

    text: str
    special: bool
    """Whether control tokens are recognized."""
    joins: bool = False
    """Whether it follows the previous part without a control token between them."""


class PromptSplitter:
    """Splits a rendered prompt into trusted parts and plain text."""

    def __init__(self, tokens: Sequence[SpecialToken], structural: Iterable[str] = ()) -> None:
        """tokens: special tokens of the vocabulary. structural: user-defined tokens that are markers too."""
        control = {token.text for token in tokens if token.control and token.text.strip()}
        self._user_defined = frozenset(structural) - control
        self._boundaries = TextFinder(control | self._user_defined)
        self._stripping = {token.text: token for token in tokens if token.lstrip or token.rstrip}

    def split(self, rendered: str, seal: str) -> tuple[str, tuple[TextPart, ...]]:
        """Return a rendered prompt without its seals, and its parts.

        The parts are empty if the whole prompt is trusted.
        """
        if not seal:
            return rendered, ()
        seals = re.compile(f"{seal}|{re.escape(json.dumps(seal)[1:-1])}")
        parts: list[TextPart] = []
        trusted = ""
        before = ""
        for plain, boundary in self._boundaries.pieces(rendered):
            text = seals.sub("", plain)
            if text != plain and self._boundaries.search(text):
                head, body, tail = self._stripped(before, text, boundary)
                if trusted or head:
                    parts.append(TextPart(trusted + head, special=True))
                parts += self._plain_parts(body)
                trusted = tail + boundary
            else:
                trusted += text + boundary
            before = boundary
        clean = seals.sub("", rendered)
        if not parts:
            return clean, ()
        if trusted:
            parts.append(TextPart(trusted, special=True))
        return clean, tuple(parts)

    def _stripped(self, before: str, text: str, after: str) -> tuple[str, str, str]:
        """Split off the white space that the control tokens on either side remove."""
        head = tail = ""
        previous = self._stripping.get(before)
        if previous is not None and previous.rstrip:
            body = text.lstrip()
            head = text[: len(text) - len(body)]
            text = body
        following = self._stripping.get(after)
        if following is not None and following.lstrip:
            body = text.rstrip()
            tail = text[len(body) :]
            text = body
        return head, text, tail

    def _plain_parts(self, text: str) -> Iterator[TextPart]:
        """Split plain text inside its user-defined tokens, which tokenizers would recognize anywhere."""
        start = 0
        for position, marker in self._boundaries.matches(text):
            if marker in self._user_defined:
                yield TextPart(text[start : position + 1], special=False, joins=start > 0)
                start = position + 1
        yield TextPart(text[start:], special=False, joins=start > 0)


class Sealer:
    """Inserts a seal wherever a marker could start or continue."""

    def __init__(self, markers: Iterable[str], *, framed: bool = False) -> None:
        """framed: the template may write the brackets of a marker around a whole text, as in `<NAME>`."""
        texts = sorted(markers)
        self._names: set[str] = set()
        if framed:
            self._names = {_BRACKETS.sub("", text).lower() for text in texts}
        patterns = []
        second_characters: dict[str, set[str]] = {}
        for text in texts:
            if text[0].isalnum() or text[0].isspace() or len(text) == 1:
                patterns.append(f"{re.escape(text[0])}(?={re.escape(text[1:])})")
            else:
                second_characters.setdefault(text[0], set()).add(text[1])
        # A template may remove or append characters after the first one, and JSON may escape them. So the
        # start of a marker suffices.
        for first, seconds in second_characters.items():
            choices = "".join(map(re.escape, sorted(seconds | {first})))
            patterns.append(f"{re.escape(first)}(?=[{choices}\\s\\\\]|\\Z)")
        patterns += [f"\\\\u{ord(first):04x}" for first in second_characters]
        self._pattern = re.compile("|".join(patterns) or "(?!)", re.IGNORECASE)
        self._endings: dict[str, set[str]] = {}
        for text in texts:
            for ending in (text[1:], text[2:]):
                if ending and not ending[0].isalnum() and not text[0].isalnum():
                    self._endings.setdefault(ending[0], set()).add(ending)

    def affects(self, text: str) -> bool:
        """Whether the text must be sealed."""
        if not text:
            return False
        return self._is_name(text) or bool(self._pattern.search(text)) or self._continues(text)

    def seal(self, text: str, seal: str) -> str:
        """Return the text with a seal in every marker and possible start of one."""
        if not text:
            return text
        if self._is_name(text) or self._continues(text):
            end = len(text) - len(text.lstrip()) + 1
            first = self._pattern.sub(rf"\g<0>{seal}", text[:end])
            return first + seal + self.seal(text[end:], seal)
        return self._pattern.sub(rf"\g<0>{seal}", text)

    def _is_name(self, text: str) -> bool:
        """Whether the text is a marker without some of its brackets."""
        return bool(self._names) and _BRACKETS.sub("", text).lower() in self._names

    def _continues(self, text: str) -> bool:
        """Whether the text completes a marker if the template writes the marker's first characters."""
        text = text.lstrip()
        endings = self._endings.get(text[:1], ())
        return any(text.startswith(ending) or ending.startswith(text) for ending in endings)


class TextFinder:
    """Finds given texts in a text. If several start at one position, the longest matches.

    A regular expression would try thousands of markers one by one in some vocabularies.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(texts)
        self._lengths = sorted({len(text) for text in self._texts}, reverse=True)
        firsts = sorted({text[0] for text in self._texts})
        first_pattern = "(?!)"
        if firsts:
            first_pattern = f"[{''.join(map(re.escape, firsts))}]"
        self._first = re.compile(first_pattern)

    def matches(self, text: str) -> Iterator[tuple[int, str]]:
        """Yield the position and text of each match, from left to right."""
        start = 0
        while (first := self._first.search(text, start)) is not None:
            position = first.start()
            slices = (text[position : position + length] for length in self._lengths)
            match = next((piece for piece in slices if piece in self._texts), "")
            if match:
                yield position, match
            start = position + max(1, len(match))

    def pieces(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield the text before each match with the match, then the remaining text."""
        start = 0
        for position, match in self.matches(text):
            yield text[start:position], match
            start = position + len(match)
        yield text[start:], ""

    def search(self, text: str) -> bool:
        return next(self.matches(text), None) is not None


def unused_seal(text: str) -> str:
    """Return a seal that does not occur in the text. Equal texts give equal seals."""
    content = text.encode("utf-8", "surrogatepass")
    escaped = text.lower()
    for attempt in count():
        digest = hashlib.blake2b(content, digest_size=_SEAL_LENGTH, key=b"%d" % attempt).digest()
        seal = "".join(_SEAL_ALPHABET[byte % len(_SEAL_ALPHABET)] for byte in digest)
        if seal not in text and json.dumps(seal)[1:-1] not in escaped:
            return seal
    raise AssertionError("unreachable")
