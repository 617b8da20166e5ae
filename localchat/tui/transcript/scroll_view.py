"""A widget that draws the rows of a reel: where it stands, when it draws, and what stays still meanwhile.

A widget per message (or per paragraph, as Textual's Markdown has it) took 885 ms from key to screen at 50,000
tokens; this takes 5. Blocks are laid out when they are first seen, the heights of the others are estimated and
corrected without moving what is being read; finished ones are never laid out again at the same width.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from textual import events
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.scrollbar import ScrollBar
from textual.strip import Strip
from textual.timer import Timer
from textual.widget import Widget

from localchat.tui.textual_internals.driver import output_is_pending
from localchat.tui.textual_internals.flat_widget import FlatScrollBar, rows_in
from localchat.tui.transcript.block_rows import GUTTER, text_width
from localchat.tui.transcript.layout import BlockLayout, RowPosition
from localchat.tui.transcript.markdown import EMPTY, Row
from localchat.tui.transcript.redraw_rate import RedrawRate
from localchat.tui.transcript.selection import ROWS_PER_BLOCK
from localchat.tui.transcript.strips import Palette, StripRenderer

_IDLE_SLICE_S: Final = 0.008
_IDLE_EVERY_S: Final = 0.05
_BAR_EVERY_S: Final = 0.25
_DUE_S: Final = 0.01
"""What is due so soon is drawn at once, together with the figures that came with it."""


class VirtualScrollView(ScrollView):
    """See the module. `following`: the end is shown, and what comes moves it."""

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.following = True
        self._blocks = BlockLayout()
        self._strip_renderer: StripRenderer | None = None
        self._redraw_rate = RedrawRate()
        self._changed_ids: set[str] = set()
        self._timer: Timer | None = None
        self._redraw_posted = False
        self._measure_timer: Timer | None = None
        self._redrawn_s = float("-inf")
        self._render_s = 0.0
        self._end_slack = 0
        self._drawn_rows = 0
        self._bar_s = float("-inf")
        self._bar_timer: Timer | None = None
        self._is_moving = False

    def to_end(self) -> None:
        """Go to the end and follow it."""
        self.following = True
        self._reflow()
        self._schedule_measuring()
        self.refresh()

    @property
    def vertical_scrollbar(self) -> ScrollBar:
        if self._vertical_scrollbar is None:
            self._vertical_scrollbar = bar = FlatScrollBar(name="vertical")
            bar.display = False
            self.app._start_widget(self, bar)
        return self._vertical_scrollbar

    @property
    def is_idle(self) -> bool:
        """Whether everything is drawn and every height is known: nothing changes any more by itself."""
        return not (self._changed_ids or self._timer or self._measure_timer or self._bar_timer)

    # drawing what grows

    def _mark_changed(self, id_: str, *, now: bool = False) -> None:
        self._changed_ids.add(id_)
        if not self.is_attached:
            return
        if now:
            if self._timer is not None:
                self._timer.stop()
                self._timer = None
            self._redraw()
        elif self._timer is None and not self._redraw_posted:
            clock = time.monotonic()
            wait = self._redrawn_s + self._redraw_rate.wait_s(clock) - clock
            if wait <= _DUE_S:
                self._redraw_posted = self.post_message(events.Callback(callback=self._redraw))
            else:
                self._timer = self.set_timer(wait, self._redraw)

    def _redraw(self) -> None:
        """Draw what changed since the last time."""
        self._timer, self._redraw_posted = None, False
        if not self._blocks.width:
            self._changed_ids.clear()  # hidden: drawn from the blocks themselves when it is shown
            return
        if not self._changed_ids:
            return
        begun = time.monotonic()
        if output_is_pending(self.app):
            self._redraw_rate.blocked(begun)
            self._timer = self.set_timer(self._redraw_rate.wait_s(begun), self._redraw)
            return
        position = self._top_position()
        changed = self._lay_out_changed()
        before = round(self.scroll_y)
        self._reflow(position)
        if round(self.scroll_y) == before and changed is not None:
            self._refresh_rows(changed, max(self._drawn_rows, self._blocks.total))
        self._drawn_rows = self._blocks.total
        self._redrawn_s = time.monotonic()
        self._redraw_rate.drew(self._redrawn_s - begun + self._render_s)

    def _lay_out_changed(self) -> int | None:
        """Lay out the blocks that changed; the first row that differs, None for none on the screen."""
        first: int | None = None
        for id_ in self._changed_ids:
            index = self._blocks.find(id_)
            if index is None:
                continue
            item = self._blocks.items[index]
            old = item.drawn_rows
            new = self._blocks.rows(index).rows
            same = _common_prefix(old, new)
            item.drawn_rows = new
            row = self._blocks.top(index) + same
            first = row if first is None else min(first, row)
        self._changed_ids.clear()
        return first

    def _refresh_rows(self, start: int, end: int) -> None:
        """Draw the rows from `start` to `end` again, those of them that are seen; the scroll bar is not."""
        first = round(self.scroll_y)
        top, bottom = max(0, start - first), min(self.size.height, end - first)
        if top < bottom:
            self.refresh(Region(0, top, self.scrollable_content_region.width, bottom - top))

    # geometry

    def _top_position(self) -> RowPosition | None:
        """What stands at the top of the screen; None where the end is followed."""
        return None if self.following else self._blocks.position(round(self.scroll_y))

    def _reflow(self, position: RowPosition | None = None) -> None:
        """Put `place` at the top of the screen (None: the end at its bottom) with right heights in view."""
        height = self.size.height
        if not self._blocks.width or not height:
            return
        if position is None and not self.following:
            position = self._blocks.position(round(self.scroll_y))
        if position is None:
            self._blocks.measure_end(height)
            top = self._end_top(height)
        else:
            top = self._blocks.measure_from(position, height)
            self._end_slack = 0
        self._set_total_rows(max(self._blocks.total + 1 + self._end_slack, height))
        self._move(top)

    @contextmanager
    def _keeping_position(self) -> Iterator[None]:
        """Inside, blocks may be laid out that were not seen yet; the screen stays where it is."""
        position = self._top_position()
        yield
        self._reflow(position)

    def _end_top(self, height: int) -> int:
        """The top row when the end is followed. On a slow terminal the end moves up by half a screen at once,
        so that few drawings are of the whole screen."""
        rows = self._blocks.total + 1
        if not (self._blocks.is_streaming and self._redraw_rate.slow(time.monotonic())):
            self._end_slack = 0
            return max(0, rows - height)
        now = round(self.scroll_y)
        if not now <= rows <= now + height:
            now = max(0, rows + height // 2 - height) if rows > height else 0
        self._end_slack = max(0, now + height - rows)
        return now

    def _set_total_rows(self, rows: int) -> None:
        size = Size(self.scrollable_content_region.width, rows)
        if size != self.virtual_size:
            # the reactive would lay out the whole screen again; the scroll bar is always there
            self.set_reactive(Widget.virtual_size, size)

    def _move(self, top: int) -> None:
        self._is_moving = True
        try:
            self.scroll_y = float(top)
            self.scroll_target_y = float(top)
        finally:
            self._is_moving = False
        self._draw_bar()

    def _draw_bar(self) -> None:
        """Bring the scroll bar up to date, at most four times a second while the end is followed: it costs
        as much as ten rows, and more bytes."""
        now = time.monotonic()
        if self.following and now - self._bar_s < _BAR_EVERY_S:
            if self._bar_timer is None and self.is_attached:
                self._bar_timer = self.set_timer(_BAR_EVERY_S, self._bar_is_due)
            return
        if self._bar_timer is not None:
            self._bar_timer.stop()
            self._bar_timer = None
        self._bar_s = now
        bar = self.vertical_scrollbar
        bar.window_virtual_size = self.virtual_size.height
        bar.window_size = self.size.height
        bar.position = self.scroll_y

    def _bar_is_due(self) -> None:
        self._bar_timer, self._bar_s = None, float("-inf")
        self._draw_bar()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        if round(old_value) != round(new_value):
            row = round(new_value)
            self._refresh_rows(row, row + self.size.height)
        if self._is_moving or not self._blocks.width:
            return
        self.following = round(new_value) >= self.max_scroll_y
        position = self._blocks.position(round(new_value))
        if position is not None and not self.following:
            self._reflow(position)
        else:
            self._draw_bar()

    def on_resize(self, event: events.Resize) -> None:
        width = self.scrollable_content_region.width
        if width != self._blocks.width:
            position = self._top_position()
            share = position.row / max(1, self._blocks.height(position.block)) if position else 0.0
            self._blocks.resize(width)
            self._strip_renderer = None
            if position is not None:
                rows = len(self._blocks.rows(position.block).rows)
                position = RowPosition(position.block, int(share * rows))
            self._reflow(position)
        else:
            self._reflow(self._top_position())
        if self._blocks.width:
            self._changed_ids.clear()  # everything is drawn again
        self._schedule_measuring()
        self.refresh()

    # heights of what was not seen, a little at a time

    def _schedule_measuring(self) -> None:
        if self._measure_timer is None and self.is_attached:
            self._measure_timer = self.set_timer(_IDLE_EVERY_S, self._measure_unseen)

    def _measure_unseen(self) -> None:
        """Lay out blocks that were not seen yet, for a few milliseconds."""
        self._measure_timer = None
        if not self._blocks.items or not self._blocks.width:
            return
        if self._timer is not None:  # what grows goes first
            self._schedule_measuring()
            return
        until = time.monotonic() + _IDLE_SLICE_S
        top = self._top_position()
        start = top.block if top else len(self._blocks.items)
        before = round(self.scroll_y)
        with self._keeping_position():
            for index in self._blocks.unmeasured(start):
                self._blocks.rows(index)
                if time.monotonic() >= until:
                    self._schedule_measuring()
                    break
        if round(self.scroll_y) != before:
            self.refresh()

    # painting

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._strip_renderer = None

    def render_lines(self, crop: Region) -> list[Strip]:
        """The rows of a part of the widget. Past Textual's cache of styled lines, which takes as long again:
        there is no border or padding to draw, and strips are kept by the painter."""
        begun = time.monotonic()
        self._drawn_rows = max(self._drawn_rows, self._blocks.total)
        strips = self._strips(crop.y, crop.height)
        item = rows_in(self, crop, lambda y: strips[y - crop.y])
        self._render_s = time.monotonic() - begun
        return item

    def render_line(self, y: int) -> Strip:
        """A row with the offsets that Textual asks for when the mouse selects."""
        (strip,) = self._strips(y, 1)
        position = self._blocks.position(y + round(self.scroll_y)) if self._blocks.width else None
        if position is None:
            return strip
        return strip.apply_offsets(
            0, self._blocks.items[position.block].number * ROWS_PER_BLOCK + position.row
        )

    def _strips(self, first: int, count: int) -> list[Strip]:
        """Rows of the widget from `first` on."""
        painter = self._strip_renderer or self._new_strip_renderer()
        strips: list[Strip] = []
        if self._blocks.width:
            visible_rows = self._blocks.visible_rows(first + round(self.scroll_y), count)
            strips = [self._row_strip(painter, position, row) for position, row in visible_rows]
        return strips + [painter.strip(EMPTY)] * (count - len(strips))

    def _new_strip_renderer(self) -> StripRenderer:
        width = self.scrollable_content_region.width
        self._strip_renderer = StripRenderer(
            Palette(self.app.theme_variables), width, GUTTER + text_width(width)
        )
        return self._strip_renderer

    def _row_strip(self, painter: StripRenderer, position: RowPosition, row: Row) -> Strip:
        return painter.strip(row)


def _common_prefix(old: list[Row], new: list[Row]) -> int:
    """How many rows at the beginning are the same."""
    for index, (before, after) in enumerate(zip(old, new, strict=False)):
        if before is not after and before != after:
            return index
    return min(len(old), len(new))
