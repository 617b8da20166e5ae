"""What is drawn again of a screen where a part of it changed. Uses parts of Textual that are not public; the
version is pinned.

Textual's own way asks every widget of the screen for all its rows, those that lie below others too, and throws
away what did not change: half of what the screen costs beside an engine that writes (measured: 0.87 of 1.6 s in
5 s of an answer, eight widgets a drawing where one had changed).
"""

from collections.abc import Iterable

from rich.console import Console
from textual._compositor import ChopsUpdate, Compositor
from textual.geometry import Region
from textual.strip import Strip


class ChangedRowsUpdate(ChopsUpdate):
    """The same bytes as Textual's, but for line ends between places that are named anyway, in two thirds of the
    time."""

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
    """Asks widgets only for the rows that changed, and only those that are seen there. What comes out is the
    same: a cell shows its topmost widget, and nothing shines through."""

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
        return self._renders_of_changes() if self._changed else super()._get_renders(crop)

    def _renders_of_changes(self) -> Iterable[tuple[Region, Region, list[Strip]]]:
        above: list[Region] = []
        for widget, (region, clip) in self.visible_widgets.items():  # the topmost first
            seen = region.intersection(clip)
            parts = [
                part
                for changed in self._changed
                if (part := seen.intersection(changed))
                and not any(other.contains_region(part) for other in above)
            ]
            above.append(seen)
            if parts:
                top, bottom = min(part.y for part in parts), max(part.bottom for part in parts)
                rows = Region(seen.x, top, seen.width, bottom - top)
                yield region, rows, widget.render_lines(rows.translate(-region.offset))
