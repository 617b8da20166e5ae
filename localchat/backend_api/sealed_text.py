"""Text of strangers inside a prompt whose control tokens are recognized.

A seal, a few characters that occur nowhere else, is inserted into everything in a text that could become a
control token, before the text is joined with markup. In the joined prompt the tokens without a seal are
genuine. The text around the others is tokenized as plain text.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

from localchat.backend_api.special_tokens import SpecialToken

_SEAL_ALPHABET = "".join(map(chr, range(0x4DC0, 0x4E00)))
"""Hexagrams: printable, without case, unchanged by normalization, and rare in text."""
_SEAL_LENGTH = 4


class TextPart(NamedTuple):
    """Piece of a prompt that is tokenized by itself."""

    text: str
    special: bool
    """Control tokens are recognized."""
    joins: bool = False
    """True if no control token separates it from the part before."""


class PromptSplitter:
    """Splits a prompt where markers in it were sealed.

    tokens: special tokens of the vocabulary. structural: user-defined tokens that count as markers too.
    """

    def __init__(self, tokens: Sequence[SpecialToken], structural: Iterable[str] = ()) -> None:
        control = {token.text for token in tokens if token.control and token.text.strip()}
        self._user_defined = frozenset(structural) - control
        self._boundaries = TextFinder(control | self._user_defined)
        self._stripping = {token.text: token for token in tokens if token.lstrip or token.rstrip}

    def split(self, rendered: str, seal: str) -> tuple[str, tuple[TextPart, ...]]:
        """Remove the seals of a rendered prompt, and split it into parts.

        Returns no parts if all of the prompt is trusted.
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
        """Split off the white space that the control tokens at either side drop."""
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
        """Split a plain text inside the user-defined tokens in it, which tokenizers always recognize."""
        start = 0
        for position, found in self._boundaries.matches(text):
            if found in self._user_defined:
                yield TextPart(text[start : position + 1], special=False, joins=start > 0)
                start = position + 1
        yield TextPart(text[start:], special=False, joins=start > 0)


class Sealer:
    """Inserts a seal wherever one of some markers could begin or go on."""

    def __init__(self, markers: Iterable[str]) -> None:
        texts = sorted(markers)
        following: dict[str, set[str]] = {}
        whole = []
        for text in texts:
            if text[0].isalnum() or text[0].isspace() or len(text) == 1:
                whole.append(f"{re.escape(text[0])}(?={re.escape(text[1:])})")
            else:
                following.setdefault(text[0], set()).add(text[1])
        # A template may remove or append what follows the first character, and JSON may escape it, hence
        # more than whole markers.
        starts = [
            f"{re.escape(first)}(?=[{''.join(map(re.escape, sorted(seconds | {first})))}\\s\\\\]|\\Z)"
            for first, seconds in following.items()
        ]
        starts += [f"\\\\u{ord(first):04x}" for first in following]
        self._pattern = re.compile("|".join((*whole, *starts)) or "(?!)", re.IGNORECASE)
        self._rests: dict[str, set[str]] = {}
        for text in texts:
            for rest in (text[1:], text[2:]):
                if rest and not rest[0].isalnum() and not text[0].isalnum():
                    self._rests.setdefault(rest[0], set()).add(rest)

    def affects(self, text: str) -> bool:
        """Whether the text must be sealed."""
        return bool(text) and (bool(self._pattern.search(text)) or self._continues(text))

    def seal(self, text: str, seal: str) -> str:
        """Return the text with a seal in every marker, and after everything that could begin one."""
        if not text:
            return text
        if self._continues(text):
            start = len(text) - len(text.lstrip()) + 1
            return (
                self._pattern.sub(rf"\g<0>{seal}", text[:start])
                + seal
                + self.seal(text[start:], seal)
            )
        return self._pattern.sub(rf"\g<0>{seal}", text)

    def _continues(self, text: str) -> bool:
        """Whether the text would complete a marker whose first characters a template writes before it."""
        bare = text.lstrip()
        rests = self._rests.get(bare[:1], ())
        return any(bare.startswith(rest) or rest.startswith(bare) for rest in rests)


class TextFinder:
    """Finds given texts in a text, the longest of those that begin together."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(texts)
        self._lengths = sorted({len(text) for text in self._texts}, reverse=True)
        firsts = sorted({text[0] for text in self._texts})
        self._first = re.compile(f"[{''.join(map(re.escape, firsts))}]" if firsts else "(?!)")

    def matches(self, text: str) -> Iterator[tuple[int, str]]:
        """Yield position and text of each match, from left to right."""
        start = 0
        while (candidate := self._first.search(text, start)) is not None:
            position = candidate.start()
            slices = (text[position : position + length] for length in self._lengths)
            match = next((piece for piece in slices if piece in self._texts), "")
            if match:
                yield position, match
            start = position + max(1, len(match))

    def pieces(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield the text before each match with that match, and the rest with an empty match."""
        start = 0
        for position, match in self.matches(text):
            yield text[start:position], match
            start = position + len(match)
        yield text[start:], ""

    def search(self, text: str) -> bool:
        return next(self.matches(text), None) is not None


def unused_seal(text: str) -> str:
    """Return a seal that does not occur in the text. It follows from the text, so prompts are reproducible."""
    content = text.encode("utf-8", "surrogatepass")
    escaped = text.lower()
    for attempt in count():
        digest = hashlib.blake2b(content, digest_size=_SEAL_LENGTH, key=b"%d" % attempt).digest()
        seal = "".join(_SEAL_ALPHABET[byte % len(_SEAL_ALPHABET)] for byte in digest)
        if seal not in text and json.dumps(seal)[1:-1] not in escaped:
            return seal
    raise AssertionError("unreachable")
