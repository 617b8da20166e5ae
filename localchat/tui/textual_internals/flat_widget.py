"""Bypasses Textual's styled-line cache for widgets without border, padding or opacity.

This halves their paint time.
"""

from collections.abc import Callable

from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget


def rows_in(widget: Widget, crop: Region, row: Callable[[int], Strip]) -> list[Strip]:
    """Return the result of `Widget.render_lines`. `row` renders one row in full width."""
    strips = [row(y) for y in crop.line_range]
    if filters := widget.app.get_line_filters():
        background = widget.background_colors[1]
        for line_filter in filters:
            strips = [strip.apply_filter(line_filter, background) for strip in strips]
    if crop.x or crop.width < widget.size.width:
        strips = [strip.crop(crop.x, crop.right) for strip in strips]
    return strips


class FlatWidget(Widget):
    """A widget of rows without border, padding or opacity, which draws with its component styles."""

    def __init__(self, *, id: str) -> None:  # noqa: A002 - textual's word
        super().__init__(id=id)
        self._style_cache: dict[str, Style] = {}

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._style_cache = {}

    def style_of(self, name: str) -> Style:
        """Return a component style, or the widget's own for "". Building one takes half of a redraw."""
        if name not in self._style_cache:
            style = self.get_component_rich_style(name) if name else self.rich_style
            self._style_cache[name] = style
        return self._style_cache[name]

    def render_lines(self, crop: Region) -> list[Strip]:
        return rows_in(self, crop, self.render_line)
