"""Where each block of a long transcript begins: heights with their running sums."""

from bisect import bisect_right
from collections.abc import Iterable


class Heights:
    """Heights of blocks in rows. Changing one costs the blocks after it: the last, which streams, nothing."""

    def __init__(self, heights: Iterable[int] = ()) -> None:
        self._heights = list(heights)
        self._tops: list[int] = [0]
        self._valid = 0  # tops[: valid + 1] are right

    def __len__(self) -> int:
        return len(self._heights)

    def __getitem__(self, index: int) -> int:
        return self._heights[index]

    @property
    def total(self) -> int:
        return self.top(len(self._heights))

    def top(self, index: int) -> int:
        """The first row of a block; for the index after the last, the number of all rows."""
        while self._valid < index:
            top = self._tops[self._valid] + self._heights[self._valid]
            self._valid += 1
            if self._valid < len(self._tops):
                self._tops[self._valid] = top
            else:
                self._tops.append(top)
        return self._tops[index]

    def at(self, row: int) -> int:
        """The block that holds a row (the nearest one outside of all; -1 when there is none)."""
        if not self._heights:
            return -1
        self.top(len(self._heights))
        found = bisect_right(self._tops, row, 0, len(self._heights)) - 1
        return min(max(found, 0), len(self._heights) - 1)

    def set(self, index: int, height: int) -> None:
        if self._heights[index] != height:
            self._heights[index] = height
            self._valid = min(self._valid, index)

    def append(self, height: int) -> None:
        self._heights.append(height)

    def insert(self, index: int, height: int) -> None:
        self._heights.insert(index, height)
        self._valid = min(self._valid, index)

    def remove(self, index: int) -> None:
        del self._heights[index]
        self._valid = min(self._valid, index)
