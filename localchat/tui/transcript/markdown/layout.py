"""Layout of Markdown blocks: markdown-it's block tokens as rows."""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from rich.cells import cell_len

from localchat.tui.transcript.markdown import code, parser
from localchat.tui.transcript.markdown.corner import CORNER_CELLS, corner
from localchat.tui.transcript.markdown.inline import Line, inline_lines, printable
from localchat.tui.transcript.markdown.rows import PLAIN, Look, Piece, Row
from localchat.tui.transcript.markdown.table import MAX_ROWS, Table, table_rows
from localchat.tui.transcript.markdown.wrap import cells, wrap

if TYPE_CHECKING:
    from markdown_it.token import Token

_HEADINGS: Final = {
    "h1": Look("heading", bold=True, underline=True),
    "h2": Look("heading", bold=True),
    "h3": Look("heading", bold=True, italic=True),
}
_SMALL_HEADING: Final = Look("muted", bold=True)
_BULLETS: Final = ("•", "◦", "▪")
_TASK: Final = re.compile(r"\[([ xX])\](?=\s|$)")
_QUOTE: Final = Piece("▏ ", Look("quote"))
_MAX_CHARACTERS: Final = 256 * 1024
"""Limit for Markdown. 60,000 tokens take 0.3 s, and 5,000 short list items 1 s."""
_MAX_LINES: Final = 8_000
_MIN_TEXT_CELLS: Final = 12
"""Cells that an indent must leave for text."""

Lead = tuple[Piece, ...]


def layout(text: str, width: int, unfinished: list[code.Highlighting] | None = None) -> list[Row]:
    """Lay out a sanitized Markdown text.

    A text over 256 KB or 8,000 lines is laid out as plain text. `unfinished`
    collects the incomplete highlighting of code.
    """
    text = parser.split_long(text)
    if len(text) > _MAX_CHARACTERS or text.count("\n") > _MAX_LINES:
        return list(plain_rows(text, width))
    return MarkdownLayout(width, text, unfinished).rows(parser.blocks(text))


def plain_rows(
    text: str,
    width: int,
    first: Lead = (),
    later: Lead | None = None,
    *,
    look: Look = PLAIN,
) -> Iterator[Row]:
    """Yield the rows of a sanitized plain text. `first` leads its first line, `later` the others."""
    if later is None:
        later = first
    blank = next(wrap([], width, later, later))
    for number, line in enumerate(parser.split_long(text).split("\n")):
        if number and not line:
            yield blank
            continue
        pieces = []
        if line:
            pieces.append(Piece(printable(line), look))
        lead = first
        if number:
            lead = later
        yield from wrap(pieces, width, lead, later)


def top_level(tokens: "list[Token]") -> list[int]:
    """Return the indices of the tokens that open a top-level block."""
    return [index for index, token in enumerate(tokens) if token.level == 0 and token.nesting >= 0]


class MarkdownLayout:
    """Lays out block tokens. `source` is their text, whose lines their `map` counts."""

    def __init__(
        self,
        width: int,
        source: str,
        unfinished: list[code.Highlighting] | None = None,
        *,
        code_blocks: int = 0,
    ) -> None:
        """`code_blocks` is the number of code blocks in earlier text."""
        self.width = width
        self.code_blocks = code_blocks
        if unfinished is None:
            unfinished = []
        self._unfinished = unfinished
        self._source = source
        self._lines: list[str] | None = None

    def rows(self, tokens: "list[Token]", *, first: bool = True) -> list[Row]:
        """Return rows with a blank row between blocks, and before the first block unless `first`."""
        return list(self._blocks(tokens, (), (), 0, first=first))

    def _blocks(
        self,
        tokens: "list[Token]",
        lead: Lead,
        later: Lead,
        depth: int,
        *,
        first: bool = True,
        tight: bool = False,
    ) -> Iterator[Row]:
        """Yield the rows of blocks in a list of `depth`. `lead` precedes the first row, `later` all others.

        A blank row precedes each block but the `first`. A `tight` list has none.
        """
        for block in _each_block(tokens):
            if not first and not tight:
                yield Row(later, len(later))
            yield from self._block(block, lead, later, depth)
            lead = later
            first = False
        if first and lead != later:
            # An item without content still has its bullet.
            yield Row(lead, len(lead))

    def _block(self, tokens: "list[Token]", lead: Lead, later: Lead, depth: int) -> Iterator[Row]:
        token = tokens[0]
        inside = tokens[1:-1]
        match token.type:
            case "paragraph_open":
                yield from self._lines_of(inline_lines(inside[0].content), lead, later)
            case "heading_open":
                look = _HEADINGS.get(token.tag, _SMALL_HEADING)
                yield from self._lines_of(inline_lines(inside[0].content, look), lead, later)
            case "fence" | "code_block":
                content = token.content.removesuffix("\n")
                highlighting = code.highlighting(content, code.language(token.info))
                if not highlighting.is_complete:
                    self._unfinished.append(highlighting)
                self.code_blocks += 1
                label = code.label(token.info, self.code_blocks)
                number = self.code_blocks
                yield from code_rows(highlighting.lines(), label, self.width, lead, later, number)
            case "bullet_list_open" | "ordered_list_open":
                yield from self._list(token, inside, lead, later, depth)
            case "blockquote_open":
                bar = self._deeper(later, (_QUOTE,))
                yield from self._blocks(inside, self._deeper(lead, (_QUOTE,)), bar, depth)
            case "formula":
                from localchat.tui.transcript.markdown import latex  # as in inline.py

                indent = self._deeper(later, (Piece("  ", PLAIN),))
                text = latex.to_unicode(token.content).split("\n")
                formula = [[Piece(printable(line), PLAIN)] for line in text if line]
                yield from self._lines_of(formula, lead + indent[len(later) :], indent)
            case "hr":
                room = max(1, self.width - cells(lead))
                yield Row((*lead, Piece("─" * room, Look("rule"))), len(lead) + 1)
            case "table_open":
                yield from self._table(token, inside, lead, later)
            case _:
                plain = [[Piece(printable(line), PLAIN)] for line in token.content.split("\n")]
                yield from self._lines_of(plain, lead, later)

    def _lines_of(self, lines: Sequence[Line], lead: Lead, later: Lead) -> Iterator[Row]:
        for line in lines:
            start = True
            for row in wrap(line, self.width, lead, later):
                if start:
                    # Bullets and indents are copied with the first row of a line, bars of quotes are not.
                    row = row._replace(lead=_bars(lead))
                yield row
                start = False
            lead = later

    def _deeper(self, lead: Lead, more: Lead) -> Lead:
        """Return `lead` and `more`, unless that leaves too few cells for text."""
        if cells(lead) + cells(more) + _MIN_TEXT_CELLS <= self.width:
            return lead + more
        return lead

    def _list(
        self, token: "Token", inside: "list[Token]", lead: Lead, later: Lead, depth: int
    ) -> Iterator[Row]:
        ordered = token.type == "ordered_list_open"
        start_attribute = token.attrGet("start")
        number = 1
        if start_attribute is not None:
            number = int(str(start_attribute))
        items = [block[1:-1] for block in _each_block(inside)]
        digits = len(str(number + len(items) - 1))
        tight = all(
            t.hidden for t in inside if t.type == "paragraph_open" and t.level == token.level + 2
        )
        for position, item in enumerate(items):
            if ordered:
                mark = f"{number + position:>{digits}}."
            else:
                mark = _BULLETS[depth % len(_BULLETS)]
            item, task = _task(item)
            bullet = Piece(f"{task or mark} ", Look("bullet"))
            blank = Piece(" " * cell_len(bullet.text), PLAIN)
            if position and not tight:
                yield Row(later, len(later))
            below = self._deeper(later, (blank,))
            start: Lead = (*lead, bullet)
            if below is later:
                # Too deep to indent: the bullet becomes part of the text.
                start = lead
                item = _marked(item, bullet.text)
            yield from self._blocks(item, start, below, depth + 1, tight=tight)
            lead = later

    def _table(
        self, token: "Token", inside: "list[Token]", lead: Lead, later: Lead
    ) -> Iterator[Row]:
        rows: list[list[Line]] = []
        aligns: list[str] = []
        for index, part in enumerate(inside):
            if part.type == "tr_open":
                rows.append([])
            elif part.type in ("th_open", "td_open"):
                is_header = part.type == "th_open"
                look = PLAIN
                if is_header:
                    look = Look(bold=True)
                cell: list[Piece] = []
                for line in inline_lines(inside[index + 1].content, look):
                    cell += line
                rows[-1].append(cell)
                if is_header:
                    style = str(part.attrGet("style") or "")
                    aligns.append(style.removeprefix("text-align:") or "left")
        if len(rows) > MAX_ROWS:
            yield from self._as_written(token, lead, later)
            return
        yield from table_rows(Table(rows, aligns), self.width, later)

    def _as_written(self, token: "Token", lead: Lead, later: Lead) -> Iterator[Row]:
        if self._lines is None:
            self._lines = self._source.split("\n")
        start, end = token.map or (0, 0)
        lines = [[Piece(printable(line), PLAIN)] for line in self._lines[start:end]]
        yield from self._lines_of(lines, lead, later)


def code_rows(
    lines: tuple[code.Line, ...] | list[code.Line],
    label: str,
    width: int,
    lead: Lead,
    later: Lead | None = None,
    number: int = 0,
) -> Iterator[Row]:
    """Yield the rows of a code block: its label, if there is one, then the lines.

    `number` is the block that a click on the corner of the label copies.
    """
    if later is None:
        later = lead
    pad = Piece("  ", Look("code.text"))
    wrapped = Piece("↪ ", Look("code.label"))
    if label:
        pieces = [Piece(label, Look("code.label"))]
        label_rows = list(wrap(pieces, width - 1, (*lead, pad), (*later, pad), "code"))
        if number:
            label_rows[0] = _with_corner(label_rows[0], width - 1, number)
        for row in label_rows:
            yield row._replace(bare=len(lead), lead=len(row.pieces))
        lead = later
    for line in lines:
        for row in wrap(line, width - 1, (*lead, pad), (*later, wrapped), "code"):
            yield row._replace(bare=len(lead))
        lead = later


def _with_corner(row: Row, width: int, number: int) -> Row:
    """Return the label of a code block, with its corner if it fits."""
    space = width - cells(row.pieces) - CORNER_CELLS
    if space < 1:
        return row
    blank = Piece(" " * space, Look("code.label"))
    return row._replace(pieces=(*row.pieces, blank, corner(number)))


def _close(tokens: "list[Token]", index: int) -> int:
    """Return the index of the last token of the block that opens at `index`."""
    token = tokens[index]
    if token.nesting != 1:
        return index
    for end in range(index + 1, len(tokens)):
        if tokens[end].level == token.level and tokens[end].nesting == -1:
            return end
    return len(tokens) - 1


def _each_block(tokens: "list[Token]") -> "Iterator[list[Token]]":
    index = 0
    while index < len(tokens):
        end = _close(tokens, index)
        yield tokens[index : end + 1]
        index = end + 1


def _task(item: "list[Token]") -> "tuple[list[Token], str]":
    """Return an item without its `[x]`, and the sign for it. Empty for other items."""
    if len(item) < 2 or item[0].type != "paragraph_open":
        return item, ""
    match = _TASK.match(item[1].content)
    if match is None:
        return item, ""
    text = item[1].copy(content=item[1].content[match.end() :].lstrip())
    sign = "☑"
    if match.group(1) == " ":
        sign = "☐"
    return [item[0], text, *item[2:]], sign


def _marked(item: "list[Token]", bullet: str) -> "list[Token]":
    if len(item) >= 2 and item[0].type == "paragraph_open":
        return [item[0], item[1].copy(content=bullet + item[1].content), *item[2:]]
    return item


def _bars(lead: Lead) -> int:
    """Return the number of pieces up to the last bar of a quote."""
    return max((index + 1 for index, piece in enumerate(lead) if piece == _QUOTE), default=0)
