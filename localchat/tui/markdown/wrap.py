"""Lines wrapped to a width in terminal cells: between words, else between graphemes; nothing is dropped but
the white space at a break, and that is kept in `Row.joint`."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.cells import cell_len, split_graphemes

from localchat.tui.markdown.rows import Piece, Row


class Cut(NamedTuple):
    """Characters `start` to `end` are one row; `joint` as in Row."""

    start: int
    end: int
    joint: str | None


def wrap(
    line: Sequence[Piece],
    width: int,
    first: tuple[Piece, ...] = (),
    later: tuple[Piece, ...] | None = None,
    ground: str = "",
) -> Iterator[Row]:
    """The rows of one line, at most `width` cells each (never less than 2 besides the lead). `first` leads
    the first row, `later` the others; both are equally wide."""
    later = first if later is None else later
    text = "".join(piece.text for piece in line)
    room = max(2, width - sum(cell_len(piece.text) for piece in first))
    lead = first
    for cut in cuts(text, room):
        pieces = lead + tuple(_slice(line, cut.start, cut.end))
        yield Row(pieces, len(lead), cut.joint, ground)
        lead = later


def cuts(text: str, width: int) -> Iterator[Cut]:
    """Where to wrap `text`."""
    return _ascii_cuts(text, width) if text.isascii() else _wide_cuts(text, width)


def _ascii_cuts(text: str, width: int) -> Iterator[Cut]:
    at, length = 0, len(text)
    while length - at > width:
        space = text.rfind(" ", at, at + width + 1)
        if space <= at or not text[at:space].strip():
            yield Cut(at, at + width, "")
            at += width
            continue
        end = space
        while end > at and text[end - 1] == " ":
            end -= 1
        after = space + 1
        while after < length and text[after] == " ":
            after += 1
        if after >= length:  # only white space is left
            break
        yield Cut(at, end, text[end:after])
        at = after
    yield Cut(at, min(length, at + width) if not text[at + width :].strip() else length, None)


def _wide_cuts(text: str, width: int) -> Iterator[Cut]:
    """The same by graphemes; a break is also allowed on either side of a wide one (CJK, emoji)."""
    spans, total = split_graphemes(text)
    if total <= width:
        yield Cut(0, len(text), None)
        return
    row_start = 0  # index into spans
    used = 0
    best = -1  # the next row would start at this span
    index = 0
    while index < len(spans):
        start, end, cells = spans[index]
        if text[start:end] == " ":
            best = index + 1
        elif cells == 2 and index > row_start:
            best = index
        if used + cells > width and index > row_start:
            if text[start:end] == " ":
                index += 1
                best = index
            begin = best if best > row_start else index
            yield _cut(
                text, spans[row_start][0], spans[begin][0] if begin < len(spans) else len(text)
            )
            row_start, index, used, best = begin, begin, 0, -1
            continue
        used += cells
        if cells == 2:
            best = index + 1
        index += 1
    if row_start < len(spans):
        yield Cut(spans[row_start][0], len(text), None)


def _cut(text: str, start: int, after: int) -> Cut:
    """A row that ends where the next starts, without the white space between (unless it is all there is)."""
    end = after
    while end > start and text[end - 1] == " ":
        end -= 1
    if end == start:
        end = after
    last = after >= len(text)
    return Cut(start, end, None if last else text[end:after])


def _slice(line: Sequence[Piece], start: int, end: int) -> Iterator[Piece]:
    at = 0
    for piece in line:
        length = len(piece.text)
        low, high = max(start - at, 0), min(end - at, length)
        if low < high:
            yield piece if high - low == length else Piece(piece.text[low:high], piece.look)
        at += length
        if at >= end:
            return
