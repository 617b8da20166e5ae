"""Renders rows as strips in the colours of a theme."""

from bisect import bisect_right
from collections.abc import Mapping
from itertools import pairwise
from typing import Final

from rich.cells import split_graphemes
from rich.color import Color as RichColor
from rich.color_triplet import ColorTriplet
from rich.segment import ControlType, Segment
from rich.style import Style
from textual.cache import LRUCache
from textual.color import Color, ColorParseError
from textual.strip import Strip

from localchat.tui.pictures.cells import PictureCells, Rgb
from localchat.tui.transcript.markdown.rows import Look, Row

_TINTS: Final[Mapping[str, str]] = {
    "heading": "primary",
    "code": "accent",
    "link": "primary",
    "bullet": "primary",
    "code.comment": "muted",
    "code.label": "muted",
    "code.copy": "muted",
    "code.copied": "success",
    "code.keyword": "primary",
    "code.function": "warning",
    "code.class": "warning",
    "code.builtin": "accent",
    "code.string": "success",
    "code.number": "accent",
    "code.operator": "muted",
    "code.error": "error",
    "user.bar": "primary",
    "tool": "accent",
    "info": "primary",
    "warning": "warning",
    "error": "error",
    "number": "primary",
}
"""Theme colour of each tint. Other tints have the colour of text."""

_MUTED: Final = ("muted", "rule", "quote")
_NO_CONTROL: Final = ((ControlType.CURSOR_FORWARD, 0),)
_MAX_CACHED_STRIPS: Final = 3000
_CONTRAST: Final = 4.5
"""Minimal contrast of text in WCAG."""


class Palette:
    """Styles of a theme. `variables` are the app's theme variables, without the dollar sign."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self._styles: dict[tuple[Look, str, bool], Style] = {}
        self.ansi = variables.get("background", "").startswith("ansi")

    def style(self, look: Look, ground: str = "", dimmed: bool = False) -> Style:
        """Return the style of a piece. A dimmed piece loses only its colour."""
        key = (look, ground, dimmed)
        style = self._styles.get(key)
        if style is None:
            style = self._styles[key] = self._new_style(look, ground, dimmed)
        return style

    def ground(self, name: str) -> Style:
        """Style of empty cells."""
        return self.style(Look("text"), name)

    def selection(self) -> Style:
        """Style of selected text."""
        if self.ansi:
            return Style(reverse=True)
        return Style(bgcolor=self._color("primary").blend(self._base(), 0.55).rich_color)

    def _new_style(self, look: Look, ground: str, dimmed: bool) -> Style:
        muted = dimmed or look.tint in _MUTED or _TINTS.get(look.tint) == "muted"
        background = ground
        if look.tint == "chip":
            background = "chip"
        return Style(
            color=self._foreground(look.tint, muted, ground),
            bgcolor=self._background(background),
            bold=look.bold or None,
            italic=look.italic or None,
            strike=look.strike or None,
            underline=look.underline or None,
            dim=(muted and self.ansi) or None,
            link=look.link or None,
        )

    def _foreground(self, tint: str, muted: bool, ground: str) -> RichColor | None:
        role = _TINTS.get(tint, "foreground")
        if self.ansi:
            if muted or role == "foreground":
                return None
            return self._ansi_color(role)
        if muted:
            text = self._color("foreground")
            back = self._ground_color(ground)
            if tint in ("rule", "quote"):
                return text.blend(back, 0.7).rich_color
            return self._readable(text.blend(back, 0.42), back).rich_color
        if role == "foreground":
            return self._color(role).rich_color
        return self._readable(self._color(role), self._ground_color(ground)).rich_color

    def _readable(self, color: Color, ground: Color) -> Color:
        """Blend a colour with that of text until the contrast is sufficient.

        Themes choose accents for borders, and many are too pale on a light ground.
        """
        text = self._color("foreground")
        ground_color = ground.rich_color.get_truecolor()
        for _ in range(8):
            if contrast(color.rich_color.get_truecolor(), ground_color) >= _CONTRAST:
                break
            color = color.blend(text, 0.2)
        return color

    def _background(self, ground: str) -> RichColor | None:
        if self.ansi:
            return None
        return self._ground_color(ground).rich_color

    def _ground_color(self, ground: str) -> Color:
        base = self._base()
        match ground:
            case "code":
                return base.blend(self._color("foreground"), 0.055)
            case "user":
                return base.blend(self._color("primary"), 0.10)
            case "chip":
                return base.blend(self._color("primary"), 0.35)
            case _:
                return base

    def _base(self) -> Color:
        return self._color("background")

    def _color(self, name: str) -> Color:
        fallback = "white"
        if name == "background":
            fallback = "black"
        try:
            return Color.parse(self._variables.get(name, fallback))
        except ColorParseError:
            return Color.parse(fallback)

    def _ansi_color(self, role: str) -> RichColor:
        return RichColor.parse(self._variables.get(role, "default").removeprefix("ansi_"))


def contrast(first: ColorTriplet, second: ColorTriplet) -> float:
    """Return the contrast ratio of WCAG 2: 1 for equal colours, 21 for black on white."""
    dark, light = sorted((_luminance(first), _luminance(second)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(color: ColorTriplet) -> float:
    parts = [part / 255 for part in color]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


class StripRenderer:
    """Renders rows as strips of one width, and caches them."""

    def __init__(self, palette: Palette, width: int, column: int) -> None:
        """`width` is that of a strip. The background of a row ends at cell `column`."""
        self.palette = palette
        self.width = width
        self.column = min(column, width)
        self._cache: LRUCache[tuple[Row, bool], Strip] = LRUCache(_MAX_CACHED_STRIPS)

    def strip(self, row: Row, *, dimmed: bool = False) -> Strip:
        """Return the row, padded to the width."""
        key = (row, dimmed)
        strip = self._cache.get(key)
        if strip is None:
            strip = self._cache[key] = self._filled(self._segments(row, dimmed), row)
        return strip

    def overlaid_strip(
        self, row: Row, spans: list[tuple[int, int, Style]], *, dimmed: bool = False
    ) -> Strip:
        """Return the row with styles over spans of its characters. Not cached.

        A span that begins or ends inside a grapheme covers all of it, because half an emoji has another width.
        """
        segments: list[Segment] = []
        offset = 0
        for text, base, _ in self._segments(row, dimmed):
            for low, high in pairwise(_edges(text, offset, spans)):
                style = base or Style.null()
                for start, end, overlay in spans:
                    if start < offset + high and offset + low < end:
                        style += overlay
                segments.append(Segment(text[low:high], style))
            offset += len(text)
        return self._filled(segments, row)

    def _segments(self, row: Row, dimmed: bool) -> list[Segment]:
        style = self.palette.style
        segments = [
            Segment(text, style(look, row.ground if index >= row.bare else "", dimmed))
            for index, (text, look) in enumerate(row.pieces)
        ]
        return segments + [_picture_segment(cells) for cells in row.picture]

    def _filled(self, segments: list[Segment], row: Row) -> Strip:
        """Return a strip of the segments, filled with the row's and the widget's background."""
        cells = sum(segment.cell_length for segment in segments)
        fills = [(self.width, "")]
        if row.ground:
            fills.insert(0, (self.column, row.ground))
        for end, ground in fills:
            if cells < end:
                segments.append(Segment(" " * (end - cells), self.palette.ground(ground)))
                cells = end
        strip = Strip(segments, cells)
        if cells > self.width:
            return strip.crop(0, self.width)
        return strip


def _picture_segment(cells: PictureCells) -> Segment:
    if cells.is_control:
        # Textual writes the text of a control segment, and counts no cells for it.
        return Segment(cells.text, Style.null(), _NO_CONTROL)
    return Segment(
        cells.text, Style(color=_rich_color(cells.color), bgcolor=_rich_color(cells.ground))
    )


def _rich_color(rgb: Rgb | None) -> RichColor | None:
    return None if rgb is None else RichColor.from_rgb(*rgb)


def _edges(text: str, offset: int, spans: list[tuple[int, int, Style]]) -> list[int]:
    """Return the split positions of a segment that begins at character `offset`, its ends included."""
    edges = {edge - offset for start, end, _ in spans for edge in (start, end)}
    inside = {edge for edge in edges if 0 < edge < len(text)}
    if inside and not text.isascii():
        graphemes = [start for start, _, _ in split_graphemes(text)[0]]
        inside = {graphemes[bisect_right(graphemes, edge) - 1] for edge in inside}
    return sorted({0, *inside, len(text)})
