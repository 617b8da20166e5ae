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
from localchat.tui.transcript.layout import LaidOutBlock, Place, code_blocks
from localchat.tui.transcript.markdown import Look, Piece, Row
from localchat.tui.transcript.scroll_view import VirtualScrollView
from localchat.tui.transcript.selection import BLOCK_ROWS, selected_text, spans_of
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
    class CopyWanted(Message):
        """This text should go to the clipboard."""

        text: str

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.focused_id: str | None = None
        self._needle = ""
        self._mark: Place | None = None
        self._selected: Selection | None = None

    # what the app says

    def show(self, blocks: Iterable[Block]) -> None:
        """Show these blocks and nothing else, from their end."""
        self._reel.replace(blocks)
        self._dirty.clear()
        self.focused_id = None
        self._slack = 0
        self.to_end()

    def put(self, block: Block) -> None:
        """Add a block at the end, or give the one of its id a newer state."""
        known = self._reel.find(block.id) is not None
        self._reel.put(block)
        self._touch(block.id, now=not known)

    def append_text(self, id_: str, piece: str) -> None:
        """A further piece of a text that is being written. Drawn soon, together with others."""
        if self._reel.append(id_, piece) is not None:
            self._touch(id_)

    def finish(self, id_: str) -> None:
        """The text of a block is whole."""
        if self._reel.finish(id_) is not None:
            self._slack = 0
            self._touch(id_, now=True)

    def drop(self, id_: str) -> None:
        if self._reel.remove(id_):
            self._dirty.discard(id_)
            self.focused_id = None if self.focused_id == id_ else self.focused_id
            self._restage()
            self.refresh()

    def toggle(self, id_: str) -> None:
        """Open what is folded in a block, or fold it."""
        index = self._reel.find(id_)
        if index is not None:
            place = self._top_place()
            self._reel.toggle(index)
            self._reel.rows(index)
            self._restage(place)
            self.refresh()

    def open_fold(self, id_: str) -> None:
        """Open what is folded in a block."""
        index = self._reel.find(id_)
        if index is not None and not self._reel.shown[index].opened:
            self.toggle(id_)

    def block(self, id_: str) -> Block | None:
        """The block of this id, with all text that has come."""
        index = self._reel.find(id_)
        return None if index is None else self._reel.shown[index].block

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(shown.block for shown in self._reel.shown)

    def code_blocks(self, id_: str) -> list[str]:
        """The code blocks of an answer, as they were written."""
        block = self.block(id_)
        return [] if block is None else code_blocks(block)

    def take_offer(self, number: int) -> bool:
        """Take an offer of the last notice that has any, counted from 1; whether there was one."""
        for shown in reversed(self._reel.shown):
            if isinstance(shown.block, NoticeBlock) and shown.block.offers:
                if not 1 <= number <= len(shown.block.offers):
                    return False
                self.post_message(self.OfferTaken(shown.block.offers[number - 1].action))
                return True
        return False

    def focus_block(self, delta: int) -> str | None:
        """Move the mark on one block by so many blocks (from the end when there is none); its id."""
        count = len(self._reel.shown)
        if not count:
            return None
        at = None if self.focused_id is None else self._reel.find(self.focused_id)
        index = count - 1 if at is None else min(max(at + delta, 0), count - 1)
        self.focused_id = self._reel.shown[index].block.id
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
        with self._steady():
            return sum(
                row.text.casefold().count(self._needle)
                for index in range(len(self._reel.shown))
                for row in self._reel.rows(index).rows
            )

    def next_mark(self, delta: int) -> bool:
        """Show the next mark (negative: the one before, 0: the nearest), as seen from the one shown last, else
        from the top of the screen. Behind the last comes the first again."""
        if not self._needle or not self._reel.shown:
            return False
        with self._steady():
            place = self._other_mark(delta) if delta else self._nearest_mark()
        if place is None:
            return False
        self._mark = place
        if not self._is_seen(place):
            self.following = False
            self._restage(place)
        self.refresh()
        return True

    def _nearest_mark(self) -> Place | None:
        top = self._reel.place(round(self.scroll_y)) or Place(0, 0)
        below = self._marked_place(Place(top.at, top.row - 1), 1)
        return below if below is not None and self._is_seen(below) else self._other_mark(-1)

    def _other_mark(self, delta: int) -> Place | None:
        start = self._mark or self._reel.place(round(self.scroll_y)) or Place(0, 0)
        last = len(self._reel.shown) - 1
        end = Place(0, -1) if delta > 0 else Place(last, len(self._reel.rows(last).rows))
        step = 1 if delta > 0 else -1
        return self._marked_place(start, step) or self._marked_place(end, step)

    def _is_seen(self, place: Place) -> bool:
        return 0 <= self._reel.top(place.at) + place.row - round(self.scroll_y) < self.size.height

    def _marked_place(self, start: Place, step: int) -> Place | None:
        index = start.at
        while 0 <= index < len(self._reel.shown):
            rows = self._reel.rows(index).rows
            at = start.row + step if index == start.at else 0 if step > 0 else len(rows) - 1
            while 0 <= at < len(rows):
                if self._needle in rows[at].text.casefold():
                    return Place(index, at)
                at += step
            index += step
        return None

    def _bring(self, index: int) -> None:
        """Scroll so that a block is seen, from its beginning."""
        self._reel.rows(index)
        top, height = self._reel.top(index), self.size.height
        now = round(self.scroll_y)
        if now <= top and top + self._reel.height(index) <= now + height:
            return
        self.following = top + self._reel.height(index) >= self._reel.total and (
            self._reel.height(index) <= height
        )
        self._restage(None if self.following else Place(index, 0))

    # painting

    def _strips(self, first: int, count: int) -> list[Strip]:
        self._selected = self.text_selection  # asked once, and not for each row
        return super()._strips(first, count)

    def _painted(self, painter: StripRenderer, place: Place, row: Row) -> Strip:
        shown = self._reel.shown[place.at]
        if shown.block.id == self.focused_id and row.pieces and place.row:
            row = row._replace(pieces=(_FOCUS_BAR, *row.pieces[1:]))
        dimmed = bool(getattr(shown.block, "dimmed", False))
        over: list[tuple[int, int, Style]] = []
        if self._selected is not None:
            number = shown.number * BLOCK_ROWS + place.row
            spans = spans_of(row, self._selected, number)
            over = [(start, end, painter.palette.selection()) for start, end in spans]
        if self._needle:
            palette = painter.palette
            style = palette.selection() if place == self._mark else palette.mark()
            over += [(*span, style) for span in _found(row, self._needle)]
        if over:
            return painter.laid_over(row, over, dimmed=dimmed)
        return painter.strip(row, dimmed=dimmed)

    # mouse

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        with self._steady():
            return selected_text(self._reel, selection), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        if self.text_selection is not None:
            return
        place = self._reel.place(event.y + round(self.scroll_y))
        if place is None:
            return
        shown = self._reel.shown[place.at]
        if (url := self._link_at(self._reel.row(place), event.x)) and event.button == 1:
            self.post_message(self.LinkClicked(url))
        elif (hit := self._reel.rows(place.at).hits.get(place.row)) is not None:
            self._take(shown, hit.action)
        else:
            self.post_message(self.BlockClicked(shown.block.id))

    def _take(self, shown: LaidOutBlock, action: str) -> None:
        if action:
            self.post_message(self.OfferTaken(action))
        else:
            self.toggle(shown.block.id)

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
