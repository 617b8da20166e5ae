"""Text search over the rows of a transcript. No Textual."""

from collections.abc import Iterator

from localchat.tui.transcript.layout import BlockLayout, RowPosition
from localchat.tui.transcript.markdown import Row


class TranscriptSearch:
    """Finds rows that contain a text, ignoring case.

    The search lays out blocks that were never seen, which changes heights. The caller restores the scroll
    position.
    """

    def __init__(self, blocks: BlockLayout) -> None:
        self._blocks = blocks
        self._needle = ""
        self.current: RowPosition | None = None
        """Row of the match that was shown last."""

    @property
    def active(self) -> bool:
        return bool(self._needle)

    def start(self, text: str) -> None:
        """Search for another text. An empty text ends the search."""
        self._needle = text.casefold()
        self.current = None

    def count(self) -> int:
        """Return the number of matches in all blocks."""
        return sum(
            row.text.casefold().count(self._needle)
            for index in range(len(self._blocks.items))
            for row in self._blocks.rows(index).rows
        )

    @property
    def number(self) -> int:
        """Number of the first match in the row that was shown last, from 1. 0 if none was shown."""
        if self.current is None:
            return 0
        count = 0
        for block in range(self.current.block + 1):
            rows = self._blocks.rows(block).rows
            if block == self.current.block:
                rows = rows[: self.current.row]
            count += sum(row.text.casefold().count(self._needle) for row in rows)
        return count + 1

    def next(self, delta: int, top: RowPosition) -> RowPosition | None:
        """Return the next row with a match, or the previous one if `delta` is negative. None without a match.

        Starts at the current match, or else at `top`, and wraps around.
        """
        start = self.current or top
        if delta > 0:
            return self.first_from(start, 1) or self.first_from(RowPosition(0, -1), 1)
        last = len(self._blocks.items) - 1
        end = RowPosition(last, len(self._blocks.rows(last).rows))
        return self.first_from(start, -1) or self.first_from(end, -1)

    def first_from(self, start: RowPosition, step: int) -> RowPosition | None:
        """Return the first match after `start` (`step` 1) or before it (-1), without wrapping around."""
        index = start.block
        while 0 <= index < len(self._blocks.items):
            rows = self._blocks.rows(index).rows
            if index == start.block:
                row = start.row + step
            elif step > 0:
                row = 0
            else:
                row = len(rows) - 1
            while 0 <= row < len(rows):
                if self._needle in rows[row].text.casefold():
                    return RowPosition(index, row)
                row += step
            index += step
        return None

    def spans(self, row: Row) -> Iterator[tuple[int, int]]:
        """Yield the matches in a row, as start and end in characters."""
        text = row.text.casefold()
        start = text.find(self._needle)
        while start >= 0:
            end = start + len(self._needle)
            yield start, end
            start = text.find(self._needle, end)
