"""Layout of a transcript: blocks in order, laid out when needed, and their first rows. No Textual."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from localchat.engine.request import Attachment
from localchat.session.blocks import (
    AnswerBlock,
    Block,
    NoticeBlock,
    Offer,
    ReasoningBlock,
    SummaryBlock,
    UserBlock,
)
from localchat.session.view import node_of
from localchat.tui.attachments import clean
from localchat.tui.pictures.painter import PicturePainter
from localchat.tui.transcript.block_rows import (
    BlockRows,
    block_rows,
    estimate_height,
    indent_row,
    text_width,
)
from localchat.tui.transcript.markdown import EMPTY, IncrementalMarkdown, Row
from localchat.tui.transcript.markdown.code import Highlighting


class BlockHeights:
    """Heights of blocks in rows, and the first row of each."""

    def __init__(self, heights: Iterable[int] = ()) -> None:
        self._heights = list(heights)
        self._tops: list[int] = []
        """First row of each block and, at the end, the total. Empty after a change."""

    def __getitem__(self, index: int) -> int:
        return self._heights[index]

    @property
    def total(self) -> int:
        return self.top(len(self._heights))

    def top(self, index: int) -> int:
        """Return the first row of a block, or the total after the last block."""
        if not self._tops:
            self._tops = list(accumulate(self._heights, initial=0))
        return self._tops[index]

    def index_at(self, row: int) -> int:
        """Return the block that contains a row, or the nearest one. -1 without blocks."""
        if not self._heights or row >= self.total:
            return len(self._heights) - 1
        return max(bisect_right(self._tops, row) - 1, 0)

    def set(self, index: int, height: int) -> None:
        if self._heights[index] != height:
            self._heights[index] = height
            self._tops = []

    def append(self, height: int) -> None:
        self._heights.append(height)
        self._tops = []

    def remove(self, index: int) -> None:
        del self._heights[index]
        self._tops = []


class RowPosition(NamedTuple):
    """Index of a block, and of a row in it."""

    block: int
    row: int


@dataclass(slots=True, eq=False)
class LaidOutBlock:
    """A block and its rows."""

    block: Block
    number: int
    """Number that orders the blocks and never changes."""
    is_open: bool = False
    width: int = 0
    """Width that the height belongs to. 0 while the height is an estimate."""
    block_rows: BlockRows | None = None
    """Rows of the block. None if it is not laid out."""
    markdown: IncrementalMarkdown | None = None
    """Text of a streaming answer."""
    drawn_rows: list[Row] = field(default_factory=list)
    """Rows of the last redraw."""
    first_changed: int = 0
    """First row in which any layout since the last redraw differs from it."""
    frozen: tuple[IncrementalMarkdown | None, list[Row]] = (None, [])
    """A streaming text, and its indented rows that no longer change."""

    unfinished: list[Highlighting] = field(default_factory=list)
    """Incomplete highlighting of its code."""

    def lay_out(self, width: int, painter: PicturePainter) -> BlockRows:
        """Return the rows at a width, cached until block or width change."""
        if self.block_rows is None or self.width != width:
            self.block_rows = self._rows_at(width, painter)
            self.width = width
            # These rows may be drawn before the next redraw, which must then replace all of them. A row can
            # change and change back, for example when a backtick closes code and another one reopens it.
            prefix = common_prefix(self.drawn_rows, self.block_rows.rows)
            self.first_changed = min(self.first_changed, prefix)
        return self.block_rows

    def _rows_at(self, width: int, painter: PicturePainter) -> BlockRows:
        rows = None
        self.unfinished = []
        if isinstance(self.block, AnswerBlock) and self.markdown is not None:
            if self.markdown.width != text_width(width):
                self.markdown.resize(text_width(width))
                self.frozen = (None, [])
            rows = self._streaming_rows(self.markdown)
        return block_rows(
            self.block,
            width,
            is_open=self.is_open,
            rows=rows,
            unfinished=self.unfinished,
            painter=painter,
        )

    def _streaming_rows(self, markdown: IncrementalMarkdown) -> list[Row]:
        """Return the indented rows of a streaming text.

        A long answer has hundreds of frozen rows, so each of them is indented only once.
        """
        rows = markdown.rows()
        frozen_text, frozen_rows = self.frozen
        if frozen_text is not markdown:
            frozen_rows = []
            self.frozen = (markdown, frozen_rows)
        frozen_rows += map(indent_row, rows[len(frozen_rows) : markdown.frozen])
        return frozen_rows + [indent_row(row) for row in rows[len(frozen_rows) :]]


class BlockLayout:
    """Blocks and their rows, numbered from 0 at the top of the first block.

    Size: every operation on a block changes the heights too.
    """

    def __init__(self) -> None:
        self.width = 0
        self.painter = PicturePainter()
        self.items: list[LaidOutBlock] = []
        self._index: dict[str, int] = {}
        self._heights = BlockHeights()
        self._next_number = 0

    @property
    def total(self) -> int:
        """Number of rows of all blocks, partly estimated."""
        return self._heights.total

    def replace(self, blocks: Iterable[Block]) -> None:
        """Replace all blocks."""
        self.items = []
        self._index = {}
        self._heights = BlockHeights()
        for block in blocks:
            self.put(block)

    def find(self, id_: str) -> int | None:
        return self._index.get(id_)

    def last_offers(self) -> NoticeBlock | None:
        """Return the last notice with offers."""
        for item in reversed(self.items):
            if isinstance(item.block, NoticeBlock) and item.block.offers:
                return item.block
        return None

    def open_offers(self) -> tuple[Offer, ...]:
        """Return the offers of the last notice with offers, unless a message followed it."""
        for item in reversed(self.items):
            if not isinstance(item.block, NoticeBlock):
                return ()
            if item.block.offers:
                return item.block.offers
        return ()

    def question(self, start: int, step: int) -> int | None:
        """Return the index of the nearest question, or None.

        It is before (`step` -1) or after (1) `start`.
        """
        if step < 0:
            end = -1
        else:
            end = len(self.items)
        for index in range(start + step, end, step):
            if isinstance(self.items[index].block, UserBlock):
                return index
        return None

    def put(self, block: Block) -> int:
        """Add a block, or replace the one with its id. Return its index."""
        index = self._index.get(block.id)
        if index is None:
            self.items.append(LaidOutBlock(block, self._next_number))
            self._next_number += 1
            self._heights.append(self._estimate(self.items[-1]))
            self._index[block.id] = len(self.items) - 1
            return len(self.items) - 1
        item = self.items[index]
        old = item.block
        item.block = block
        if isinstance(block, AnswerBlock) and isinstance(old, AnswerBlock):
            self._extend_answer(item, old.text, block.text)
        if old != block:
            item.block_rows = None
        return index

    def _extend_answer(self, item: LaidOutBlock, old: str, text: str) -> None:
        """Keep the incremental Markdown of an answer if the new text continues the old one."""
        if text.startswith(old) and (item.markdown is not None or len(text) > len(old) > 0):
            if item.markdown is None:
                item.markdown = IncrementalMarkdown(text_width(self.width), old)
            item.markdown.append(text[len(old) :])
        elif text != old:
            item.markdown = None

    def append(self, id_: str, piece: str) -> int | None:
        """Append to an answer or reasoning. Return the index of the block, or None."""
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
            case _:
                return None
        item.block_rows = None
        return index

    def draw_again(self, attachment: Attachment) -> list[str]:
        """Discard the rows of all blocks with an attachment, and return their ids."""
        ids = []
        for item in self.items:
            if isinstance(item.block, UserBlock) and attachment in item.block.attachments:
                item.block_rows = None
                ids.append(item.block.id)
        return ids

    def finish(self, id_: str) -> int | None:
        """Lay out a complete text as a whole. Return the index of the block, or None."""
        index = self._index.get(id_)
        if index is None:
            return None
        item = self.items[index]
        item.markdown = None
        item.frozen = (None, [])
        item.block_rows = None
        return index

    def remove(self, id_: str) -> bool:
        index = self._index.pop(id_, None)
        if index is None:
            return False
        del self.items[index]
        self._heights.remove(index)
        for position in range(index, len(self.items)):
            self._index[self.items[position].block.id] = position
        return True

    def toggle(self, index: int) -> None:
        """Open a folded block, or fold it."""
        item = self.items[index]
        item.is_open = not item.is_open
        item.block_rows = None
        item.width = 0

    def resize(self, width: int) -> None:
        """Change the width, and estimate all heights again."""
        self.width = width
        for index, item in enumerate(self.items):
            item.block_rows = None
            item.width = 0
            self._heights.set(index, self._estimate(item))

    def top(self, index: int) -> int:
        """Return the first row of a block."""
        return self._heights.top(index)

    def height(self, index: int) -> int:
        return self._heights[index]

    def position(self, row: int) -> RowPosition | None:
        """Return the position of a row of the transcript. None outside of it."""
        if not 0 <= row < self.total:
            return None
        index = self._heights.index_at(row)
        return RowPosition(index, row - self._heights.top(index))

    def rows(self, index: int) -> BlockRows:
        """Return the rows of a block. Lays it out if needed, which makes its height exact."""
        item = self.items[index]
        is_cached = item.block_rows is not None and item.width == self.width
        block_rows = item.lay_out(self.width, self.painter)
        if not is_cached:
            self._heights.set(index, len(block_rows.rows))
        return block_rows

    def redraw(self, index: int) -> int:
        """Lay out a block. Return the first row, of the transcript, that changed since the last redraw."""
        rows = self.rows(index).rows
        item = self.items[index]
        first = self.top(index) + item.first_changed
        item.drawn_rows = rows
        item.first_changed = len(rows)
        return first

    def row(self, position: RowPosition) -> Row:
        rows = self.rows(position.block).rows
        if position.row < len(rows):
            return rows[position.row]
        return EMPTY

    def row_of(self, index: int, find: Callable[[str], int | None]) -> int | None:
        """Return the row of a block where `find` finds a position in its text. None if it does not."""
        rows = self.rows(index).rows
        ends = ["\n" if row.joint is None else row.joint for row in rows]
        lines = [row.text[row.lead_length :] + end for row, end in zip(rows, ends, strict=True)]
        position = find("".join(lines))
        if position is None:
            return None
        return bisect_right(list(accumulate(map(len, lines))), position)

    def find_in_message(self, id_: str, find: Callable[[str], int | None]) -> RowPosition | None:
        """Return the row of a match in a message, and unfold its block.

        Without a match, return the first row. None if the message has no block.
        """
        indices = [index for index, item in enumerate(self.items) if node_of(item.block.id) == id_]
        for index in indices:
            row = self.row_of(index, find)
            if row is None and not self.items[index].is_open:
                self.toggle(index)
                row = self.row_of(index, find)
                if row is None:
                    self.toggle(index)
            if row is not None:
                return RowPosition(index, row)
        return next((RowPosition(index, 0) for index in indices), None)

    def visible_rows(self, first: int, count: int) -> Iterator[tuple[RowPosition, Row]]:
        """Yield up to `count` rows from `first` on, with their positions."""
        position = self.position(first)
        if position is None:
            return
        block, first_row = position
        while block < len(self.items) and count > 0:
            rows = self.rows(block).rows
            height = self._heights[block]
            for row in range(first_row, min(height, first_row + count)):
                if row < len(rows):
                    yield RowPosition(block, row), rows[row]
                else:
                    yield RowPosition(block, row), EMPTY
            count -= max(0, height - first_row)
            block += 1
            first_row = 0

    def measure_from(self, position: RowPosition, height: int) -> int:
        """Lay out the view with `position` at its top, and return its row.

        If the height of its block was an estimate, the rows below the block do not move.
        """
        estimate = self._heights[position.block]
        was_estimated = self.items[position.block].width != self.width
        self.rows(position.block)
        exact = self._heights[position.block]
        row = position.row
        if was_estimated:
            row += exact - estimate
        top = self._heights.top(position.block) + min(max(row, 0), max(exact - 1, 0))
        index = position.block + 1
        while index < len(self.items) and self._heights.top(index) < top + height:
            self.rows(index)
            index += 1
        return top

    def measure_end(self, height: int) -> int:
        """Lay out the view with the end at its bottom. Return its top row."""
        index = len(self.items)
        rows = 0
        while index > 0 and rows < height:
            index -= 1
            rows += len(self.rows(index).rows)
        return max(0, self.total - height)

    def unmeasured(self, start: int) -> Iterator[int]:
        """Yield the blocks with estimated heights: those before `start`, nearest first, then the others."""
        for index in (*range(start - 1, -1, -1), *range(start, len(self.items))):
            if self.items[index].width != self.width:
                yield index

    def unhighlighted(self, first: int, count: int) -> LaidOutBlock | None:
        """Return a block in these rows whose code is not highlighted yet, or None."""
        start = self._heights.index_at(first)
        end = self._heights.index_at(first + count - 1)
        for item in self.items[max(0, start) : end + 1]:
            if item.unfinished:
                return item
        return None

    def highlight(self, item: LaidOutBlock, budget_s: float) -> bool:
        """Highlight code of a block for about this long. Return True once it is complete."""
        item.unfinished[0].advance(budget_s)
        if item.unfinished[0].is_complete:
            del item.unfinished[0]
        if not item.unfinished:
            item.block_rows = None
        return not item.unfinished

    def _estimate(self, item: LaidOutBlock) -> int:
        return estimate_height(item.block, self.width or 80, is_open=item.is_open)


def code_blocks(block: Block) -> list[str]:
    """Return the contents of the code blocks of an answer, unchanged."""
    from localchat.tui.transcript.markdown import parser

    if not isinstance(block, AnswerBlock | SummaryBlock):
        return []
    tokens = parser.blocks(clean(block.text))
    return [token.content for token in tokens if token.type in ("fence", "code_block")]


def common_prefix(old: list[Row], new: list[Row]) -> int:
    """Return the number of equal rows at the beginning."""
    for index, (old_row, new_row) in enumerate(zip(old, new, strict=False)):
        # Most rows are identical objects, which is the faster test.
        if old_row is not new_row and old_row != new_row:
            return index
    return min(len(old), len(new))
