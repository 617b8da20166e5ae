"""Tables wrapped to a width: columns share it, and a long cell takes several rows."""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from localchat.tui.transcript.markdown.inline import Line
from localchat.tui.transcript.markdown.rows import PLAIN, Look, Piece, Row
from localchat.tui.transcript.markdown.wrap import cells, wrap

MAX_ROWS: Final = 300
"""Longer tables are shown as source text, because their layout takes seconds."""

_GAP: Final = 2
_MIN_COLUMN: Final = 8
"""Narrower columns would break numbers and words."""
_RULE: Final = Look("rule")


class Table(NamedTuple):
    """Cells of a table."""

    rows: list[list[Line]]
    """Rows of cells, the header first."""
    aligns: list[str]
    """Alignment of each column: `left`, `right` or `center`."""


def table_rows(table: Table, width: int, lead: tuple[Piece, ...]) -> Iterator[Row]:
    """Yield the rows of a table. Stack its cells if it is too wide."""
    columns = max(len(row) for row in table.rows)
    room = max(2, width - cells(lead)) - (columns - 1) * _GAP
    natural = _natural(table, columns)
    widths = column_widths(natural, room)
    breaks_words = any(
        column < min(needed, _MIN_COLUMN) for column, needed in zip(widths, natural, strict=True)
    )
    if breaks_words or sum(widths) > room:
        yield from _stacked(table, width, lead)
        return
    for number, row in enumerate(table.rows):
        yield from _line(row, widths, table.aligns, lead)
        if number == 0:
            rule = (" " * _GAP).join("─" * column for column in widths)
            yield Row((*lead, Piece(rule, _RULE)), len(lead) + 1)


def column_widths(natural: Sequence[int], room: int) -> list[int]:
    """Return the widths of columns: the natural ones if they fit, or else the widest shrink first."""
    widths = [max(1, width) for width in natural]
    while sum(widths) > room:
        widest = max(widths)
        if widest <= 3:
            break
        second = max((width for width in widths if width < widest), default=3)
        count = widths.count(widest)
        over = sum(widths) - room
        step = max(1, min(widest - max(second, 3), -(-over // count)))
        for index, width in enumerate(widths):
            if width == widest and sum(widths) > room:
                widths[index] = width - min(step, sum(widths) - room)
    return widths


def _natural(table: Table, columns: int) -> list[int]:
    return [
        max((cells(row[column]) for row in table.rows if column < len(row)), default=1)
        for column in range(columns)
    ]


def _line(
    row: list[Line], widths: list[int], aligns: list[str], lead: tuple[Piece, ...]
) -> Iterator[Row]:
    # A row may have fewer cells than the table has columns.
    missing = len(widths) - len(row)
    filled_row: list[Line] = [*row, *([] for _ in range(missing))]
    wrapped = [list(wrap(cell, room)) for cell, room in zip(filled_row, widths, strict=True)]
    last = len(widths) - 1
    for index in range(max(len(cell) for cell in wrapped)):
        pieces: list[Piece] = list(lead)
        for column, room in enumerate(widths):
            content: tuple[Piece, ...] = ()
            if index < len(wrapped[column]):
                content = wrapped[column][index].pieces
            free = room - cells(content)
            align = "left"
            if column < len(aligns):
                align = aligns[column]
            left = _left_padding(free, align)
            if left:
                pieces.append(Piece(" " * left, PLAIN))
            pieces += content
            # No trailing blanks after the last column.
            if column < last:
                pieces.append(Piece(" " * (free - left + _GAP), PLAIN))
        yield Row(tuple(pieces), len(lead))


def _left_padding(free: int, align: str) -> int:
    """Return how many of the free cells are to the left of the content."""
    match align:
        case "right":
            return free
        case "center":
            return free // 2
        case _:
            return 0


def _stacked(table: Table, width: int, lead: tuple[Piece, ...]) -> Iterator[Row]:
    """Lay out a table that is too wide: each cell on its own line, after the name of its column."""
    header, *body = table.rows
    if not body:
        for name in header:
            yield from wrap(name, width, lead)
    for number, row in enumerate(body):
        if number:
            yield Row((*lead, Piece("─" * 3, _RULE)), len(lead) + 1)
        for column, cell in enumerate(row):
            label: list[Piece] = []
            if column < len(header) and cells(header[column]):
                label = [*header[column], Piece(": ", PLAIN)]
            yield from wrap([*label, *cell], width, lead)
