"""Text search over the rows of a transcript. No Textual."""

from collections.abc import Iterator

from localchat.tui.transcript.layout import BlockLayout, RowPosition
from localchat.tui.transcript.markdown import Row


class TranscriptSearch:
    """Finds rows that contain a text, ignoring case.

    It lays out blocks that were never seen, which changes heights: the caller restores the scroll position.
    """

    def __init__(self, blocks: BlockLayout) -> None:
        self._blocks = blocks
        self._needle = ""
        self.current: RowPosition | None = None
        """The row of the match shown last."""

    @property
    def active(self) -> bool:
        return bool(self._needle)

    def start(self, text: str) -> None:
        """Search for another text; an empty one ends the search."""
        self._needle = text.casefold()
        self.current = None

    def count(self) -> int:
        """Number of matches in all blocks."""
        return sum(
            row.text.casefold().count(self._needle)
            for index in range(len(self._blocks.items))
            for row in self._blocks.rows(index).rows
        )

    @property
    def number(self) -> int:
        """Number of the first match in the row shown last, counted from 1; 0 if none was shown."""
        if self.current is None:
            return 0
        block, row = self.current
        before = (
            one.text
            for index in range(block + 1)
            for at, one in enumerate(self._blocks.rows(index).rows)
            if index < block or at < row
        )
        return sum(text.casefold().count(self._needle) for text in before) + 1

    def next(self, delta: int, top: RowPosition) -> RowPosition | None:
        """The next row with a match (negative `delta`: the previous one) after the current one, else after
        `top`. Wraps around; None where there is no match."""
        start = self.current or top
        if delta > 0:
            return self.first_from(start, 1) or self.first_from(RowPosition(0, -1), 1)
        last = len(self._blocks.items) - 1
        end = RowPosition(last, len(self._blocks.rows(last).rows))
        return self.first_from(start, -1) or self.first_from(end, -1)

    def first_from(self, start: RowPosition, step: int) -> RowPosition | None:
        """The first match after `start` (`step` 1) or before it (-1), without wrapping around."""
        index = start.block
        while 0 <= index < len(self._blocks.items):
            rows = self._blocks.rows(index).rows
            at = start.row + step if index == start.block else 0 if step > 0 else len(rows) - 1
            while 0 <= at < len(rows):
                if self._needle in rows[at].text.casefold():
                    return RowPosition(index, at)
                at += step
            index += step
        return None

    def spans(self, row: Row) -> Iterator[tuple[int, int]]:
        """Matches in a row, as start and end in characters."""
        text = row.text.casefold()
        at = text.find(self._needle)
        while at >= 0:
            yield at, at + len(self._needle)
            at = text.find(self._needle, at + len(self._needle))
