"""Syntax highlighting by pygments: a whole block once its fence is closed, line by line while it is open."""

import re
import time
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Final

from localchat.tui.transcript.markdown.inline import printable
from localchat.tui.transcript.markdown.rows import Look, Piece

if TYPE_CHECKING:
    from pygments.lexer import Lexer  # type: ignore[import-untyped]
    from pygments.token import _TokenType  # type: ignore[import-untyped]

MAX_HIGHLIGHTED: Final = 64 * 1024
"""Characters of a fence; a longer one is not highlighted: a megabyte took 15 s."""
_MAX_HIGHLIGHT_S: Final = 0.15

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


def label(info: str) -> str:
    """The info string of a fence as shown above its code; mostly a language."""
    return printable(info.strip())


def language(info: str) -> str:
    """The language of a fence: the first word of its info string."""
    words = label(info).split(None, 1)
    return words[0].strip("{}.") if words else ""


@lru_cache(64)
def highlight(code: str, name: str) -> tuple[Line, ...]:
    """Highlighted lines of a whole block. Code over the limit or of an unknown language has one colour.

    So has the rest after 0.15 s: some lexers are quadratic on text that is not code (Perl: 30 s for 60 KB).
    """
    lexer = _lexer(name) if len(code) <= MAX_HIGHLIGHTED else None
    if lexer is None:
        return tuple(_plain(line) for line in code.split("\n"))
    lines: list[list[Piece]] = [[]]
    done = 0
    until = time.monotonic() + _MAX_HIGHLIGHT_S
    for kind, text in lexer.get_tokens(code):
        _extend(lines, text, _look(kind))
        done += len(text)
        if time.monotonic() > until:
            _extend(lines, code[done:], _look(()))
            break
    count = code.count("\n") + 1
    lines = lines[:count] + [[] for _ in range(count - len(lines))]
    return tuple(tuple(line) for line in lines)


@lru_cache(512)
def highlight_line(line: str, name: str) -> Line:
    """One line of an open fence. Tokens of several lines (a docstring) get their colour when the fence
    closes."""
    return highlight.__wrapped__(line, name)[0] if len(line) < 2000 else _plain(line)


def _plain(line: str) -> Line:
    return (Piece(printable(line), Look("code.text")),) if line else ()


def _extend(lines: list[list[Piece]], text: str, look: Look) -> None:
    first, *rest = text.split("\n")
    _add(lines[-1], first, look)
    for part in rest:
        lines.append([])
        _add(lines[-1], part, look)


def _add(line: list[Piece], text: str, look: Look) -> None:
    if not text:
        return
    if line and line[-1].look == look:
        line[-1] = Piece(line[-1].text + printable(text), look)
    else:
        line.append(Piece(printable(text), look))


def load() -> None:
    """Import lexers of common languages early: Python alone takes 20 to 35 ms."""
    for name in _COMMON_LANGUAGES:
        _lexer(name)


@lru_cache(64)
def _lexer(name: str) -> "Lexer | None":
    if not _NAME.fullmatch(name) or name.lower() not in _names():
        return None
    from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]

    return get_lexer_by_name(name.lower(), stripnl=False, ensurenl=False)


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
