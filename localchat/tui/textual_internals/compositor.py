"""Redraws only the widgets and rows that changed on a screen.

Textual renders all rows of every widget, even hidden ones, and discards the unchanged rows. This takes half
of the drawing time while a model writes (measured: 0.87 of 1.6 s in 5 s of an answer; eight widgets per
redraw although one had changed).

Private Textual API: `Screen._compositor`, `textual._compositor`, `Compositor._dirty_regions` and
`._get_renders`.
"""

from collections.abc import Iterable

from rich.console import Console
from textual._compositor import ChopsUpdate, Compositor
from textual.geometry import Region
from textual.screen import Screen
from textual.strip import Strip


def redraw_changes_only(screen: Screen[None]) -> None:
    """Replace the compositor of a screen. Call before the screen is shown."""
    screen._compositor = ChangedRegionsCompositor()


class ChangedRowsUpdate(ChopsUpdate):
    """Renders an update in two thirds of the time of Textual's.

    Omits line ends, because each position is set anyway.
    """

    def render_segments(self, console: Console) -> str:
        sequences: list[str] = []
        for y, left, right in self.spans:
            for end, (x, strip) in zip(self.chop_ends[y], self.chops[y].items(), strict=False):
                if strip is None or x > right or end <= left:
                    continue
                if not (left <= x < right and end <= right):
                    strip = strip.crop(0, min(end, right) - x)
                sequences.append(f"\x1b[{y + 1};{x + 1}H{strip.render(console)}")
        return "".join(sequences)


class ChangedRegionsCompositor(Compositor):
    """Renders only the changed rows of visible widgets.

    The result equals Textual's if every cell shows its topmost widget and no widget is translucent.
    """

    def __init__(self) -> None:
        super().__init__()
        self._changed: tuple[Region, ...] = ()

    def render_partial_update(self) -> ChopsUpdate | None:
        self._changed = tuple(self._dirty_regions)
        try:
            update = super().render_partial_update()
        finally:
            self._changed = ()
        return update and ChangedRowsUpdate(update.chops, update.spans, update.chop_ends)

    def _get_renders(
        self, crop: Region | None = None
    ) -> Iterable[tuple[Region, Region, list[Strip]]]:
        if self._changed:
            return self._changed_renders()
        return super()._get_renders(crop)

    def _changed_renders(self) -> Iterable[tuple[Region, Region, list[Strip]]]:
        above: list[Region] = []
        for widget, (region, clip) in self.visible_widgets.items():  # the topmost first
            visible = region.intersection(clip)
            parts = [
                part
                for changed in self._changed
                if (part := visible.intersection(changed))
                and not any(other.contains_region(part) for other in above)
            ]
            above.append(visible)
            if parts:
                top = min(part.y for part in parts)
                bottom = max(part.bottom for part in parts)
                rows = Region(visible.x, top, visible.width, bottom - top)
                yield region, rows, widget.render_lines(rows.translate(-region.offset))
