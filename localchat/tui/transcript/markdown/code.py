"""Syntax highlighting by pygments: line by line while a fence is open, then the whole block in slices."""

import re
import time
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Final

from localchat.tui.transcript.markdown.inline import add_text, printable
from localchat.tui.transcript.markdown.rows import Look, Piece

if TYPE_CHECKING:
    from pygments.lexer import Lexer  # type: ignore[import-untyped]
    from pygments.token import _TokenType  # type: ignore[import-untyped]

MAX_HIGHLIGHTED: Final = 64 * 1024
"""Characters of a fence; a longer one is not highlighted: a megabyte took 15 s."""
_FIRST_SLICE_S: Final = 0.05
"""Time of the first slice, enough for 10 KB. Longer blocks continue between redraws."""
_MAX_HIGHLIGHT_S: Final = 5.0
"""The rest of a block stays in one colour after this time in all: some lexers are quadratic on text that is not
code (Perl: 30 s for 60 KB)."""

_TINTS: Final = (
    ("Comment", "comment"),
    ("Keyword", "keyword"),
    ("Name.Function", "function"),
    ("Name.Class", "class"),
    ("Name.Decorator", "function"),
    ("Name.Builtin", "builtin"),
    ("Name.Tag", "keyword"),
    ("Name.Attribute", "function"),
    ("Name.Exception", "class"),
    ("Literal.String", "string"),
    ("Literal.Number", "number"),
    ("Operator.Word", "keyword"),
    ("Operator", "operator"),
    ("Generic.Heading", "keyword"),
    ("Generic.Inserted", "string"),
    ("Generic.Deleted", "error"),
)
_COMMON_LANGUAGES: Final = ("python", "bash", "json", "text")
_NAME: Final = re.compile(r"[A-Za-z0-9_+#.-]+")

Line = tuple[Piece, ...]


def label(info: str, number: int) -> str:
    """The line above a code block: the info string of its fence, mostly a language, and its number."""
    return f"{printable(info.strip()) or 'code'} · {number}"


def language(info: str) -> str:
    """The language of a fence: the first word of its info string."""
    words = printable(info.strip()).split(None, 1)
    if words:
        return words[0].strip("{}.")
    return ""


class Highlighting:
    """Highlights one block in slices. What no slice has reached yet has one colour."""

    def __init__(self, code: str, name: str) -> None:
        self._code = code
        lexer = None
        if len(code) <= MAX_HIGHLIGHTED:
            lexer = _lexer(name)
        self._tokens = None
        if lexer is not None:
            self._tokens = lexer.get_tokens(code)
        self._highlighted: list[list[Piece]] = [[]]
        self._done = 0
        self._spent_s = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether further slices change nothing."""
        return self._tokens is None

    def advance(self, budget_s: float) -> None:
        """Highlight for about this long."""
        begun_s = now_s = time.monotonic()
        while self._tokens is not None:
            token = next(self._tokens, None)
            now_s = time.monotonic()
            if token is None or self._spent_s + now_s - begun_s > _MAX_HIGHLIGHT_S:
                self._tokens = None
            if token is None:
                break
            kind, text = token
            _extend(self._highlighted, text, _look(kind))
            self._done += len(text)
            if now_s - begun_s > budget_s:
                break
        self._spent_s += now_s - begun_s

    def lines(self) -> tuple[Line, ...]:
        """All lines of the block."""
        lines = [list(line) for line in self._highlighted]
        if self._done < len(self._code):
            _extend(lines, self._code[self._done :], _look(()))
        count = self._code.count("\n") + 1
        lines = lines[:count] + [[] for _ in range(count - len(lines))]
        return tuple(tuple(line) for line in lines)


@lru_cache(64)
def highlighting(code: str, name: str) -> Highlighting:
    """The highlighting of a block, after its first slice. The same block has one, wherever it is shown."""
    started = Highlighting(code, name)
    started.advance(_FIRST_SLICE_S)
    return started


def highlight(code: str, name: str) -> tuple[Line, ...]:
    """Highlighted lines of a short text."""
    return highlighting(code, name).lines()


@lru_cache(512)
def highlight_line(line: str, name: str) -> Line:
    """Highlight a line of an open fence.

    Tokens of several lines, such as docstrings, get their colour when the fence closes.
    """
    if len(line) >= 2000:
        return (Piece(printable(line), Look("code.text")),)
    highlighting = Highlighting(line, name)
    highlighting.advance(_FIRST_SLICE_S)
    return highlighting.lines()[0]


def _extend(lines: list[list[Piece]], text: str, look: Look) -> None:
    first, *later = text.split("\n")
    add_text(lines[-1], first, look)
    for part in later:
        lines.append([])
        add_text(lines[-1], part, look)


def load() -> None:
    """Import lexers of common languages early: Python alone takes 20 to 35 ms."""
    for name in _COMMON_LANGUAGES:
        _lexer(name)


@lru_cache(64)
def _lexer(name: str) -> "Lexer | None":
    if not _NAME.fullmatch(name) or name.lower() not in _names():
        return None
    from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]

    return get_lexer_by_name(name.lower(), stripnl=False)


@cache
def _names() -> frozenset[str]:
    """Names of pygments' own lexers. For other names it would search all installed packages: 10 to 50 ms."""
    from pygments.lexers import get_all_lexers

    lexers = get_all_lexers(plugins=False)
    return frozenset(alias for _, aliases, _, _ in lexers for alias in aliases)


@lru_cache(512)
def _look(kind: "_TokenType | tuple[str, ...]") -> Look:
    name = ".".join(kind)
    for prefix, tint in _TINTS:
        if name.startswith(prefix):
            return Look(f"code.{tint}", italic=tint == "comment")
    return Look("code.text")
