"""Tables wrapped to a width: columns share it, a long cell takes several rows."""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from rich.cells import cell_len

from localchat.tui.transcript.markdown.inline import Line
from localchat.tui.transcript.markdown.rows import Look, Piece, Row
from localchat.tui.transcript.markdown.wrap import wrap

MAX_ROWS: Final = 300
"""Longer tables are shown as source text: their layout takes seconds."""

_GAP: Final = 2
_MIN_COLUMN: Final = 8
"""Narrower columns would break numbers and words."""
_RULE: Final = Look("rule")
_PLAIN: Final = Look()


class Table(NamedTuple):
    """Cells of a table."""

    rows: list[list[Line]]
    """The header first."""
    aligns: list[str]
    """`left`, `right` or `center`, by column."""


def table_rows(table: Table, width: int, lead: tuple[Piece, ...]) -> Iterator[Row]:
    room = max(2, width - sum(cell_len(piece.text) for piece in lead))
    columns = max(len(row) for row in table.rows)
    natural = _natural(table, columns)
    widths = column_widths(natural, room - (columns - 1) * _GAP)
    narrow = any(
        cells < min(wanted, _MIN_COLUMN) for cells, wanted in zip(widths, natural, strict=True)
    )
    if narrow:
        yield from _stacked(table, width, lead)
        return
    for number, row in enumerate(table.rows):
        yield from _line(row, widths, table.aligns, lead)
        if number == 0:
            rule = (" " * _GAP).join("─" * cells for cells in widths)
            yield Row((*lead, Piece(rule, _RULE)), len(lead) + 1)


def column_widths(natural: Sequence[int], room: int) -> list[int]:
    """Widths of columns: their natural widths if they fit, else the widest shrink first."""
    widths = [max(1, cells) for cells in natural]
    while sum(widths) > room:
        widest = max(widths)
        if widest <= 3:
            break
        second = max((cells for cells in widths if cells < widest), default=3)
        count = widths.count(widest)
        over = sum(widths) - room
        step = max(1, min(widest - max(second, 3), -(-over // count)))
        for index, cells in enumerate(widths):
            if cells == widest and sum(widths) > room:
                widths[index] = cells - min(step, sum(widths) - room)
    return widths


def _natural(table: Table, columns: int) -> list[int]:
    return [
        max((_cells(row[column]) for row in table.rows if column < len(row)), default=1)
        for column in range(columns)
    ]


def _cells(line: Sequence[Piece]) -> int:
    return sum(cell_len(piece.text) for piece in line)


def _line(
    row: list[Line], widths: list[int], aligns: list[str], lead: tuple[Piece, ...]
) -> Iterator[Row]:
    cells = [
        list(wrap(row[column] if column < len(row) else [], room))
        for column, room in enumerate(widths)
    ]
    for index in range(max(len(cell) for cell in cells)):
        pieces: list[Piece] = list(lead)
        for column, room in enumerate(widths):
            content = cells[column][index].pieces if index < len(cells[column]) else ()
            free = room - _cells(content)
            align = aligns[column] if column < len(aligns) else "left"
            before = free if align == "right" else free // 2 if align == "center" else 0
            after = free - before + (_GAP if column < len(widths) - 1 else 0)
            pieces += [
                *([Piece(" " * before, _PLAIN)] if before else []),
                *content,
                *([Piece(" " * after, _PLAIN)] if after and column < len(widths) - 1 else []),
            ]
        yield Row(tuple(pieces), len(lead))


def _stacked(table: Table, width: int, lead: tuple[Piece, ...]) -> Iterator[Row]:
    """Lay out a table that is too wide: each cell on a line of its own, after the name of its column."""
    header, *body = table.rows
    if not body:
        for name in header:
            yield from wrap(name, width, lead)
    for number, row in enumerate(body):
        if number:
            yield Row((*lead, Piece("─" * 3, _RULE)), len(lead) + 1)
        for column, cell in enumerate(row):
            name = header[column] if column < len(header) else []
            label = [*name, Piece(": ", _PLAIN)] if _cells(name) else []
            yield from wrap([*label, *cell], width, lead)
