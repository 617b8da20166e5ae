"""Layout of a transcript: blocks in order, laid out when needed, and the row at which each begins. No
Textual."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from rich.cells import cell_len

from localchat.session.blocks import (
    AnswerBlock,
    Block,
    NoticeBlock,
    Offer,
    ReasoningBlock,
    SummaryBlock,
    ToolCallBlock,
    UserBlock,
)
from localchat.tui.transcript.block_rows import (
    BlockRows,
    block_rows,
    clean,
    estimate_height,
    indent_row,
    text_width,
)
from localchat.tui.transcript.markdown import EMPTY, IncrementalMarkdown, Row
from localchat.tui.transcript.markdown.code import Highlighting


class BlockHeights:
    """Heights of blocks in rows, with running sums.

    A change costs time for the blocks after it: none for the last one, which streams.
    """

    def __init__(self, heights: Iterable[int] = ()) -> None:
        self._heights = list(heights)
        self._tops: list[int] = [0]
        self._valid = 0  # tops[: valid + 1] are up to date

    def __len__(self) -> int:
        return len(self._heights)

    def __getitem__(self, index: int) -> int:
        return self._heights[index]

    @property
    def total(self) -> int:
        return self.top(len(self._heights))

    def top(self, index: int) -> int:
        """The first row of a block; for the index after the last one, the total."""
        while self._valid < index:
            top = self._tops[self._valid] + self._heights[self._valid]
            self._valid += 1
            if self._valid < len(self._tops):
                self._tops[self._valid] = top
            else:
                self._tops.append(top)
        return self._tops[index]

    def index_at(self, row: int) -> int:
        """The block that contains a row, else the nearest one; -1 if there is none."""
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
"""Rows of blocks to keep, about 1 KB each; other blocks are laid out again when they are shown."""


class RowPosition(NamedTuple):
    """A row of a block, by index of both."""

    block: int
    row: int


@dataclass(slots=True, eq=False)
class LaidOutBlock:
    """A block and its rows."""

    block: Block
    number: int
    """Orders blocks; the number of a block never changes."""
    is_open: bool = False
    width: int = 0
    """Width that its height belongs to; 0 while the height is an estimate."""
    block_rows: BlockRows | None = None
    """None while not laid out, or discarded to save memory."""
    markdown: IncrementalMarkdown | None = None
    """The text of an answer while it streams."""
    drawn_rows: list[Row] = field(default_factory=list)
    """The rows of the last redraw."""
    frozen: tuple[IncrementalMarkdown | None, list[Row]] = (None, [])
    """Indented rows of a streaming text that do not change any more, and that text."""

    unfinished: list[Highlighting] = field(default_factory=list)
    """Highlighting of its code that is not complete yet."""

    def lay_out(self, width: int) -> BlockRows:
        """The rows at a width, kept until block or width change."""
        if self.block_rows is None or self.width != width:
            self.block_rows = self._rows_at(width)
            self.width = width
        return self.block_rows

    def _rows_at(self, width: int) -> BlockRows:
        rows = None
        self.unfinished = []
        if isinstance(self.block, AnswerBlock) and self.markdown is not None:
            if self.markdown.width != text_width(width):
                self.markdown.resize(text_width(width))
                self.frozen = (None, [])
            rows = self._streaming_rows(self.markdown)
        return block_rows(
            self.block, width, is_open=self.is_open, rows=rows, unfinished=self.unfinished
        )

    def _streaming_rows(self, markdown: IncrementalMarkdown) -> list[Row]:
        """Indented rows of a streaming text. Frozen ones are indented once: a long answer has hundreds."""
        rows = markdown.rows()
        known, kept = self.frozen
        if known is not markdown:
            kept = []
            self.frozen = (markdown, kept)
        kept += map(indent_row, rows[len(kept) : markdown.frozen])
        return kept + [indent_row(row) for row in rows[len(kept) :]]


class BlockLayout:
    """Blocks and their rows, numbered from 0 at the top of the first block."""

    def __init__(self) -> None:
        self.width = 0
        self.items: list[LaidOutBlock] = []
        self._index: dict[str, int] = {}
        self._heights = BlockHeights()
        self._next_number = 0
        self._cached: dict[int, LaidOutBlock] = {}  # by number, least recently used first
        self._cached_rows = 0

    @property
    def total(self) -> int:
        """Number of rows of all blocks, partly estimated."""
        return self._heights.total

    @property
    def is_streaming(self) -> bool:
        """Whether the last block is an answer that still grows."""
        return bool(self.items) and self.items[-1].markdown is not None

    def replace(self, blocks: Iterable[Block]) -> None:
        """Replace all blocks."""
        self.items = []
        self._index = {}
        self._cached = {}
        self._cached_rows = 0
        self._heights = BlockHeights()
        for block in blocks:
            self.put(block)

    def find(self, id_: str) -> int | None:
        return self._index.get(id_)

    def last_offers(self) -> NoticeBlock | None:
        """The last notice that offers something."""
        notices = (each.block for each in reversed(self.items))
        return next((one for one in notices if isinstance(one, NoticeBlock) and one.offers), None)

    def open_offers(self) -> tuple[Offer, ...]:
        """The offers of the last notice that has some, while nothing was said after it."""
        for item in reversed(self.items):
            if not isinstance(item.block, NoticeBlock):
                return ()
            if item.block.offers:
                return item.block.offers
        return ()

    def question(self, start: int, step: int) -> int | None:
        """The nearest question before (`step` -1) or after (1) the block at index `start`; None if there is
        none."""
        end = -1 if step < 0 else len(self.items)
        indices = range(start + step, end, step)
        return next((n for n in indices if isinstance(self.items[n].block, UserBlock)), None)

    def put(self, block: Block) -> int:
        """Add a block, or replace the one with its id; returns its index."""
        index = self._index.get(block.id)
        if index is None:
            self.items.append(LaidOutBlock(block, self._next_number))
            self._next_number += 1
            self._heights.append(self._estimate(self.items[-1]))
            self._index[block.id] = len(self.items) - 1
            return len(self.items) - 1
        item = self.items[index]
        before = item.block
        item.block = block
        if isinstance(block, AnswerBlock) and isinstance(before, AnswerBlock):
            self._extend_answer(item, before.text, block.text)
        if before != block:
            self._discard_rows(item)
        return index

    def _extend_answer(self, item: LaidOutBlock, before: str, text: str) -> None:
        """Keep the incremental Markdown of an answer if the new text continues the old one."""
        if text.startswith(before) and (item.markdown is not None or len(text) > len(before) > 0):
            if item.markdown is None:
                item.markdown = IncrementalMarkdown(text_width(self.width), before)
            item.markdown.append(text[len(before) :])
        elif text != before:
            item.markdown = None

    def append(self, id_: str, piece: str) -> int | None:
        """Append to an answer, to reasoning or to a tool call's arguments; returns the index of the block."""
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
        self._discard_rows(item)
        return index

    def finish(self, id_: str) -> int | None:
        """Lay out a complete text once as a whole; returns the index of the block."""
        index = self._index.get(id_)
        if index is None:
            return None
        item = self.items[index]
        item.markdown = None
        item.frozen = (None, [])
        self._discard_rows(item)
        return index

    def remove(self, id_: str) -> bool:
        index = self._index.pop(id_, None)
        if index is None:
            return False
        self._discard_rows(self.items[index])
        del self.items[index]
        self._heights.remove(index)
        for at in range(index, len(self.items)):
            self._index[self.items[at].block.id] = at
        return True

    def toggle(self, index: int) -> None:
        """Open a folded block, or fold it."""
        item = self.items[index]
        item.is_open = not item.is_open
        self._discard_rows(item)
        item.width = 0

    def resize(self, width: int) -> None:
        """Change the width and estimate all heights anew."""
        self.width = width
        self._cached = {}
        self._cached_rows = 0
        for index, item in enumerate(self.items):
            item.block_rows = None
            item.width = 0
            self._heights.set(index, self._estimate(item))

    def top(self, index: int) -> int:
        """The first row of a block."""
        return self._heights.top(index)

    def height(self, index: int) -> int:
        return self._heights[index]

    def position(self, row: int) -> RowPosition | None:
        """The block and its row at a row of the transcript; None outside."""
        if not 0 <= row < self.total:
            return None
        index = self._heights.index_at(row)
        return RowPosition(index, row - self._heights.top(index))

    def rows(self, index: int) -> BlockRows:
        """Rows of a block. Lays it out if needed; its height is exact from then on."""
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
        """`count` rows from `first` on, with their positions; fewer at the end."""
        position = self.position(first)
        while position is not None and count > 0:
            rows = self.rows(position.block).rows
            height = self._heights[position.block]
            for at in range(position.row, min(height, position.row + count)):
                yield RowPosition(position.block, at), rows[at] if at < len(rows) else EMPTY
            count -= max(0, height - position.row)
            position = (
                RowPosition(position.block + 1, 0) if position.block + 1 < len(self.items) else None
            )

    def measure_from(self, position: RowPosition, height: int) -> int:
        """Lay out what is visible with `position` at the top; returns its row. If the height of its block was
        an estimate, the rows below the block stay where they are."""
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
        """Lay out what is visible with the end at the bottom; returns the row at the top."""
        index = len(self.items)
        rows = 0
        while index > 0 and rows < height:
            index -= 1
            rows += len(self.rows(index).rows)
        return max(0, self.total - height)

    def unmeasured(self, start: int) -> Iterator[int]:
        """Blocks with estimated heights: first those before `start`, nearest first, then the others."""
        for index in (*range(start - 1, -1, -1), *range(start, len(self.items))):
            if self.items[index].width != self.width:
                yield index

    def unhighlighted(self, first: int, count: int) -> LaidOutBlock | None:
        """A block in `count` rows from `first` on whose code has no final colours yet."""
        start = self._heights.index_at(first)
        end = self._heights.index_at(first + count - 1)
        return next((each for each in self.items[max(0, start) : end + 1] if each.unfinished), None)

    def highlight(self, item: LaidOutBlock, budget_s: float) -> bool:
        """Highlight code of a block for about this long. True once it has its final colours."""
        item.unfinished[0].advance(budget_s)
        if item.unfinished[0].is_complete:
            del item.unfinished[0]
        if not item.unfinished:
            self._discard_rows(item)
        return not item.unfinished

    def text(self, index: int) -> list[tuple[str, str | None]]:
        """Text of each row of a block for copying: without decoration, and with its joint to the next row."""
        return [(row.text[row.lead_length :], row.joint) for row in self.rows(index).rows]

    def _estimate(self, item: LaidOutBlock) -> int:
        return estimate_height(item.block, self.width or 80, is_open=item.is_open)

    def _discard_rows(self, item: LaidOutBlock) -> None:
        if item.block_rows is not None:
            self._cached_rows -= len(item.block_rows.rows)
            item.block_rows = None
        self._cached.pop(item.number, None)

    def _evict(self, but: LaidOutBlock) -> None:
        for item in list(self._cached.values()):
            if self._cached_rows <= _MAX_CACHED_ROWS // 2:
                return
            if item is not but:
                self._discard_rows(item)


def code_blocks(block: Block) -> list[str]:
    """Contents of the code blocks of an answer, as the model wrote them."""
    from localchat.tui.transcript.markdown import parser

    if not isinstance(block, AnswerBlock | SummaryBlock):
        return []
    tokens = parser.blocks(clean(block.text))
    return [token.content for token in tokens if token.type in ("fence", "code_block")]


def common_prefix(old: list[Row], new: list[Row]) -> int:
    """How many rows at the beginning are equal."""
    for index, (before, after) in enumerate(zip(old, new, strict=False)):
        if before is not after and before != after:
            return index
    return min(len(old), len(new))


def link_at(row: Row, x: int) -> str:
    """The link in cell `x` of a row; empty if there is none."""
    at = 0
    for piece in row.pieces:
        at += cell_len(piece.text)
        if x < at:
            return piece.look.link
    return ""
