"""Widgets without border, padding or opacity: their rows go to the screen as they are painted.

Textual keeps the styled lines of every widget, which takes as long again as painting them. Uses parts of it
that are not public; the version is pinned.
"""

from collections.abc import Callable

from rich.color import Color
from rich.segment import Segment
from textual.geometry import Region
from textual.scrollbar import ScrollBar, ScrollBarRender
from textual.strip import Strip
from textual.widget import Widget

_BACK, _THUMB = Color.parse("#555555"), Color.parse("bright_magenta")


def rows_in(widget: Widget, crop: Region, row: Callable[[int], Strip]) -> list[Strip]:
    """What `Widget.render_lines` gives, where `row` paints each row as wide as the widget."""
    strips = [row(y) for y in crop.line_range]
    if filters := widget.app.get_line_filters():
        background = widget.background_colors[1]
        for each in filters:
            strips = [strip.apply_filter(each, background) for strip in strips]
    if crop.x or crop.width < widget.size.width:
        strips = [strip.crop(crop.x, crop.right) for strip in strips]
    return strips


class FlatScrollBar(ScrollBar):
    """A scroll bar of one column, whose rows are a few strips: what looks the same is the same one. Textual's
    takes 2 ms for 37 rows."""

    def render_lines(self, crop: Region) -> list[Strip]:
        strips: dict[int, Strip] = {}
        ground = self.rich_style
        segments = self._segments()
        for segment in segments:
            if id(segment) not in strips:
                strips[id(segment)] = Strip([segment], 1).apply_style(ground)
        return rows_in(self, crop, lambda y: strips[id(segments[y])])

    def _segments(self) -> list[Segment]:
        """One for each row."""
        bar = self.render()
        assert isinstance(bar, ScrollBarRender)
        style = self.app.console.get_style(bar.style)
        drawn = bar.render_bar(
            size=self.size.height,
            virtual_size=bar.virtual_size,
            window_size=bar.window_size,
            position=bar.position,
            thickness=1,
            vertical=True,
            back_color=style.bgcolor or _BACK,
            bar_color=style.color or _THUMB,
        )
        return list(drawn.segments)
