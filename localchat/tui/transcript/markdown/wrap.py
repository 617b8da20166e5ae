"""Wraps lines to a width in terminal cells: between words, or between graphemes.

Only the white space at a break is dropped, and `Row.joint` stores it. Uses `rich._unicode_data`, a private
table that tests/tui/test_textual_internals.py checks.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import islice
from typing import NamedTuple

from rich._unicode_data import load as load_cell_table
from rich.cells import cell_len, split_graphemes

from localchat.tui.transcript.markdown.rows import Piece, Row


def cells(pieces: Iterable[Piece]) -> int:
    """Return the width of pieces in cells."""
    return sum(cell_len(piece.text) for piece in pieces)


class WrappedLine(NamedTuple):
    """Characters `start` to `end` of a line as a row. `joint` is that of `Row`."""

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
    """Yield the rows of a line, at most `width` cells each.

    A row has room for at least 2 cells after the lead. `first` leads the first row, and
    `later` the others. Both have the same width.
    """
    if not line:
        yield Row(first, len(first), None, ground)
        return
    if later is None:
        later = first
    text = "".join(piece.text for piece in line)
    room = max(2, width - cells(first))
    if len(text) <= room and _is_narrow(text):
        yield Row((*first, *line), len(first), None, ground)
        return
    lead = first
    # Index and first character of the piece in which the row begins.
    index = 0
    offset = 0
    for part in line_breaks(text, room):
        while index < len(line) - 1 and offset + len(line[index].text) <= part.start:
            offset += len(line[index].text)
            index += 1
        remaining = islice(line, index, None)
        pieces = lead + tuple(_slice(remaining, part.start - offset, part.end - offset))
        yield Row(pieces, len(lead), part.joint, ground)
        lead = later


def line_breaks(text: str, width: int) -> Iterator[WrappedLine]:
    """Return the rows of `text` at a width."""
    if _is_narrow(text):
        return _narrow_breaks(text, width)
    return _wide_breaks(text, width)


def _is_narrow(text: str) -> bool:
    """Whether every character takes one cell. Tests each distinct character once."""
    return text.isascii() or all(map(_is_narrow_letter, set(text)))


@lru_cache(maxsize=16_384)
def _is_narrow_letter(letter: str) -> bool:
    return _narrow().fullmatch(letter) is not None


@cache
def _narrow() -> re.Pattern[str]:
    """Return a pattern of the characters that Rich's table of other widths does not list."""
    other = load_cell_table("auto").widths
    ranges = "".join(
        f"{chr(low)!s}-{chr(high)!s}" for low, high, cells in other if cells != 1 and low > 0x7F
    )
    return re.compile(f"[^{ranges}]*")


def _narrow_breaks(text: str, width: int) -> Iterator[WrappedLine]:
    start = 0
    length = len(text)
    while length - start > width:
        space = text.rfind(" ", start, start + width + 1)
        if space <= start or not text[start:space].strip():
            yield WrappedLine(start, start + width, "")
            start += width
            continue
        end = space
        while end > start and text[end - 1] == " ":
            end -= 1
        after = space + 1
        while after < length and text[after] == " ":
            after += 1
        if after >= length:  # only white space is left
            break
        yield WrappedLine(start, end, text[end:after])
        start = after
    end = length
    if not text[start + width :].strip():
        end = min(length, start + width)
    yield WrappedLine(start, end, None)


def _wide_breaks(text: str, width: int) -> Iterator[WrappedLine]:
    """Break by graphemes, also before and after a wide grapheme such as CJK or emoji."""
    spans, _ = split_graphemes(text)
    starts = [start for start, _, _ in spans] + [len(text)]
    widths = [width for _, _, width in spans]
    if "\u200d" in text:  # Rich's two measures disagree on joiners without neighbours
        widths = [max(count, cell_len(text[start:end])) for start, end, count in spans]
    spaces = [text[start:end] == " " for start, end, _ in spans]
    first = 0
    count = len(spans)
    while True:
        end = first
        used = 0
        while end < count and (used + widths[end] <= width or end == first):
            used += widths[end]
            end += 1
        after = end
        while after < count and spaces[after]:
            after += 1
        if after == count:  # only white space is left, if anything
            yield WrappedLine(starts[first], starts[end], None)
            return
        stop = _break_before(end, first, widths, spaces)
        if stop is None:
            yield WrappedLine(starts[first], starts[end], "")
            first = end
            continue
        last = stop
        after = stop
        while last > first and spaces[last - 1]:
            last -= 1
        while after < count and spaces[after]:
            after += 1
        yield WrappedLine(starts[first], starts[last], text[starts[last] : starts[after]])
        first = after


def _break_before(end: int, first: int, widths: list[int], spaces: list[bool]) -> int | None:
    """Return the last grapheme before which the row may break. None if the row would be blank."""
    for stop in range(end, first, -1):
        if spaces[stop] or spaces[stop - 1] or widths[stop] == 2 or widths[stop - 1] == 2:
            if all(spaces[first:stop]):
                return None
            return stop
    return None


def _slice(pieces: Iterable[Piece], start: int, end: int) -> Iterator[Piece]:
    """Yield characters `start` to `end` of the pieces."""
    offset = 0
    for piece in pieces:
        length = len(piece.text)
        low = max(start - offset, 0)
        high = min(end - offset, length)
        if low < high:
            if high - low == length:
                yield piece
            else:
                yield Piece(piece.text[low:high], piece.look)
        offset += length
        if offset >= end:
            return
