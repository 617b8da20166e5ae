"""Markdown that is being written: only what may still change is parsed again.

The text before the last top-level block cannot change any more, so its rows are frozen. An open fence, the
one block that gets long while it stays last, is laid out line by line. `finish` parses the whole once.
"""

import re
from typing import TYPE_CHECKING, Final

from localchat.sanitize import sanitize
from localchat.tui.transcript.markdown import code, parser
from localchat.tui.transcript.markdown.layout import MarkdownLayout, code_rows, layout, top_level
from localchat.tui.transcript.markdown.rows import EMPTY, Row

if TYPE_CHECKING:
    from markdown_it.token import Token

_FENCE: Final = re.compile(r" {0,3}(`{3,}|~{3,})([^\n]*)\n")
_TAIL_MOST: Final = 12 * 1024


class IncrementalMarkdown:
    """An answer while it streams. `text` is raw and may come in pieces cut anywhere."""

    def __init__(self, width: int, text: str = "") -> None:
        self.width = width
        self._frozen: list[Row] = []
        self._held = ""  # a \r whose \n may follow
        self._source: list[str] = []
        self._tail = ""
        self._first = True
        self._fence: _OpenFence | None = None
        self._changed = True
        self._rows: list[Row] = []
        self.append(text)

    @property
    def source(self) -> str:
        """All of it, inert."""
        if len(self._source) > 1:
            self._source = ["".join(self._source)]
        return self._source[0] if self._source else ""

    def append(self, piece: str) -> None:
        piece = self._held + piece
        self._held = "\r" if piece.endswith("\r") else ""
        piece = sanitize(piece.removesuffix("\r").replace("\r\n", "\n"))
        if piece:
            self._source.append(piece)
            self._tail += piece
            self._changed = True

    def rows(self) -> list[Row]:
        """What is to be shown now."""
        if self._changed:
            self._changed = False
            self._rows = self._frozen + self._tail_rows()
        return self._rows

    @property
    def frozen(self) -> int:
        """How many of the rows will not change any more before `finish`."""
        return len(self._frozen)

    def resize(self, width: int) -> None:
        """Lay all of it out again."""
        self.width, self._tail, self._frozen, self._fence = width, self.source, [], None
        self._first = True
        self._changed = True

    def finish(self) -> list[Row]:
        """The rows of the whole text, parsed at once."""
        if self._held:
            self._held = ""
            self._source.append(sanitize("\r"))
        self._rows = layout(self.source, self.width)
        self._changed = False
        return self._rows

    def _tail_rows(self) -> list[Row]:
        if self._fence is not None:
            if self._fence.grow(self._tail):
                return self._fence.rows(self.width, first=self._first)
            self._fence = None
        self._tail = parser.split_long(self._tail)
        tokens = parser.blocks(self._tail)
        starts = top_level(tokens)
        begin = tokens[starts[-1]].map if starts else None
        if begin and begin[0] > 0:
            self._freeze(tokens[: starts[-1]])
            self._tail = self._tail.split("\n", begin[0])[-1]
            tokens = parser.blocks(self._tail)
        match = _FENCE.match(self._tail)
        if match and "`" not in match.group(2):
            self._fence = _OpenFence(match)
            if self._fence.grow(self._tail):
                return self._fence.rows(self.width, first=self._first)
            self._fence = None
        elif len(self._tail) > _TAIL_MOST and "\n" in self._tail:
            whole, _, rest = self._tail.rpartition("\n")
            self._tail = whole
            self._freeze(parser.blocks(whole))
            self._tail, self._first = rest, True  # in the middle of a block: no blank row between
            tokens = parser.blocks(rest)
        return MarkdownLayout(self.width, self._tail).rows(tokens, first=self._first)

    def _freeze(self, tokens: "list[Token]") -> None:
        rows = MarkdownLayout(self.width, self._tail).rows(tokens, first=self._first)
        if rows:
            self._frozen += rows
            self._first = False


class _OpenFence:
    """The rows of a fence that is not closed yet; a complete line is laid out once."""

    def __init__(self, match: re.Match[str]) -> None:
        marker = match.group(1)
        self._close = re.compile(rf" {{0,3}}{re.escape(marker[0])}{{{len(marker)},}}[ \t]*")
        self._indent = re.compile(rf" {{0,{match.start(1)}}}")
        self._label = code.label(match.group(2))
        self._name = code.language(match.group(2))
        self._at = match.end()
        self._part = ""
        self._new: list[code.Line] = []
        self._rows: list[Row] = []

    def grow(self, tail: str) -> bool:
        """Take what is new in `tail`; False once the fence is closed."""
        while (end := tail.find("\n", self._at)) >= 0:
            line = tail[self._at : end]
            if self._close.fullmatch(line):
                return False
            self._new.append(self._lit(line))
            self._at = end + 1
        while len(tail) - self._at > parser.LINE_MOST:
            self._new.append(self._lit(tail[self._at : self._at + parser.LINE_MOST]))
            self._at += parser.LINE_MOST
        self._part = tail[self._at :]
        return not (self._part and self._close.fullmatch(self._part))

    def rows(self, width: int, *, first: bool) -> list[Row]:
        if not self._rows:
            self._rows = [] if first else [EMPTY]
            self._rows += code_rows([], self._label, width, ())
        self._rows += code_rows(self._new, "", width, ())
        self._new = []
        part = [self._lit(self._part)] if self._part else []
        return self._rows + list(code_rows(part, "", width, ()))

    def _lit(self, line: str) -> code.Line:
        bare = line[self._indent_of(line) :]
        return code.highlight_line(bare, self._name)

    def _indent_of(self, line: str) -> int:
        match = self._indent.match(line)
        return match.end() if match else 0
