"""Code as coloured lines: pygments, whole once a fence is closed, line by line while it is open."""

import re
import time
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Final

from localchat.tui.transcript.markdown.inline import printable
from localchat.tui.transcript.markdown.rows import Look, Piece

if TYPE_CHECKING:
    from pygments.lexer import Lexer  # type: ignore[import-untyped]
    from pygments.token import _TokenType  # type: ignore[import-untyped]

HIGHLIGHT_MOST: Final = 64 * 1024
"""Characters of a fence that are still highlighted: a megabyte took 15 s."""
_HIGHLIGHT_S: Final = 0.15

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
_USUAL: Final = ("python", "bash", "json", "text")
_NAME: Final = re.compile(r"[A-Za-z0-9_+#.-]+")

Line = tuple[Piece, ...]


def label(info: str) -> str:
    """What a fence says about itself, as shown above its code: a language, mostly."""
    return printable(info.strip())


def language(info: str) -> str:
    """The language that a fence names: the first word of what it says."""
    words = label(info).split(None, 1)
    return words[0].strip("{}.") if words else ""


@lru_cache(64)
def highlight(code: str, name: str) -> tuple[Line, ...]:
    """The lines of a whole piece of code. Text over the cap or of no known language has one colour; so has
    what is left after 0.15 s: some lexers are quadratic on what is no code (Perl: 30 s for 60 KB)."""
    lexer = _lexer(name) if len(code) <= HIGHLIGHT_MOST else None
    if lexer is None:
        return tuple(_plain(line) for line in code.split("\n"))
    lines: list[list[Piece]] = [[]]
    done = 0
    until = time.monotonic() + _HIGHLIGHT_S
    for kind, text in lexer.get_tokens(code):
        _extend(lines, text, _look(kind))
        done += len(text)
        if time.monotonic() > until:
            _extend(lines, code[done:], _look(()))
            break
    wanted = code.count("\n") + 1
    lines = lines[:wanted] + [[] for _ in range(wanted - len(lines))]
    return tuple(tuple(line) for line in lines)


@lru_cache(512)
def highlight_line(line: str, name: str) -> Line:
    """One line alone, in an open fence. What spans lines (a docstring) gets its colour at the close."""
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
    """Import now what the usual code would import in the middle of an answer: 20 to 35 ms for Python alone."""
    for name in _USUAL:
        _lexer(name)


@lru_cache(64)
def _lexer(name: str) -> "Lexer | None":
    if not _NAME.fullmatch(name) or name.lower() not in _names():
        return None
    from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]

    return get_lexer_by_name(name.lower(), stripnl=False, ensurenl=False)


@cache
def _names() -> frozenset[str]:
    """What pygments itself has a lexer for. Of another name it would ask every package that is installed, 10 to
    50 ms."""
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
