"""Inline Markdown: markdown-it's inline tokens as lines of pieces."""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from localchat.sanitize import sanitize_line
from localchat.tui.transcript.markdown.parser import inline
from localchat.tui.transcript.markdown.rows import PLAIN, Look, Piece

if TYPE_CHECKING:
    from markdown_it.token import Token

_URL: Final = re.compile(r"https?://[!#-;=?-\[\]_a-z~]+", re.IGNORECASE)
_MAX_CACHED: Final = 2000
_WRAPPED_CELLS: Final = range(60, 101)
_SENTENCE_ENDS: Final = (".", ":", ";", "!", "?", "")
_TRAILING: Final = ".,;:!?'\""

Line = Sequence[Piece]


def web_link(target: str) -> str:
    """`target` if it is safe for a terminal and a browser, else an empty string."""
    if len(target) < 2048 and _URL.fullmatch(target):
        return target
    return ""


def inline_lines(content: str, base: Look = PLAIN) -> Sequence[Line]:
    """Lines of a paragraph. A single line end in the source stays one: models mean it.

    After a line of 60 to 100 characters inside a sentence it is wrapped prose, and becomes a space.
    """
    if len(content) <= _MAX_CACHED:
        return _read_cached(content, base)
    return _read(content, base)


def _read(content: str, base: Look) -> Sequence[Line]:
    tokens = inline(content)
    if tokens is None:
        return [[Piece(printable(line), base)] for line in content.split("\n")]
    return _Lines(base).read(tokens)


# A growing answer is laid out many times, with the same list items and table cells.
_read_cached = lru_cache(1024)(_read)


def printable(text: str) -> str:
    """Text of one line that is safe in a row. Needed after parsing: entities can bring control characters
    back."""
    return sanitize_line(text.replace("\t", "    "))


def add_text(line: list[Piece], text: str, look: Look) -> None:
    """Add text to a line. Text of the same look extends the last piece."""
    if not text:
        return
    text = printable(text)
    if line and line[-1].look == look:
        line[-1] = Piece(line[-1].text + text, look)
    else:
        line.append(Piece(text, look))


class _Lines:
    """Collects lines of pieces from tokens; the current look is a stack."""

    def __init__(self, base: Look) -> None:
        self.lines: list[list[Piece]] = [[]]
        self.looks = [base]
        self.targets: list[str] = []
        self._begun = 0  # characters of the last line before the current source line

    def read(self, tokens: "list[Token]") -> Sequence[Line]:
        for token in tokens:
            self._take(token)
        return self.lines

    def _take(self, token: "Token") -> None:
        look = self.looks[-1]
        match token.type:
            case "text":
                self._text(token.content, look)
            case "softbreak" if self._is_wrapped_prose():
                self._add(" ", look)
                self._begun = self._length()
            case "softbreak" | "hardbreak":
                self.lines.append([])
                self._begun = 0
            case "code_inline":
                self._add(token.content, look._replace(tint="code"))
            case "formula":
                self._formula(token.content, look)
            case "strong_open":
                self.looks.append(look._replace(bold=True))
            case "em_open":
                self.looks.append(look._replace(italic=True))
            case "s_open":
                self.looks.append(look._replace(strike=True))
            case "link_open":
                self._open_link(str(token.attrGet("href") or ""), look)
            case "image":
                self._image(token, look)
            case "link_close":
                self._close_link()
            case "strong_close" | "em_close" | "s_close":
                self.looks.pop()
            case _:
                self._add(token.content, look)

    def _formula(self, source: str, look: Look) -> None:
        from localchat.tui.transcript.markdown import (
            latex,  # tables that the first frame does not need
        )

        first, *later = latex.to_unicode(source).split("\n")
        self._add(first, look)
        for line in later:
            self.lines.append([])
            self._begun = 0
            self._add(line, look)

    def _length(self) -> int:
        return sum(len(piece.text) for piece in self.lines[-1])

    def _is_wrapped_prose(self) -> bool:
        line = self.lines[-1]
        inside = bool(line) and line[-1].text[-1:] not in _SENTENCE_ENDS
        return inside and self._length() - self._begun in _WRAPPED_CELLS

    def _open_link(self, target: str, look: Look) -> None:
        link = web_link(target)
        if link:
            self.targets.append("")
        else:
            self.targets.append(target)
        self.looks.append(_linked(look, link))

    def _close_link(self) -> None:
        self.looks.pop()
        target = self.targets.pop()
        if target:  # an unsafe link shows its target as text
            self._add(f" ({target})", self.looks[-1]._replace(tint="muted"))

    def _image(self, token: "Token", look: Look) -> None:
        target = str(token.attrGet("src") or "")
        link = web_link(target)
        label = token.content or target or "image"
        self._add("▧ ", look._replace(tint="muted"))
        self._add(label, _linked(look, link))
        if not link and target and target != label:
            self._add(f" ({target})", look._replace(tint="muted"))

    def _text(self, text: str, look: Look) -> None:
        if look.link or "://" not in text:
            self._add(text, look)
            return
        for part, link in _with_links(text):
            self._add(part, _linked(look, link))

    def _add(self, text: str, look: Look) -> None:
        add_text(self.lines[-1], text, look)


def _linked(look: Look, link: str) -> Look:
    """Return the look of a link. Without a link, the look is unchanged."""
    if not link:
        return look
    return look._replace(tint="link", underline=True, link=link)


def _with_links(text: str) -> Iterator[tuple[str, str]]:
    """Yield the parts of a text, each with its link or an empty string."""
    end = 0
    for match in _URL.finditer(text):
        url = match.group().rstrip(_TRAILING)
        while url.endswith(")") and url.count(")") > url.count("("):
            url = url[:-1].rstrip(_TRAILING)
        if match.start() > end:
            yield text[end : match.start()], ""
        yield url, web_link(url)
        end = match.start() + len(url)
    if end < len(text):
        yield text[end:], ""
