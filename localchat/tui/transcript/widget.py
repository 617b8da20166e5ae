"""The conversation on the screen: what the app says to it, what the reader does with it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len
from rich.style import Style
from textual import events
from textual.message import Message
from textual.selection import Selection
from textual.strip import Strip

from localchat.session.blocks import Block, NoticeBlock
from localchat.tui.transcript.layout import LaidOutBlock, RowPosition, code_blocks
from localchat.tui.transcript.markdown import Look, Piece, Row
from localchat.tui.transcript.scroll_view import VirtualScrollView
from localchat.tui.transcript.selection import ROWS_PER_BLOCK, selected_text, spans_of
from localchat.tui.transcript.strips import StripRenderer

_FOCUS_BAR: Final = Piece("▎ ", Look("user.bar"))


class Transcript(VirtualScrollView, can_focus=True):
    """Blocks of a conversation. It follows the end unless the reader scrolled up."""

    ALLOW_SELECT = True
    DEFAULT_CSS = """
    Transcript {
        background: $background;
        color: $foreground;
        overflow-x: hidden;
        overflow-y: scroll;
        scrollbar-size-vertical: 1;
        scrollbar-background: $background;
        scrollbar-background-hover: $background;
        scrollbar-background-active: $background;
    }
    """

    @dataclass
    class OfferTaken(Message):
        """The reader chose what a notice offers."""

        action: str

    @dataclass
    class LinkClicked(Message):
        """A link of http or https was clicked."""

        url: str

    @dataclass
    class BlockClicked(Message):
        """A block was clicked, where nothing else is."""

        id: str

    @dataclass
    class CopyRequested(Message):
        """This text should go to the clipboard."""

        text: str

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.focused_id: str | None = None
        self._needle = ""
        self._mark: RowPosition | None = None
        self._selected: Selection | None = None

    # what the app says

    def show(self, blocks: Iterable[Block]) -> None:
        """Show these blocks and nothing else, from their end."""
        self._blocks.replace(blocks)
        self._changed_ids.clear()
        self.focused_id = None
        self._end_slack = 0
        self.to_end()

    def put(self, block: Block) -> None:
        """Add a block at the end, or give the one of its id a newer state."""
        known = self._blocks.find(block.id) is not None
        self._blocks.put(block)
        self._mark_changed(block.id, now=not known)

    def append_text(self, id_: str, piece: str) -> None:
        """A further piece of a text that is being written. Drawn soon, together with others."""
        if self._blocks.append(id_, piece) is not None:
            self._mark_changed(id_)

    def finish(self, id_: str) -> None:
        """The text of a block is whole."""
        if self._blocks.finish(id_) is not None:
            self._end_slack = 0
            self._mark_changed(id_, now=True)

    def drop(self, id_: str) -> None:
        if self._blocks.remove(id_):
            self._changed_ids.discard(id_)
            self.focused_id = None if self.focused_id == id_ else self.focused_id
            self._reflow()
            self.refresh()

    def toggle(self, id_: str) -> None:
        """Open what is folded in a block, or fold it."""
        index = self._blocks.find(id_)
        if index is not None:
            position = self._top_position()
            self._blocks.toggle(index)
            self._blocks.rows(index)
            self._reflow(position)
            self.refresh()

    def open_fold(self, id_: str) -> None:
        """Open what is folded in a block."""
        index = self._blocks.find(id_)
        if index is not None and not self._blocks.items[index].is_open:
            self.toggle(id_)

    def block(self, id_: str) -> Block | None:
        """The block of this id, with all text that has come."""
        index = self._blocks.find(id_)
        return None if index is None else self._blocks.items[index].block

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(item.block for item in self._blocks.items)

    def code_blocks(self, id_: str) -> list[str]:
        """The code blocks of an answer, as they were written."""
        block = self.block(id_)
        return [] if block is None else code_blocks(block)

    def take_offer(self, number: int) -> bool:
        """Take an offer of the last notice that has any, counted from 1; whether there was one."""
        for item in reversed(self._blocks.items):
            if isinstance(item.block, NoticeBlock) and item.block.offers:
                if not 1 <= number <= len(item.block.offers):
                    return False
                self.post_message(self.OfferTaken(item.block.offers[number - 1].action))
                return True
        return False

    def focus_block(self, delta: int) -> str | None:
        """Move the mark on one block by so many blocks (from the end when there is none); its id."""
        count = len(self._blocks.items)
        if not count:
            return None
        at = None if self.focused_id is None else self._blocks.find(self.focused_id)
        index = count - 1 if at is None else min(max(at + delta, 0), count - 1)
        self.focused_id = self._blocks.items[index].block.id
        self._bring(index)
        self.refresh()
        return self.focused_id

    def unfocus_block(self) -> None:
        """Mark no block."""
        self.focused_id = None
        self.refresh()

    # search

    def mark(self, text: str) -> int:
        """Show every place where `text` stands (letters of either case); empty for none. How many there are."""
        self._needle, self._mark = text.casefold(), None
        self.refresh()
        if not self._needle:
            return 0
        with self._keeping_position():
            return sum(
                row.text.casefold().count(self._needle)
                for index in range(len(self._blocks.items))
                for row in self._blocks.rows(index).rows
            )

    def next_mark(self, delta: int) -> bool:
        """Show the next mark (negative: the one before, 0: the nearest), as seen from the one shown last, else
        from the top of the screen. Behind the last comes the first again."""
        if not self._needle or not self._blocks.items:
            return False
        with self._keeping_position():
            position = self._other_mark(delta) if delta else self._nearest_mark()
        if position is None:
            return False
        self._mark = position
        if not self._is_seen(position):
            self.following = False
            self._reflow(position)
        self.refresh()
        return True

    def _nearest_mark(self) -> RowPosition | None:
        top = self._blocks.position(round(self.scroll_y)) or RowPosition(0, 0)
        below = self._search_from(RowPosition(top.block, top.row - 1), 1)
        return below if below is not None and self._is_seen(below) else self._other_mark(-1)

    def _other_mark(self, delta: int) -> RowPosition | None:
        start = self._mark or self._blocks.position(round(self.scroll_y)) or RowPosition(0, 0)
        last = len(self._blocks.items) - 1
        end = (
            RowPosition(0, -1)
            if delta > 0
            else RowPosition(last, len(self._blocks.rows(last).rows))
        )
        step = 1 if delta > 0 else -1
        return self._search_from(start, step) or self._search_from(end, step)

    def _is_seen(self, position: RowPosition) -> bool:
        return (
            0
            <= self._blocks.top(position.block) + position.row - round(self.scroll_y)
            < self.size.height
        )

    def _search_from(self, start: RowPosition, step: int) -> RowPosition | None:
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

    def _bring(self, index: int) -> None:
        """Scroll so that a block is seen, from its beginning."""
        self._blocks.rows(index)
        top, height = self._blocks.top(index), self.size.height
        now = round(self.scroll_y)
        if now <= top and top + self._blocks.height(index) <= now + height:
            return
        self.following = top + self._blocks.height(index) >= self._blocks.total and (
            self._blocks.height(index) <= height
        )
        self._reflow(None if self.following else RowPosition(index, 0))

    # painting

    def _strips(self, first: int, count: int) -> list[Strip]:
        self._selected = self.text_selection  # asked once, and not for each row
        return super()._strips(first, count)

    def _row_strip(self, painter: StripRenderer, position: RowPosition, row: Row) -> Strip:
        item = self._blocks.items[position.block]
        if item.block.id == self.focused_id and row.pieces and position.row:
            row = row._replace(pieces=(_FOCUS_BAR, *row.pieces[1:]))
        dimmed = bool(getattr(item.block, "dimmed", False))
        over: list[tuple[int, int, Style]] = []
        if self._selected is not None:
            number = item.number * ROWS_PER_BLOCK + position.row
            spans = spans_of(row, self._selected, number)
            over = [(start, end, painter.palette.selection()) for start, end in spans]
        if self._needle:
            palette = painter.palette
            style = palette.selection() if position == self._mark else palette.mark()
            over += [(*span, style) for span in _found(row, self._needle)]
        if over:
            return painter.overlaid_strip(row, over, dimmed=dimmed)
        return painter.strip(row, dimmed=dimmed)

    # mouse

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        with self._keeping_position():
            return selected_text(self._blocks, selection), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        if self.text_selection is not None:
            return
        position = self._blocks.position(event.y + round(self.scroll_y))
        if position is None:
            return
        item = self._blocks.items[position.block]
        if (url := self._link_at(self._blocks.row(position), event.x)) and event.button == 1:
            self.post_message(self.LinkClicked(url))
        elif (hit := self._blocks.rows(position.block).hits.get(position.row)) is not None:
            self._activate(item, hit.action)
        else:
            self.post_message(self.BlockClicked(item.block.id))

    def _activate(self, item: LaidOutBlock, action: str) -> None:
        if action:
            self.post_message(self.OfferTaken(action))
        else:
            self.toggle(item.block.id)

    def _link_at(self, row: Row, x: int) -> str:
        at = 0
        for piece in row.pieces:
            at += cell_len(piece.text)
            if x < at:
                return piece.look.link
        return ""


def _found(row: Row, needle: str) -> Iterable[tuple[int, int]]:
    text = row.text.casefold()
    at = text.find(needle)
    while at >= 0:
        yield at, at + len(needle)
        at = text.find(needle, at + len(needle))
