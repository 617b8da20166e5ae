"""Mouse selection in coordinates that stay with the text while the transcript grows.

Textual keeps two offsets per widget and only compares them. Their y here is the number of the block times
`ROWS_PER_BLOCK` plus the row in it, their x the character in the row. Apart from the widget because it needs no
Textual at run time.
"""

from typing import TYPE_CHECKING, Final

from localchat.tui.transcript.markdown import Row

if TYPE_CHECKING:
    from textual.selection import Selection

    from localchat.tui.transcript.layout import BlockLayout

ROWS_PER_BLOCK: Final = 10_000_000


def spans_of(row: Row, selection: "Selection | None", y: int) -> list[tuple[int, int]]:
    """The selected characters of a row, without decoration: at most one span."""
    span = None if selection is None else selection.get_span(y)
    if span is None:
        return []
    start = max(span[0], row.lead_length)
    end = span[1]
    length = len(row.text)
    end = length if end < 0 else min(end, length)
    return [(start, end)] if start < end else []


def selected_text(layout: "BlockLayout", selection: "Selection") -> str:
    """Text of a selection, with wrapped lines joined again and without decoration."""
    parts: list[str] = []
    for index, item in enumerate(layout.items):
        base = item.number * ROWS_PER_BLOCK
        if selection.start is not None and base + ROWS_PER_BLOCK <= selection.start.y:
            continue
        if selection.end is not None and base > selection.end.y:
            break
        for at, row in enumerate(layout.rows(index).rows):
            span = selection.get_span(base + at)
            if span is None:
                continue
            start = max(span[0], row.lead_length)
            end = span[1]
            text = row.text
            whole = end < 0 or end >= len(text)
            parts.append(text[start : len(text) if whole else end])
            parts.append("\n" if row.joint is None else row.joint if whole else "")
    return "".join(parts[:-1])
