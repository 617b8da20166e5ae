"""Selection with the mouse, in places that stay with the text while the transcript grows above and below.

Textual keeps two offsets per widget and compares them only. Their y here is the number of the block times
`BLOCK_ROWS` plus the row in it, their x the character in the row.
"""

from typing import TYPE_CHECKING, Final

from localchat.tui.transcript.markdown import Row

if TYPE_CHECKING:
    from textual.selection import Selection

    from localchat.tui.transcript.layout import BlockLayout

ROWS_PER_BLOCK: Final = 10_000_000


def spans_of(row: Row, selection: "Selection | None", y: int) -> list[tuple[int, int]]:
    """The stretch of characters of a row that is selected, decoration left out."""
    span = None if selection is None else selection.get_span(y)
    if span is None:
        return []
    start, end = max(span[0], row.lead_length), span[1]
    length = len(row.text)
    end = length if end < 0 else min(end, length)
    return [(start, end)] if start < end else []


def selected_text(reel: "BlockLayout", selection: "Selection") -> str:
    """The text of a selection: a line that was wrapped is one line again, decoration is left out."""
    parts: list[str] = []
    for index, item in enumerate(reel.items):
        base = item.number * ROWS_PER_BLOCK
        if selection.start is not None and base + ROWS_PER_BLOCK <= selection.start.y:
            continue
        if selection.end is not None and base > selection.end.y:
            break
        for at, row in enumerate(reel.rows(index).rows):
            span = selection.get_span(base + at)
            if span is None:
                continue
            start, end = max(span[0], row.lead_length), span[1]
            text = row.text
            whole = end < 0 or end >= len(text)
            parts.append(text[start : len(text) if whole else end])
            parts.append("\n" if row.joint is None else row.joint if whole else "")
    return "".join(parts[:-1])
