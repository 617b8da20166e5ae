"""Incremental layout of streaming Markdown: only text that may still change is parsed again.

Text before the last top-level block can no longer change, so its rows are frozen. An open fence is the only
last block that gets long, and it is laid out line by line.
"""

import re
from typing import TYPE_CHECKING, Final

from localchat.sanitize import sanitize
from localchat.tui.transcript.markdown import code, parser
from localchat.tui.transcript.markdown.layout import MarkdownLayout, code_rows, top_level
from localchat.tui.transcript.markdown.rows import EMPTY, Row

if TYPE_CHECKING:
    from markdown_it.token import Token

_FENCE: Final = re.compile(r" {0,3}(`{3,}|~{3,})([^\n]*)\n")
_MAX_TAIL: Final = 12 * 1024


class IncrementalMarkdown:
    """Markdown of an answer while it streams. Raw text may arrive in pieces split anywhere."""

    def __init__(self, width: int, text: str = "") -> None:
        self.width = width
        self._frozen: list[Row] = []
        self._pending_cr = ""
        """A carriage return that a newline may follow."""
        self._source: list[str] = []
        self._tail = ""
        self._first = True
        self._code_blocks = 0
        """Number of code blocks in the frozen rows."""
        self._fence: _OpenFence | None = None
        self._changed = True
        self._rows: list[Row] = []
        self.append(text)

    @property
    def source(self) -> str:
        """The whole sanitized text."""
        if len(self._source) > 1:
            self._source = ["".join(self._source)]
        if self._source:
            return self._source[0]
        return ""

    def append(self, piece: str) -> None:
        piece = self._pending_cr + piece
        self._pending_cr = ""
        if piece.endswith("\r"):
            self._pending_cr = "\r"
        piece = sanitize(piece.removesuffix("\r").replace("\r\n", "\n"))
        if piece:
            self._source.append(piece)
            self._tail += piece
            self._changed = True

    def rows(self) -> list[Row]:
        """The current rows."""
        if self._changed:
            self._changed = False
            self._rows = self._frozen + self._tail_rows()
        return self._rows

    @property
    def frozen(self) -> int:
        """Number of rows that no longer change while the text grows."""
        return len(self._frozen)

    def resize(self, width: int) -> None:
        """Lay out everything for another width."""
        self.width = width
        self._tail = self.source
        self._frozen = []
        self._fence = None
        self._first = True
        self._code_blocks = 0
        self._changed = True

    def _tail_rows(self) -> list[Row]:
        if self._fence is not None:
            if self._fence.grow(self._tail):
                return self._fence.rows(self.width, first=self._first)
            self._fence = None
        self._tail = parser.split_long(self._tail)
        tokens = parser.blocks(self._tail)
        starts = top_level(tokens)
        begin = None
        if starts:
            begin = tokens[starts[-1]].map
        if begin and begin[0] > 0:
            self._freeze(tokens[: starts[-1]])
            self._tail = self._tail.split("\n", begin[0])[-1]
            tokens = parser.blocks(self._tail)
        match = _FENCE.match(self._tail)
        if match and "`" not in match.group(2):
            self._fence = _OpenFence(match, self._code_blocks + 1)
            if self._fence.grow(self._tail):
                return self._fence.rows(self.width, first=self._first)
            self._fence = None
        elif len(self._tail) > _MAX_TAIL and "\n" in self._tail:
            lines, _, last_line = self._tail.rpartition("\n")
            self._tail = lines
            self._freeze(parser.blocks(lines))
            # The cut is inside a block, so no blank row follows.
            self._tail = last_line
            self._first = True
            tokens = parser.blocks(last_line)
        return self._tail_layout().rows(tokens, first=self._first)

    def _tail_layout(self) -> MarkdownLayout:
        return MarkdownLayout(self.width, self._tail, code_blocks=self._code_blocks)

    def _freeze(self, tokens: "list[Token]") -> None:
        tail = self._tail_layout()
        rows = tail.rows(tokens, first=self._first)
        self._code_blocks = tail.code_blocks
        if rows:
            self._frozen += rows
            self._first = False


class _OpenFence:
    """Rows of an open fence. Each complete line is laid out once."""

    def __init__(self, match: re.Match[str], number: int) -> None:
        marker = match.group(1)
        self._close = re.compile(rf" {{0,3}}{re.escape(marker[0])}{{{len(marker)},}}[ \t]*")
        self._indent = re.compile(rf" {{0,{match.start(1)}}}")
        self._label = code.label(match.group(2), number)
        self._number = number
        self._name = code.language(match.group(2))
        self._position = match.end()
        self._partial_line = ""
        self._new_lines: list[code.Line] = []
        self._rows: list[Row] = []

    def grow(self, tail: str) -> bool:
        """Add the new text of `tail`. Return False once the fence is closed."""
        while (end := tail.find("\n", self._position)) >= 0:
            line = tail[self._position : end]
            if self._close.fullmatch(line):
                return False
            self._new_lines.append(self._highlighted(line))
            self._position = end + 1
        while len(tail) - self._position > parser.MAX_LINE:
            self._new_lines.append(
                self._highlighted(tail[self._position : self._position + parser.MAX_LINE])
            )
            self._position += parser.MAX_LINE
        self._partial_line = tail[self._position :]
        return not (self._partial_line and self._close.fullmatch(self._partial_line))

    def rows(self, width: int, *, first: bool) -> list[Row]:
        if not self._rows:
            if not first:
                self._rows.append(EMPTY)
            self._rows += code_rows([], self._label, width, (), None, self._number)
        self._rows += code_rows(self._new_lines, "", width, ())
        self._new_lines = []
        part = []
        if self._partial_line:
            part.append(self._highlighted(self._partial_line))
        return self._rows + list(code_rows(part, "", width, ()))

    def _highlighted(self, line: str) -> code.Line:
        bare = self._indent.sub("", line, count=1)
        return code.highlight_line(bare, self._name)
