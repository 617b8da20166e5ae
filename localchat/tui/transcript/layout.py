"""The blocks of a transcript in order, laid out when needed, with the row at which each begins. No textual."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from localchat.session.blocks import AnswerBlock, Block, ReasoningBlock, ToolCallBlock
from localchat.tui.transcript.block_rows import (
    BlockRows,
    block_rows,
    clean,
    estimate_height,
    indent_row,
    text_width,
)
from localchat.tui.transcript.markdown import EMPTY, IncrementalMarkdown, Row

# Where each block of a long transcript begins: heights with their running sums.


class BlockHeights:
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

    def index_at(self, row: int) -> int:
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


_MAX_CACHED_ROWS: Final = 8_000
"""Rows of laid out blocks that stay in memory, about 1 KB each; others are laid out again when seen."""


class RowPosition(NamedTuple):
    """A row of a block."""

    block: int
    row: int


@dataclass(slots=True, eq=False)
class LaidOutBlock:
    """A block and how it is shown. `number` sorts blocks and stays with one. `width`: at which `height` was
    counted; 0 while it is estimated. `growing`: its text while it is being written. `drawn`: what stands on the
    screen of it. `frozen`: of which growing text the rows are kept that do not change any more, and these."""

    block: Block
    number: int
    is_open: bool = False
    width: int = 0
    block_rows: BlockRows | None = None
    markdown: IncrementalMarkdown | None = None
    drawn_rows: list[Row] = field(default_factory=list)
    frozen: tuple[IncrementalMarkdown | None, list[Row]] = (None, [])

    def lay_out(self, width: int) -> BlockRows:
        """The rows at a width, from what is kept where that fits."""
        if self.block_rows is None or self.width != width:
            self.block_rows = self._rows_at(width)
            self.width = width
        return self.block_rows

    def _rows_at(self, width: int) -> BlockRows:
        rows = None
        if isinstance(self.block, AnswerBlock) and self.markdown is not None:
            if self.markdown.width != text_width(width):
                self.markdown.resize(text_width(width))
                self.frozen = (None, [])
            rows = self._streaming_rows(self.markdown)
        return block_rows(self.block, width, is_open=self.is_open, rows=rows)

    def _streaming_rows(self, markdown: IncrementalMarkdown) -> list[Row]:
        """The rows of a text that grows. Those that are frozen are made once: a long answer has hundreds."""
        rows = markdown.rows()
        known, kept = self.frozen
        if known is not markdown:
            kept = []
            self.frozen = (markdown, kept)
        kept += map(indent_row, rows[len(kept) : markdown.frozen])
        return kept + [indent_row(row) for row in rows[len(kept) :]]


class BlockLayout:
    """Rows from 0 at the top of the first block."""

    def __init__(self) -> None:
        self.width = 0
        self.items: list[LaidOutBlock] = []
        self._index: dict[str, int] = {}
        self._heights = BlockHeights()
        self._next_number = 0
        self._cached: dict[int, LaidOutBlock] = {}  # by number, the one seen last at the end
        self._cached_rows = 0

    @property
    def total(self) -> int:
        """Rows of all blocks, estimates among them."""
        return self._heights.total

    @property
    def is_streaming(self) -> bool:
        """Whether the last block is an answer that is being written."""
        return bool(self.items) and self.items[-1].markdown is not None

    def replace(self, blocks: Iterable[Block]) -> None:
        """Show other blocks."""
        self.items, self._index, self._cached, self._cached_rows = [], {}, {}, 0
        self._heights = BlockHeights()
        for block in blocks:
            self.put(block)

    def find(self, id_: str) -> int | None:
        return self._index.get(id_)

    def put(self, block: Block) -> int:
        """Add a block, or give the one of its id a newer state; its index."""
        index = self._index.get(block.id)
        if index is None:
            self.items.append(LaidOutBlock(block, self._next_number))
            self._next_number += 1
            self._heights.append(self._estimate(self.items[-1]))
            self._index[block.id] = len(self.items) - 1
            return len(self.items) - 1
        item = self.items[index]
        before, item.block = item.block, block
        if isinstance(block, AnswerBlock) and isinstance(before, AnswerBlock):
            self._extend_answer(item, before.text, block.text)
        if before != block:
            self._drop_rows(item)
        return index

    def _extend_answer(self, item: LaidOutBlock, before: str, text: str) -> None:
        """A newer state of an answer: more of the same text is one that is being written."""
        if text.startswith(before) and (item.markdown is not None or len(text) > len(before) > 0):
            if item.markdown is None:
                item.markdown = IncrementalMarkdown(text_width(self.width), before)
            item.markdown.append(text[len(before) :])
        elif text != before:
            item.markdown = None

    def append(self, id_: str, piece: str) -> int | None:
        """A further piece of an answer, of reasoning, or of a call's arguments."""
        index = self._index.get(id_)
        if index is None:
            return None
        item = self.items[index]
        match item.block:
            case AnswerBlock() as block:
                if item.markdown is None:
                    item.markdown = IncrementalMarkdown(text_width(self.width), block.text)
                item.markdown.append(piece)
                item.block = block._replace(text=block.text + piece)
            case ReasoningBlock() as block:
                item.block = block._replace(text=block.text + piece)
            case ToolCallBlock() as block:
                item.block = block._replace(arguments=block.arguments + piece)
            case _:
                return None
        self._drop_rows(item)
        return index

    def finish(self, id_: str) -> int | None:
        """Parse a text that was growing once as a whole."""
        index = self._index.get(id_)
        if index is None:
            return None
        item = self.items[index]
        item.markdown, item.frozen = None, (None, [])
        self._drop_rows(item)
        return index

    def remove(self, id_: str) -> bool:
        index = self._index.pop(id_, None)
        if index is None:
            return False
        self._drop_rows(self.items[index])
        del self.items[index]
        self._heights.remove(index)
        for at in range(index, len(self.items)):
            self._index[self.items[at].block.id] = at
        return True

    def toggle(self, index: int) -> None:
        """Open a folded block, or fold it."""
        item = self.items[index]
        item.is_open = not item.is_open
        self._drop_rows(item)
        item.width = 0

    def resize(self, width: int) -> None:
        """Estimate all heights for another width."""
        self.width = width
        self._cached, self._cached_rows = {}, 0
        for index, item in enumerate(self.items):
            item.block_rows, item.width = None, 0
            self._heights.set(index, self._estimate(item))

    def top(self, index: int) -> int:
        """The row at which a block begins."""
        return self._heights.top(index)

    def height(self, index: int) -> int:
        return self._heights[index]

    def position(self, row: int) -> RowPosition | None:
        """Which row of which block stands at a row; None outside of all."""
        if not 0 <= row < self.total:
            return None
        index = self._heights.index_at(row)
        return RowPosition(index, row - self._heights.top(index))

    def rows(self, index: int) -> BlockRows:
        """A block, laid out; its height is right from then on."""
        item = self.items[index]
        known = item.block_rows is not None and item.width == self.width
        laid = item.lay_out(self.width)
        if not known:
            self._heights.set(index, len(laid.rows))
            self._cached_rows += len(laid.rows)
        self._cached[item.number] = self._cached.pop(item.number, item)
        if self._cached_rows > _MAX_CACHED_ROWS:
            self._evict(item)
        return laid

    def row(self, position: RowPosition) -> Row:
        rows = self.rows(position.block).rows
        return rows[position.row] if position.row < len(rows) else EMPTY

    def visible_rows(self, first: int, count: int) -> Iterator[tuple[RowPosition, Row]]:
        """What stands at `count` rows from `first` on; it ends where all blocks end."""
        position = self.position(first)
        while position is not None and count > 0:
            rows, height = self.rows(position.block).rows, self._heights[position.block]
            for at in range(position.row, min(height, position.row + count)):
                yield RowPosition(position.block, at), rows[at] if at < len(rows) else EMPTY
            count -= max(0, height - position.row)
            position = (
                RowPosition(position.block + 1, 0) if position.block + 1 < len(self.items) else None
            )

    def measure_from(self, position: RowPosition, height: int) -> int:
        """Make the heights right of what is seen when `place` is at the top; the row that it is at then. Where
        the estimate of its own block was wrong, the rows below it stay where they were."""
        before = self._heights[position.block]
        unmeasured = self.items[position.block].width != self.width
        self.rows(position.block)
        after = self._heights[position.block]
        row = position.row + (after - before if unmeasured else 0)
        top = self._heights.top(position.block) + min(max(row, 0), max(after - 1, 0))
        index = position.block + 1
        while index < len(self.items) and self._heights.top(index) < top + height:
            self.rows(index)
            index += 1
        return top

    def measure_end(self, height: int) -> int:
        """The same with the end of the last block at the bottom; the row at the top."""
        index = len(self.items)
        rows = 0
        while index > 0 and rows < height:
            index -= 1
            rows += len(self.rows(index).rows)
        return max(0, self.total - height)

    def unmeasured(self, start: int) -> Iterator[int]:
        """Blocks whose height is not known, the ones nearest before `start` first, then those after."""
        for index in (*range(start - 1, -1, -1), *range(start, len(self.items))):
            if self.items[index].width != self.width:
                yield index

    def text(self, index: int) -> list[tuple[str, str | None]]:
        """Copied text of each row of a block: without decoration, with what joins it to the next."""
        return [(row.text[row.lead_length :], row.joint) for row in self.rows(index).rows]

    def _estimate(self, item: LaidOutBlock) -> int:
        return estimate_height(item.block, self.width or 80, is_open=item.is_open)

    def _drop_rows(self, item: LaidOutBlock) -> None:
        if item.block_rows is not None:
            self._cached_rows -= len(item.block_rows.rows)
            item.block_rows = None
        self._cached.pop(item.number, None)

    def _evict(self, but: LaidOutBlock) -> None:
        for item in list(self._cached.values()):
            if self._cached_rows <= _MAX_CACHED_ROWS // 2:
                return
            if item is not but:
                self._drop_rows(item)


def code_blocks(block: Block) -> list[str]:
    """The contents of the code blocks of an answer, as the model wrote them."""
    from localchat.tui.transcript.markdown import parser

    if not isinstance(block, AnswerBlock):
        return []
    tokens = parser.blocks(clean(block.text))
    return [token.content for token in tokens if token.type in ("fence", "code_block")]


__all__ = ["BlockLayout", "LaidOutBlock", "RowPosition", "code_blocks"]
