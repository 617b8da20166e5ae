"""Mouse selection in coordinates that move with the text while the transcript grows.

Textual stores two offsets per widget and only compares them. Here y is the number of the block times
`ROWS_PER_BLOCK` plus the row in the block, and x is the character in the row. The module is separate from the
widget because it needs no Textual at run time.
"""

from typing import TYPE_CHECKING, Final

from localchat.tui.transcript.markdown import Row

if TYPE_CHECKING:
    from textual.selection import Selection

    from localchat.tui.transcript.layout import BlockLayout

ROWS_PER_BLOCK: Final = 10_000_000


def spans_of(row: Row, selection: "Selection | None", y: int) -> list[tuple[int, int]]:
    """Return the selected characters of a row, without decoration: at most one span."""
    if selection is None:
        return []
    span = selection.get_span(y)
    if span is None:
        return []
    start, end = _characters(row, span)
    if start < end:
        return [(start, end)]
    return []


def _characters(row: Row, span: tuple[int, int]) -> tuple[int, int]:
    """Return start and end of a span of Textual, without decoration and inside the row."""
    start = max(span[0], row.lead_length)
    length = len(row.text)
    # Textual's span to the end of a row ends at -1.
    end = length
    if span[1] >= 0:
        end = min(span[1], length)
    return start, end


def selected_text(layout: "BlockLayout", selection: "Selection") -> str:
    """Return the text of a selection without decoration, with wrapped lines joined."""
    parts: list[str] = []
    for index, item in enumerate(layout.items):
        base = item.number * ROWS_PER_BLOCK
        if selection.start is not None and base + ROWS_PER_BLOCK <= selection.start.y:
            continue
        if selection.end is not None and base > selection.end.y:
            break
        for number, row in enumerate(layout.rows(index).rows):
            span = selection.get_span(base + number)
            if span is None:
                continue
            start, end = _characters(row, span)
            parts.append(row.text[start:end])
            if row.joint is None:
                parts.append("\n")
            elif end == len(row.text):
                parts.append(row.joint)
            else:
                parts.append("")
    return "".join(parts[:-1])
