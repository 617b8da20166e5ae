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

from localchat.tui.textual_internals.driver import writer_is_behind
from localchat.tui.textual_internals.flat_widget import Bar, rows_in
from localchat.tui.transcript.block_rows import GUTTER, text_width
from localchat.tui.transcript.layout import BlockLayout, Place
from localchat.tui.transcript.markdown import EMPTY, Row
from localchat.tui.transcript.redraw_rate import RedrawRate
from localchat.tui.transcript.selection import BLOCK_ROWS
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
        self._reel = BlockLayout()
        self._painter: StripRenderer | None = None
        self._pace = RedrawRate()
        self._dirty: set[str] = set()
        self._timer: Timer | None = None
        self._called = False
        self._idle: Timer | None = None
        self._flushed_s = float("-inf")
        self._paint_s = 0.0
        self._slack = 0
        self._end_drawn = 0
        self._bar_s = float("-inf")
        self._bar_timer: Timer | None = None
        self._moving = False

    def to_end(self) -> None:
        """Go to the end and follow it."""
        self.following = True
        self._restage()
        self._wake_idle()
        self.refresh()

    @property
    def vertical_scrollbar(self) -> ScrollBar:
        if self._vertical_scrollbar is None:
            self._vertical_scrollbar = bar = Bar(name="vertical")
            bar.display = False
            self.app._start_widget(self, bar)
        return self._vertical_scrollbar

    @property
    def settled(self) -> bool:
        """Whether everything is drawn and every height is known: nothing changes any more by itself."""
        return not (self._dirty or self._timer or self._idle or self._bar_timer)

    # drawing what grows

    def _touch(self, id_: str, *, now: bool = False) -> None:
        self._dirty.add(id_)
        if not self.is_attached:
            return
        if now:
            if self._timer is not None:
                self._timer.stop()
                self._timer = None
            self._flush()
        elif self._timer is None and not self._called:
            clock = time.monotonic()
            wait = self._flushed_s + self._pace.wait_s(clock) - clock
            if wait <= _DUE_S:
                self._called = self.post_message(events.Callback(callback=self._flush))
            else:
                self._timer = self.set_timer(wait, self._flush)

    def _flush(self) -> None:
        """Draw what changed since the last time."""
        self._timer, self._called = None, False
        if not self._reel.width:
            self._dirty.clear()  # hidden: drawn from the blocks themselves when it is shown
            return
        if not self._dirty:
            return
        begun = time.monotonic()
        if writer_is_behind(self.app):
            self._pace.blocked(begun)
            self._timer = self.set_timer(self._pace.wait_s(begun), self._flush)
            return
        place = self._top_place()
        changed = self._relaid()
        before = round(self.scroll_y)
        self._restage(place)
        if round(self.scroll_y) == before and changed is not None:
            self._refresh_rows(changed, max(self._end_drawn, self._reel.total))
        self._end_drawn = self._reel.total
        self._flushed_s = time.monotonic()
        self._pace.drew(self._flushed_s - begun + self._paint_s)

    def _relaid(self) -> int | None:
        """Lay out the blocks that changed; the first row that differs, None for none on the screen."""
        first: int | None = None
        for id_ in self._dirty:
            index = self._reel.find(id_)
            if index is None:
                continue
            shown = self._reel.shown[index]
            old = shown.drawn
            new = self._reel.rows(index).rows
            same = _common(old, new)
            shown.drawn = new
            row = self._reel.top(index) + same
            first = row if first is None else min(first, row)
        self._dirty.clear()
        return first

    def _refresh_rows(self, start: int, end: int) -> None:
        """Draw the rows from `start` to `end` again, those of them that are seen; the scroll bar is not."""
        first = round(self.scroll_y)
        top, bottom = max(0, start - first), min(self.size.height, end - first)
        if top < bottom:
            self.refresh(Region(0, top, self.scrollable_content_region.width, bottom - top))

    # geometry

    def _top_place(self) -> Place | None:
        """What stands at the top of the screen; None where the end is followed."""
        return None if self.following else self._reel.place(round(self.scroll_y))

    def _restage(self, place: Place | None = None) -> None:
        """Put `place` at the top of the screen (None: the end at its bottom) with right heights in view."""
        height = self.size.height
        if not self._reel.width or not height:
            return
        if place is None and not self.following:
            place = self._reel.place(round(self.scroll_y))
        if place is None:
            self._reel.settle_up(height)
            top = self._end_top(height)
        else:
            top = self._reel.settle_down(place, height)
            self._slack = 0
        self._set_extent(max(self._reel.total + 1 + self._slack, height))
        self._move(top)

    @contextmanager
    def _steady(self) -> Iterator[None]:
        """Inside, blocks may be laid out that were not seen yet; the screen stays where it is."""
        place = self._top_place()
        yield
        self._restage(place)

    def _end_top(self, height: int) -> int:
        """The top row when the end is followed. On a slow terminal the end moves up by half a screen at once,
        so that few drawings are of the whole screen."""
        rows = self._reel.total + 1
        if not (self._reel.grows and self._pace.slow(time.monotonic())):
            self._slack = 0
            return max(0, rows - height)
        now = round(self.scroll_y)
        if not now <= rows <= now + height:
            now = max(0, rows + height // 2 - height) if rows > height else 0
        self._slack = max(0, now + height - rows)
        return now

    def _set_extent(self, rows: int) -> None:
        size = Size(self.scrollable_content_region.width, rows)
        if size != self.virtual_size:
            # the reactive would lay out the whole screen again; the scroll bar is always there
            self.set_reactive(Widget.virtual_size, size)

    def _move(self, top: int) -> None:
        self._moving = True
        try:
            self.scroll_y = float(top)
            self.scroll_target_y = float(top)
        finally:
            self._moving = False
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
        if self._moving or not self._reel.width:
            return
        self.following = round(new_value) >= self.max_scroll_y
        place = self._reel.place(round(new_value))
        if place is not None and not self.following:
            self._restage(place)
        else:
            self._draw_bar()

    def on_resize(self, event: events.Resize) -> None:
        width = self.scrollable_content_region.width
        if width != self._reel.width:
            place = self._top_place()
            share = place.row / max(1, self._reel.height(place.at)) if place else 0.0
            self._reel.resize(width)
            self._painter = None
            if place is not None:
                rows = len(self._reel.rows(place.at).rows)
                place = Place(place.at, int(share * rows))
            self._restage(place)
        else:
            self._restage(self._top_place())
        if self._reel.width:
            self._dirty.clear()  # everything is drawn again
        self._wake_idle()
        self.refresh()

    # heights of what was not seen, a little at a time

    def _wake_idle(self) -> None:
        if self._idle is None and self.is_attached:
            self._idle = self.set_timer(_IDLE_EVERY_S, self._correct)

    def _correct(self) -> None:
        """Lay out blocks that were not seen yet, for a few milliseconds."""
        self._idle = None
        if not self._reel.shown or not self._reel.width:
            return
        if self._timer is not None:  # what grows goes first
            self._wake_idle()
            return
        until = time.monotonic() + _IDLE_SLICE_S
        top = self._top_place()
        start = top.at if top else len(self._reel.shown)
        before = round(self.scroll_y)
        with self._steady():
            for index in self._reel.estimated(start):
                self._reel.rows(index)
                if time.monotonic() >= until:
                    self._wake_idle()
                    break
        if round(self.scroll_y) != before:
            self.refresh()

    # painting

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._painter = None

    def render_lines(self, crop: Region) -> list[Strip]:
        """The rows of a part of the widget. Past Textual's cache of styled lines, which takes as long again:
        there is no border or padding to draw, and strips are kept by the painter."""
        begun = time.monotonic()
        self._end_drawn = max(self._end_drawn, self._reel.total)
        strips = self._strips(crop.y, crop.height)
        shown = rows_in(self, crop, lambda y: strips[y - crop.y])
        self._paint_s = time.monotonic() - begun
        return shown

    def render_line(self, y: int) -> Strip:
        """A row with the offsets that Textual asks for when the mouse selects."""
        (strip,) = self._strips(y, 1)
        place = self._reel.place(y + round(self.scroll_y)) if self._reel.width else None
        if place is None:
            return strip
        return strip.apply_offsets(0, self._reel.shown[place.at].number * BLOCK_ROWS + place.row)

    def _strips(self, first: int, count: int) -> list[Strip]:
        """Rows of the widget from `first` on."""
        painter = self._painter or self._new_painter()
        strips: list[Strip] = []
        if self._reel.width:
            seen = self._reel.seen(first + round(self.scroll_y), count)
            strips = [self._painted(painter, place, row) for place, row in seen]
        return strips + [painter.strip(EMPTY)] * (count - len(strips))

    def _new_painter(self) -> StripRenderer:
        width = self.scrollable_content_region.width
        self._painter = StripRenderer(
            Palette(self.app.theme_variables), width, GUTTER + text_width(width)
        )
        return self._painter

    def _painted(self, painter: StripRenderer, place: Place, row: Row) -> Strip:
        return painter.strip(row)


def _common(old: list[Row], new: list[Row]) -> int:
    """How many rows at the beginning are the same."""
    for index, (before, after) in enumerate(zip(old, new, strict=False)):
        if before is not after and before != after:
            return index
    return min(len(old), len(new))
