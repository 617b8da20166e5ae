"""The blocks of a transcript in order, laid out when needed, with the row at which each begins. No textual."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from localchat.session.blocks import AnswerBlock, Block, ReasoningBlock, ToolCallBlock
from localchat.tui.transcript.block_rows import (
    BlockRows,
    card,
    clean,
    estimate,
    indented,
    text_width,
)
from localchat.tui.transcript.markdown import EMPTY, Growing, Row

# Where each block of a long transcript begins: heights with their running sums.


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


_KEPT_ROWS: Final = 8_000
"""Rows of laid out blocks that stay in memory, about 1 KB each; others are laid out again when seen."""


class Place(NamedTuple):
    """A row of a block."""

    at: int
    row: int


@dataclass(slots=True, eq=False)
class LaidOutBlock:
    """A block and how it is shown. `number` sorts blocks and stays with one. `width`: at which `height` was
    counted; 0 while it is estimated. `growing`: its text while it is being written. `drawn`: what stands on the
    screen of it. `frozen`: of which growing text the rows are kept that do not change any more, and these."""

    block: Block
    number: int
    opened: bool = False
    width: int = 0
    card: BlockRows | None = None
    growing: Growing | None = None
    drawn: list[Row] = field(default_factory=list)
    frozen: tuple[Growing | None, list[Row]] = (None, [])

    def lay_out(self, width: int) -> BlockRows:
        """The rows at a width, from what is kept where that fits."""
        if self.card is None or self.width != width:
            self.card = self._laid_out(width)
            self.width = width
        return self.card

    def _laid_out(self, width: int) -> BlockRows:
        rows = None
        if isinstance(self.block, AnswerBlock) and self.growing is not None:
            if self.growing.width != text_width(width):
                self.growing.resize(text_width(width))
                self.frozen = (None, [])
            rows = self._grown(self.growing)
        return card(self.block, width, opened=self.opened, rows=rows)

    def _grown(self, growing: Growing) -> list[Row]:
        """The rows of a text that grows. Those that are frozen are made once: a long answer has hundreds."""
        rows = growing.rows()
        known, kept = self.frozen
        if known is not growing:
            kept = []
            self.frozen = (growing, kept)
        kept += map(indented, rows[len(kept) : growing.frozen])
        return kept + [indented(row) for row in rows[len(kept) :]]


class BlockLayout:
    """Rows from 0 at the top of the first block."""

    def __init__(self) -> None:
        self.width = 0
        self.shown: list[LaidOutBlock] = []
        self._index: dict[str, int] = {}
        self._heights = Heights()
        self._next_number = 0
        self._kept: dict[int, LaidOutBlock] = {}  # by number, the one seen last at the end
        self._kept_rows = 0

    @property
    def total(self) -> int:
        """Rows of all blocks, estimates among them."""
        return self._heights.total

    @property
    def grows(self) -> bool:
        """Whether the last block is an answer that is being written."""
        return bool(self.shown) and self.shown[-1].growing is not None

    def replace(self, blocks: Iterable[Block]) -> None:
        """Show other blocks."""
        self.shown, self._index, self._kept, self._kept_rows = [], {}, {}, 0
        self._heights = Heights()
        for block in blocks:
            self.put(block)

    def find(self, id_: str) -> int | None:
        return self._index.get(id_)

    def put(self, block: Block) -> int:
        """Add a block, or give the one of its id a newer state; its index."""
        index = self._index.get(block.id)
        if index is None:
            self.shown.append(LaidOutBlock(block, self._next_number))
            self._next_number += 1
            self._heights.append(self._estimate(self.shown[-1]))
            self._index[block.id] = len(self.shown) - 1
            return len(self.shown) - 1
        shown = self.shown[index]
        before, shown.block = shown.block, block
        if isinstance(block, AnswerBlock) and isinstance(before, AnswerBlock):
            self._grow(shown, before.text, block.text)
        if before != block:
            self._forget(shown)
        return index

    def _grow(self, shown: LaidOutBlock, before: str, text: str) -> None:
        """A newer state of an answer: more of the same text is one that is being written."""
        if text.startswith(before) and (shown.growing is not None or len(text) > len(before) > 0):
            if shown.growing is None:
                shown.growing = Growing(text_width(self.width), before)
            shown.growing.append(text[len(before) :])
        elif text != before:
            shown.growing = None

    def append(self, id_: str, piece: str) -> int | None:
        """A further piece of an answer, of reasoning, or of a call's arguments."""
        index = self._index.get(id_)
        if index is None:
            return None
        shown = self.shown[index]
        match shown.block:
            case AnswerBlock() as block:
                if shown.growing is None:
                    shown.growing = Growing(text_width(self.width), block.text)
                shown.growing.append(piece)
                shown.block = block._replace(text=block.text + piece)
            case ReasoningBlock() as block:
                shown.block = block._replace(text=block.text + piece)
            case ToolCallBlock() as block:
                shown.block = block._replace(arguments=block.arguments + piece)
            case _:
                return None
        self._forget(shown)
        return index

    def finish(self, id_: str) -> int | None:
        """Parse a text that was growing once as a whole."""
        index = self._index.get(id_)
        if index is None:
            return None
        shown = self.shown[index]
        shown.growing, shown.frozen = None, (None, [])
        self._forget(shown)
        return index

    def remove(self, id_: str) -> bool:
        index = self._index.pop(id_, None)
        if index is None:
            return False
        self._forget(self.shown[index])
        del self.shown[index]
        self._heights.remove(index)
        for at in range(index, len(self.shown)):
            self._index[self.shown[at].block.id] = at
        return True

    def toggle(self, index: int) -> None:
        """Open a folded block, or fold it."""
        shown = self.shown[index]
        shown.opened = not shown.opened
        self._forget(shown)
        shown.width = 0

    def resize(self, width: int) -> None:
        """Estimate all heights for another width."""
        self.width = width
        self._kept, self._kept_rows = {}, 0
        for index, shown in enumerate(self.shown):
            shown.card, shown.width = None, 0
            self._heights.set(index, self._estimate(shown))

    def top(self, index: int) -> int:
        """The row at which a block begins."""
        return self._heights.top(index)

    def height(self, index: int) -> int:
        return self._heights[index]

    def place(self, row: int) -> Place | None:
        """Which row of which block stands at a row; None outside of all."""
        if not 0 <= row < self.total:
            return None
        index = self._heights.at(row)
        return Place(index, row - self._heights.top(index))

    def rows(self, index: int) -> BlockRows:
        """A block, laid out; its height is right from then on."""
        shown = self.shown[index]
        known = shown.card is not None and shown.width == self.width
        laid = shown.lay_out(self.width)
        if not known:
            self._heights.set(index, len(laid.rows))
            self._kept_rows += len(laid.rows)
        self._kept[shown.number] = self._kept.pop(shown.number, shown)
        if self._kept_rows > _KEPT_ROWS:
            self._drop_oldest(shown)
        return laid

    def row(self, place: Place) -> Row:
        rows = self.rows(place.at).rows
        return rows[place.row] if place.row < len(rows) else EMPTY

    def seen(self, first: int, count: int) -> Iterator[tuple[Place, Row]]:
        """What stands at `count` rows from `first` on; it ends where all blocks end."""
        place = self.place(first)
        while place is not None and count > 0:
            rows, height = self.rows(place.at).rows, self._heights[place.at]
            for at in range(place.row, min(height, place.row + count)):
                yield Place(place.at, at), rows[at] if at < len(rows) else EMPTY
            count -= max(0, height - place.row)
            place = Place(place.at + 1, 0) if place.at + 1 < len(self.shown) else None

    def settle_down(self, place: Place, height: int) -> int:
        """Make the heights right of what is seen when `place` is at the top; the row that it is at then. Where
        the estimate of its own block was wrong, the rows below it stay where they were."""
        before = self._heights[place.at]
        estimated = self.shown[place.at].width != self.width
        self.rows(place.at)
        after = self._heights[place.at]
        row = place.row + (after - before if estimated else 0)
        top = self._heights.top(place.at) + min(max(row, 0), max(after - 1, 0))
        index = place.at + 1
        while index < len(self.shown) and self._heights.top(index) < top + height:
            self.rows(index)
            index += 1
        return top

    def settle_up(self, height: int) -> int:
        """The same with the end of the last block at the bottom; the row at the top."""
        index = len(self.shown)
        rows = 0
        while index > 0 and rows < height:
            index -= 1
            rows += len(self.rows(index).rows)
        return max(0, self.total - height)

    def estimated(self, start: int) -> Iterator[int]:
        """Blocks whose height is not known, the ones nearest before `start` first, then those after."""
        for index in (*range(start - 1, -1, -1), *range(start, len(self.shown))):
            if self.shown[index].width != self.width:
                yield index

    def text(self, index: int) -> list[tuple[str, str | None]]:
        """Copied text of each row of a block: without decoration, with what joins it to the next."""
        return [(row.text[row.lead_length :], row.joint) for row in self.rows(index).rows]

    def _estimate(self, shown: LaidOutBlock) -> int:
        return estimate(shown.block, self.width or 80, opened=shown.opened)

    def _forget(self, shown: LaidOutBlock) -> None:
        if shown.card is not None:
            self._kept_rows -= len(shown.card.rows)
            shown.card = None
        self._kept.pop(shown.number, None)

    def _drop_oldest(self, but: LaidOutBlock) -> None:
        for shown in list(self._kept.values()):
            if self._kept_rows <= _KEPT_ROWS // 2:
                return
            if shown is not but:
                self._forget(shown)


def code_blocks(block: Block) -> list[str]:
    """The contents of the code blocks of an answer, as the model wrote them."""
    from localchat.tui.transcript.markdown import parser

    if not isinstance(block, AnswerBlock):
        return []
    tokens = parser.blocks(clean(block.text))
    return [token.content for token in tokens if token.type in ("fence", "code_block")]


__all__ = ["BlockLayout", "LaidOutBlock", "Place", "code_blocks"]
