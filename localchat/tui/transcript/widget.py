"""The conversation on the screen: one widget that draws the rows of all blocks.

One widget per message, or per paragraph as in Textual's Markdown, took 885 ms from key to screen at 50,000
tokens. This widget takes 5 ms. Blocks are laid out when they are first seen. The heights of other blocks are
estimated, and corrected later without moving the rows on the screen. A finished block is laid out only once
per width.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

from rich.style import Style
from textual import events, work
from textual.binding import BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip
from textual.timer import Timer
from textual.widget import Widget

from localchat.session.blocks import Block, Offer
from localchat.tui.column import GUTTER
from localchat.tui.keymap import bindings
from localchat.tui.pictures.painter import PicturePainter, decode
from localchat.tui.textual_internals.driver import output_is_pending
from localchat.tui.textual_internals.flat_widget import rows_in
from localchat.tui.transcript.block_rows import text_width
from localchat.tui.transcript.layout import (
    BlockLayout,
    LaidOutBlock,
    RowPosition,
    code_blocks,
)
from localchat.tui.transcript.markdown import EMPTY, Look, Piece, Row
from localchat.tui.transcript.markdown.corner import copied
from localchat.tui.transcript.scrollbar import ScrollbarUpdates
from localchat.tui.transcript.selection import ROWS_PER_BLOCK, selected_text, spans_of
from localchat.tui.transcript.strips import Palette, StripRenderer

_FOCUS_BAR: Final = Piece("▎ ", Look("user.bar"))
_MEASURE_SLICE_S: Final = 0.008
_MEASURE_EVERY_S: Final = 0.05
_COPIED_S: Final = 1.5
_REDRAW_S: Final = 0.05
"""Interval between redraws of a growing text."""
_REDRAW_COST_FACTOR: Final = 4.0
"""Factor by which the interval exceeds the time of a redraw, so that one takes a fifth of the time at most."""
_SLOW_REDRAW_S: Final = 0.4
"""Interval while the terminal has not read the last frame. The echo of a key waits for all bytes before it."""
_SOON_S: Final = 0.01
"""A redraw due this soon happens at once, in the frame of the metrics."""


class Transcript(ScrollView, can_focus=True):
    """Blocks of a conversation. Follows the end unless the reader scrolled up.

    Size: drawing, scrolling and selection share the layout.
    """

    ALLOW_SELECT = True
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("transcript")]
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
        """The reader accepted an offer of a notice."""

        action: str

    @dataclass
    class CopyRequested(Message):
        """Text to copy to the clipboard, and its name."""

        text: str
        what: str

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002 - textual's word
        super().__init__(id=id)
        self.following = True
        """Whether the end is shown, and new rows scroll the view."""
        self.focused_id: str | None = None
        self._block_layout = BlockLayout()
        self._selection: Selection | None = None
        self._strip_renderer: StripRenderer | None = None
        self._changed_ids: set[str] = set()
        self._redraw_wait_s = _REDRAW_S
        self._redraw_timer: Timer | None = None
        self._redraw_posted = False
        self._redrawn_s = float("-inf")
        self._render_s = 0.0
        self._drawn_rows = 0
        self._measure_timer: Timer | None = None
        self._scrollbar_updates = ScrollbarUpdates(self)
        self._is_moving = False
        self._is_decoding = False
        self._postponed_reveal: Callable[[], None] | None = None
        """Reveals a match once the size is known."""
        self._copied: tuple[str, int] = ("", 0)
        """Answer and number of the code block that was just copied."""

    def show(self, blocks: Iterable[Block]) -> None:
        """Replace all blocks and scroll to the end."""
        self._block_layout.replace(blocks)
        self._changed_ids.clear()
        self.focused_id = None
        self.to_end()

    def put(self, block: Block) -> None:
        """Add a block at the end, or replace the one with its id."""
        is_new = self._block_layout.find(block.id) is None
        self._block_layout.put(block)
        self._mark_changed(block.id, now=is_new)

    def append_text(self, id_: str, piece: str) -> None:
        """Append to the text of a block. Pieces are drawn together, at the redraw rate."""
        if self._block_layout.append(id_, piece) is not None:
            self._mark_changed(id_)

    def finish(self, id_: str) -> None:
        """Mark the text of a block as complete."""
        if self._block_layout.finish(id_) is not None:
            self._mark_changed(id_, now=True)

    def drop(self, id_: str) -> None:
        """Remove a block."""
        if self._block_layout.remove(id_):
            self._changed_ids.discard(id_)
            if self.focused_id == id_:
                self.focused_id = None
            self._reflow()
            self.refresh()

    def toggle(self, id_: str) -> None:
        """Open or fold a block."""
        index = self._block_layout.find(id_)
        if index is not None:
            position = self._top_position()
            self._block_layout.toggle(index)
            self._block_layout.rows(index)
            self._reflow(position)
            self.refresh()

    def open_fold(self, id_: str) -> None:
        """Open a block if it is folded."""
        index = self._block_layout.find(id_)
        if index is not None and not self._block_layout.items[index].is_open:
            self.toggle(id_)

    def block(self, id_: str) -> Block | None:
        """Return the block with this id, with all text so far. None if it does not exist."""
        index = self._block_layout.find(id_)
        if index is None:
            return None
        return self._block_layout.items[index].block

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(item.block for item in self._block_layout.items)

    def code_blocks(self, id_: str) -> list[str]:
        """Return the code blocks of an answer, unchanged."""
        block = self.block(id_)
        if block is None:
            return []
        return code_blocks(block)

    @property
    def open_offers(self) -> tuple[Offer, ...]:
        """Offers of the last notice with offers, unless a message followed it."""
        return self._block_layout.open_offers()

    def take_offer(self, number: int) -> bool:
        """Accept an offer of the last notice with offers. Return False if the number does not exist."""
        notice = self._block_layout.last_offers()
        if notice is None or not 0 <= number - notice.first < len(notice.offers):
            return False
        self.post_message(self.OfferTaken(notice.offers[number - notice.first].action))
        return True

    def focus_block(self, delta: int) -> str | None:
        """Move the focus by `delta` blocks, from the end if no block has it. Return the id of the block."""
        last = len(self._block_layout.items) - 1
        if last < 0:
            return None
        index = self._focused_index()
        if index is None:
            index = last
        else:
            index = min(max(index + delta, 0), last)
        self.focused_id = self._block_layout.items[index].block.id
        self._scroll_to_block(index)
        self.refresh()
        return self.focused_id

    def _focused_index(self) -> int | None:
        if self.focused_id is None:
            return None
        return self._block_layout.find(self.focused_id)

    def focus_question(self, step: int) -> bool:
        """Focus the previous question (`step` -1) or the next one (1), at the screen's top.

        Return False if there is no such question.
        """
        layout = self._block_layout
        start = self._focused_index()
        if start is None:
            start = len(layout.items)
            if (top := self._top_position()) is not None:
                # A question that is cut at the top counts as the previous one.
                start = top.block + (step < 0 < top.row)
        index = layout.question(start, step)
        if index is None:
            return False
        self.focused_id = layout.items[index].block.id
        self.following = False
        self._reflow(RowPosition(index, 0))
        self.refresh()
        return True

    def reveal(self, id_: str, find: Callable[[str], int | None]) -> None:
        """Focus a message, and scroll to where `find` finds a position in its text."""
        if not self._block_layout.width or not self.size.height:
            self._postponed_reveal = partial(self.reveal, id_, find)
            return
        position = self._block_layout.find_in_message(id_, find)
        if position is None:
            return
        self.focused_id = self._block_layout.items[position.block].block.id
        self.following = False
        # A third of the view remains for the text before the match.
        top = max(0, position.row - self.size.height // 3)
        self._reflow(RowPosition(position.block, top))
        self.refresh()

    def unfocus_block(self) -> None:
        """Remove the focus from its block."""
        self.focused_id = None
        self.refresh()

    @property
    def is_idle(self) -> bool:
        """Whether everything is drawn and measured, so that no timer runs."""
        bar = self._scrollbar_updates
        timers = self._redraw_timer or self._measure_timer or bar.is_pending
        return not (self._changed_ids or timers)

    def _mark_changed(self, id_: str, *, now: bool = False) -> None:
        """Redraw a block soon, together with others, or at once with `now`."""
        self._changed_ids.add(id_)
        if not self.is_attached:
            return
        if now:
            if self._redraw_timer is not None:
                self._redraw_timer.stop()
                self._redraw_timer = None
            self._redraw()
        elif self._redraw_timer is None and not self._redraw_posted:
            wait_s = self._redrawn_s + self._redraw_wait_s - time.monotonic()
            if wait_s <= _SOON_S:
                self._redraw_posted = self.post_message(events.Callback(callback=self._redraw))
            else:
                self._redraw_timer = self.set_timer(wait_s, self._redraw)

    def _redraw(self) -> None:
        """Draw the rows that changed since the last redraw."""
        self._redraw_timer = None
        self._redraw_posted = False
        if not self._block_layout.width:
            # A hidden transcript draws everything when it is shown.
            self._changed_ids.clear()
            return
        if not self._changed_ids:
            return
        started_s = time.monotonic()
        if output_is_pending(self.app):
            self._redraw_timer = self.set_timer(_SLOW_REDRAW_S, self._redraw)
            return
        position = self._top_position()
        first_changed = self._lay_out_changed()
        old_top = round(self.scroll_y)
        self._reflow(position)
        # If the view scrolled, `watch_scroll_y` has refreshed all of it.
        if round(self.scroll_y) == old_top and first_changed is not None:
            self._refresh_rows(first_changed, max(self._drawn_rows, self._block_layout.total))
        self._drawn_rows = self._block_layout.total
        self._redrawn_s = time.monotonic()
        cost_s = self._redrawn_s - started_s + self._render_s
        self._redraw_wait_s = max(_REDRAW_S, _REDRAW_COST_FACTOR * cost_s)

    def _lay_out_changed(self) -> int | None:
        """Lay out the blocks that changed, and return the first row to draw."""
        indices = map(self._block_layout.find, self._changed_ids)
        rows = [self._block_layout.redraw(index) for index in indices if index is not None]
        self._changed_ids.clear()
        return min(rows, default=None)

    def _refresh_rows(self, start: int, end: int) -> None:
        """Redraw the visible rows from `start` to `end`, without the scroll bar."""
        first = round(self.scroll_y)
        top = max(0, start - first)
        bottom = min(self.size.height, end - first)
        if top < bottom:
            self.refresh(Region(0, top, self.scrollable_content_region.width, bottom - top))

    def to_end(self) -> None:
        """Scroll to the end and follow it."""
        self.following = True
        self._reflow()
        self._schedule_measuring()
        self.refresh()

    def _top_position(self) -> RowPosition | None:
        """Return the row at the top of the screen. None while the end is followed."""
        if self.following:
            return None
        return self._block_layout.position(round(self.scroll_y))

    def _reflow(self, position: RowPosition | None = None) -> None:
        """Lay out the view with `position` at its top. None: the end at its bottom."""
        height = self.size.height
        if not self._block_layout.width or not height:
            return
        if position is None and not self.following:
            position = self._block_layout.position(round(self.scroll_y))
        if position is None:
            self._block_layout.measure_end(height)
            top = max(0, self._block_layout.total + 1 - height)
        else:
            top = self._block_layout.measure_from(position, height)
        self._set_total_rows(max(self._block_layout.total + 1, height))
        self._move(top)
        if self._unhighlighted() is not None:
            self._schedule_measuring()

    @contextmanager
    def _keeping_position(self) -> Iterator[None]:
        """Restore the scroll position after laying out blocks that were not visible."""
        position = self._top_position()
        yield
        self._reflow(position)

    def _scroll_to_block(self, index: int) -> None:
        """Scroll so that a block is visible from its first row."""
        self._block_layout.rows(index)
        top = self._block_layout.top(index)
        height = self.size.height
        bottom = top + self._block_layout.height(index)
        view_top = round(self.scroll_y)
        if view_top <= top and bottom <= view_top + height:
            return
        self.following = bottom >= self._block_layout.total and bottom - top <= height
        if self.following:
            self._reflow()
        else:
            self._reflow(RowPosition(index, 0))

    def _set_total_rows(self, rows: int) -> None:
        size = Size(self.scrollable_content_region.width, rows)
        if size != self.virtual_size:
            # The reactive would lay out the whole screen again, although the scroll bar is always visible.
            self.set_reactive(Widget.virtual_size, size)

    def _move(self, top: int) -> None:
        self._is_moving = True
        try:
            self.scroll_y = float(top)
            self.scroll_target_y = float(top)
        finally:
            self._is_moving = False
        self._scrollbar_updates.update(following=self.following)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        if round(old_value) != round(new_value):
            row = round(new_value)
            self._refresh_rows(row, row + self.size.height)
        if self._is_moving or not self._block_layout.width:
            return
        self.following = round(new_value) >= self.max_scroll_y
        position = self._block_layout.position(round(new_value))
        if position is not None and not self.following:
            self._reflow(position)
        else:
            self._scrollbar_updates.update(following=self.following)

    def on_resize(self, event: events.Resize) -> None:
        layout = self._block_layout
        width = self.scrollable_content_region.width
        position = self._top_position()
        if width != layout.width:
            old_height = 0
            if position is not None:
                old_height = layout.height(position.block)
            layout.resize(width)
            self._strip_renderer = None
            if position is not None:
                # Keep the same part of the block at the top.
                share = position.row / max(1, old_height)
                rows = len(layout.rows(position.block).rows)
                position = RowPosition(position.block, int(share * rows))
        self._reflow(position)
        if layout.width:
            self._changed_ids.clear()  # everything is drawn again
        self._schedule_measuring()
        self.refresh()
        if layout.width and self._postponed_reveal is not None:
            reveal = self._postponed_reveal
            self._postponed_reveal = None
            reveal()

    def _schedule_measuring(self) -> None:
        if self._measure_timer is None and self.is_attached:
            self._measure_timer = self.set_timer(_MEASURE_EVERY_S, self._measure_unseen)

    def _unhighlighted(self) -> LaidOutBlock | None:
        """Return a block on the screen whose code is not highlighted yet."""
        return self._block_layout.unhighlighted(round(self.scroll_y), self.size.height)

    def _measure_unseen(self) -> None:
        """Highlight code on the screen, or lay out unmeasured blocks, for some milliseconds."""
        self._measure_timer = None
        if self._redraw_timer is None and (item := self._unhighlighted()) is not None:
            if self._block_layout.highlight(item, _MEASURE_SLICE_S):
                self._mark_changed(item.block.id)
            self._schedule_measuring()
            return
        if not self._block_layout.items or not self._block_layout.width:
            return
        if self._redraw_timer is not None:  # growing text has priority
            self._schedule_measuring()
            return
        end_s = time.monotonic() + _MEASURE_SLICE_S
        top = self._top_position()
        start = len(self._block_layout.items)
        if top:
            start = top.block
        old_top = round(self.scroll_y)
        with self._keeping_position():
            for index in self._block_layout.unmeasured(start):
                self._block_layout.rows(index)
                if time.monotonic() >= end_s:
                    self._schedule_measuring()
                    break
        if round(self.scroll_y) != old_top:
            self.refresh()

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._strip_renderer = None

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return the rows of a part of the widget.

        Bypasses Textual's cache of styled lines, which would double the time: the widget has no border or
        padding, and the strip renderer caches its strips.
        """
        started_s = time.monotonic()
        if self._block_layout.painter.wanted and not self._is_decoding:
            self._decode_pictures()
        self._drawn_rows = max(self._drawn_rows, self._block_layout.total)
        strips = self._row_strips(crop.y, crop.height)
        lines = rows_in(self, crop, lambda y: strips[y - crop.y])
        self._render_s = time.monotonic() - started_s
        return lines

    def render_line(self, y: int) -> Strip:
        """Return a row with the offsets that Textual needs for mouse selection."""
        (strip,) = self._row_strips(y, 1)
        if not self._block_layout.width:
            return strip
        position = self._position_at(y)
        if position is None:
            return strip
        number = self._block_layout.items[position.block].number
        return strip.apply_offsets(0, number * ROWS_PER_BLOCK + position.row)

    def draw_pictures(self, painter: PicturePainter) -> None:
        """Draw pictures with this painter from now on."""
        self._block_layout.painter.close()
        self._block_layout.painter = painter
        if self._block_layout.width:
            self._block_layout.resize(self._block_layout.width)
            self._reflow()
            self.refresh()

    @work(group="pictures", exclusive=True)
    async def _decode_pictures(self) -> None:
        """Decode the pictures that were drawn for the first time, and draw their blocks again."""
        painter = self._block_layout.painter
        self._is_decoding = True
        try:
            while painter.wanted:
                attachment = painter.wanted[0]
                painter.put(attachment, await asyncio.to_thread(decode, attachment))
                painter.wanted.remove(attachment)
                for id_ in self._block_layout.draw_again(attachment):
                    self._mark_changed(id_)
        finally:
            self._is_decoding = False

    def on_unmount(self) -> None:
        self._block_layout.painter.close()

    def _row_strips(self, first: int, count: int) -> list[Strip]:
        """Return `count` rows of the widget from row `first` on."""
        self._selection = self.text_selection  # read once, not once a row
        renderer = self._strip_renderer or self._new_strip_renderer()
        strips: list[Strip] = []
        if self._block_layout.width:
            visible = self._block_layout.visible_rows(first + round(self.scroll_y), count)
            strips = [self._row_strip(renderer, position, row) for position, row in visible]
        return strips + [renderer.strip(EMPTY)] * (count - len(strips))

    def _new_strip_renderer(self) -> StripRenderer:
        width = self.scrollable_content_region.width
        self._strip_renderer = StripRenderer(
            Palette(self.app.theme_variables), width, GUTTER + text_width(width)
        )
        return self._strip_renderer

    def _row_strip(self, renderer: StripRenderer, position: RowPosition, row: Row) -> Strip:
        item = self._block_layout.items[position.block]
        if item.block.id == self.focused_id and row.pieces and position.row:
            row = row._replace(pieces=(_FOCUS_BAR, *row.pieces[1:]))
        if item.block.id == self._copied[0]:
            row = copied(row, self._copied[1])
        dimmed = bool(getattr(item.block, "dimmed", False))
        palette = renderer.palette
        overlays: list[tuple[int, int, Style]] = []
        if self._selection is not None:
            spans = spans_of(row, self._selection, item.number * ROWS_PER_BLOCK + position.row)
            overlays = [(start, end, palette.selection()) for start, end in spans]
        if overlays and not row.picture:
            return renderer.overlaid_strip(row, overlays, dimmed=dimmed)
        return renderer.strip(row, dimmed=dimmed)

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        with self._keeping_position():
            return selected_text(self._block_layout, selection), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        if self.text_selection is not None:  # the click ended a selection
            return
        position = self._position_at(event.y)
        if position is None:
            return
        item = self._block_layout.items[position.block]
        look = self._block_layout.row(position).look_at(event.x)
        if look.link and event.button == 1:
            self.app.open_url(look.link)
        elif look.code:
            self._copy_code(item.block.id, look.code)
        elif hit := self._block_layout.rows(position.block).hits.get(position.row):
            if hit.action:
                self.post_message(self.OfferTaken(hit.action))
            else:
                self.toggle(item.block.id)

    def _copy_code(self, id_: str, number: int) -> None:
        """Copy a code block of an answer, and confirm it briefly in its corner."""
        blocks = self.code_blocks(id_)
        if number > len(blocks):
            return
        name = f"code {number} of {len(blocks)}"
        self.post_message(self.CopyRequested(blocks[number - 1], name))
        self._show_copied((id_, number))
        self.set_timer(_COPIED_S, lambda: self._show_copied(("", 0)))

    def _show_copied(self, code: tuple[str, int]) -> None:
        self._copied = code
        self.refresh()

    def _position_at(self, y: int) -> RowPosition | None:
        """Return the row of a block at row `y` of the widget."""
        return self._block_layout.position(y + round(self.scroll_y))
