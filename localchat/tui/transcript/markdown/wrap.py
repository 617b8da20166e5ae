"""Wraps lines to a width in terminal cells: between words, else between graphemes.

Only the white space at a break is dropped, and `Row.joint` keeps it. Uses `rich._unicode_data`, a private
table that tests/tui/test_textual_internals.py checks.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import islice
from typing import NamedTuple

from rich._unicode_data import load as load_cell_table
from rich.cells import cell_len, split_graphemes

from localchat.tui.transcript.markdown.rows import EMPTY, Piece, Row


class WrappedLine(NamedTuple):
    """Characters `start` to `end` of a line as one row; `joint` as in `Row`."""

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
    """Rows of one line, at most `width` cells each (at least 2 after the lead).

    `first` leads the first row, `later` the others; both have the same width.
    """
    if not line:
        yield Row(first, len(first), None, ground) if first or ground else EMPTY
        return
    later = first if later is None else later
    text = line[0].text if len(line) == 1 else "".join(piece.text for piece in line)
    room = max(2, width - sum(cell_len(piece.text) for piece in first))
    if len(text) <= room and _is_narrow(text):
        yield Row((*first, *line), len(first), None, ground)
        return
    lead = first
    # the piece in which the row begins, and the start of that piece
    index = 0
    at = 0
    for part in line_breaks(text, room):
        while index < len(line) - 1 and at + len(line[index].text) <= part.start:
            at += len(line[index].text)
            index += 1
        pieces = lead + tuple(_slice(islice(line, index, None), part.start - at, part.end - at))
        yield Row(pieces, len(lead), part.joint, ground)
        lead = later


def line_breaks(text: str, width: int) -> Iterator[WrappedLine]:
    """The rows of `text` at a width."""
    if _is_narrow(text):
        return _narrow_breaks(text, width)
    return _wide_breaks(text, width)


def _is_narrow(text: str) -> bool:
    """Whether every character takes one cell, so that characters count as cells. Tests each character once."""
    return text.isascii() or all(map(_is_narrow_letter, set(text)))


@lru_cache(maxsize=16_384)
def _is_narrow_letter(letter: str) -> bool:
    return _narrow().fullmatch(letter) is not None


@cache
def _narrow() -> re.Pattern[str]:
    """Matches characters of one cell: those not in Rich's table of other widths."""
    other = load_cell_table("auto").widths
    ranges = "".join(
        f"{chr(low)!s}-{chr(high)!s}" for low, high, cells in other if cells != 1 and low > 0x7F
    )
    return re.compile(f"[^{ranges}]*")


def _narrow_breaks(text: str, width: int) -> Iterator[WrappedLine]:
    at = 0
    length = len(text)
    while length - at > width:
        space = text.rfind(" ", at, at + width + 1)
        if space <= at or not text[at:space].strip():
            yield WrappedLine(at, at + width, "")
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
        yield WrappedLine(at, end, text[end:after])
        at = after
    yield WrappedLine(
        at, min(length, at + width) if not text[at + width :].strip() else length, None
    )


def _wide_breaks(text: str, width: int) -> Iterator[WrappedLine]:
    """Breaks by graphemes; also allowed before and after a wide one (CJK, emoji)."""
    spans, _ = split_graphemes(text)
    starts = [start for start, _, _ in spans] + [len(text)]
    cells = [cells for _, _, cells in spans]
    if "\u200d" in text:  # Rich's two measures disagree on joiners that join nothing
        cells = [max(count, cell_len(text[start:end])) for start, end, count in spans]
    spaces = [text[start:end] == " " for start, end, _ in spans]
    at = 0
    count = len(spans)
    while True:
        end = at
        used = 0
        while end < count and (used + cells[end] <= width or end == at):
            used += cells[end]
            end += 1
        after = end
        while after < count and spaces[after]:
            after += 1
        if after == count:  # only white space is left, if anything
            yield WrappedLine(starts[at], starts[end], None)
            return
        stop = _break_before(end, at, cells, spaces)
        if stop is None:
            yield WrappedLine(starts[at], starts[end], "")
            at = end
            continue
        last = stop
        after = stop
        while last > at and spaces[last - 1]:
            last -= 1
        while after < count and spaces[after]:
            after += 1
        yield WrappedLine(starts[at], starts[last], text[starts[last] : starts[after]])
        at = after


def _break_before(end: int, at: int, cells: list[int], spaces: list[bool]) -> int | None:
    """The last grapheme up to `end` before which the row may break; None if the row would be blank."""
    for stop in range(end, at, -1):
        if spaces[stop] or spaces[stop - 1] or cells[stop] == 2 or cells[stop - 1] == 2:
            return stop if not all(spaces[at:stop]) else None
    return None


def _slice(pieces: Iterable[Piece], start: int, end: int) -> Iterator[Piece]:
    """Characters `start` to `end` of the pieces."""
    at = 0
    for piece in pieces:
        length = len(piece.text)
        low = max(start - at, 0)
        high = min(end - at, length)
        if low < high:
            yield piece if high - low == length else Piece(piece.text[low:high], piece.look)
        at += length
        if at >= end:
            return
