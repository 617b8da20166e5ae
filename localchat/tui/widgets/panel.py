"""The panel of figures: one widget that paints its rows, and explains the figure that is marked."""

from textwrap import wrap
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import BindingType
from textual.reactive import reactive
from textual.strip import Strip
from textual.widget import Widget

from localchat.metrics import FIGURES
from localchat.tui.keys import bindings
from localchat.tui.live import Live
from localchat.tui.widgets.panel_rows import Piece, Row, rows_of

_EXPLAINING_ROWS = 4
_TWO_COLUMNS = 76
"""From this width on the rows stand in two columns: none of theirs is cut by half of it."""
_STYLES = (
    *("plain", "quiet", "heading", "figure", "spark", "bar", "rule", "about", "marked"),
    *("weights", "kv", "compute", "overhead"),
)


class Panel(Widget, can_focus=True):
    """Rows of figures above, one sentence about the marked one below. Cheapest as one widget: twelve small
    ones cost twice as much."""

    BINDINGS: ClassVar[list[BindingType]] = [*bindings("panel")]
    COMPONENT_CLASSES: ClassVar[set[str]] = {f"panel--{style}" for style in _STYLES}

    marked: reactive[int] = reactive(0, repaint=True)

    def __init__(self, live: Live, *, id: str) -> None:  # noqa: A002 - textual's word
        super().__init__(id=id)
        self._live = live
        self._rows: tuple[Row, ...] = ()
        self._looks: dict[str, Style] = {}
        self._top = 0

    def follow(self, live: Live) -> None:
        """Draw these figures from now on."""
        self._live = live
        self.changed()

    def changed(self) -> None:
        """The figures may be other ones."""
        if not self.display:
            return
        rows = rows_of(self._live, max(8, self._column_width - 3))
        if rows != self._rows:
            self._rows = rows
            self.refresh()

    def on_show(self) -> None:
        self.changed()

    def on_resize(self) -> None:
        self.changed()
        self._reveal()

    # ------------------------------------------------------------------ the marked figure

    def action_figure(self, step: int) -> None:
        """Mark the next figure, or the one before."""
        places = self._places()
        if not places:
            return
        at = next((n for n, row in enumerate(places) if row >= self.marked), 0)
        if places[at] == self.marked or step < 0:
            at = max(0, min(len(places) - 1, at + step))
        self.marked = places[at]
        self._reveal()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        self._mark_at(event.x, event.y)

    def on_click(self, event: events.Click) -> None:
        self.focus()
        self._mark_at(event.x, event.y)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._top = max(0, min(self._top + 2, len(self._rows) - self._shown))
        self.refresh()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._top = max(0, self._top - 2)
        self.refresh()

    def _mark_at(self, x: int, y: int) -> None:
        at = self._top + min(x // self._column_width, self._columns - 1) * self._room + y
        if y < self._room and at < len(self._rows) and self._rows[at].figure:
            self.marked = at

    def _places(self) -> list[int]:
        """The first row of each figure."""
        found, before = [], ""
        for at, row in enumerate(self._rows):
            if row.figure and row.figure != before:
                found.append(at)
            before = row.figure
        return found

    def _reveal(self) -> None:
        self._top = max(0, min(self._top, self.marked - 1))
        if self.marked >= self._top + self._shown:
            self._top = self.marked - self._shown + 1

    @property
    def _room(self) -> int:
        """Rows for figures; the rest is for the sentence."""
        return max(1, self.size.height - self._explaining)

    @property
    def _columns(self) -> int:
        return 2 if self.size.width >= _TWO_COLUMNS else 1

    @property
    def _column_width(self) -> int:
        return max(1, self.size.width // self._columns)

    @property
    def _explaining(self) -> int:
        """Rows of the sentence: a wide one takes fewer."""
        return _EXPLAINING_ROWS - self._columns + 1

    @property
    def _shown(self) -> int:
        """How many rows there are to see, in all columns."""
        return self._room * self._columns

    @property
    def figure(self) -> str:
        """The name of the marked figure; empty where none is."""
        row = self._rows[self.marked] if self.marked < len(self._rows) else None
        return row.figure if row else ""

    # ------------------------------------------------------------------ painting

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if y >= self._room:
            return self._painted(self._about(y - self._room, width - 3), width, marked=False)
        first = self._top + y
        columns = (self._cell(first + n * self._room) for n in range(self._columns))
        return Strip.join(columns).adjust_cell_length(width, self._look("plain"))

    def _cell(self, at: int) -> Strip:
        row = self._rows[at] if at < len(self._rows) else Row(())
        marked = bool(row.figure) and row.figure == self.figure and self.has_focus
        return self._painted(row.pieces, self._column_width, marked=marked)

    def _about(self, line: int, width: int) -> tuple[Piece, ...]:
        if line == 0:
            more = "── ↓ more " if self._top + self._shown < len(self._rows) else ""
            return (Piece(more.ljust(width, "─"), "rule"),)
        if not self.figure:
            hint = "Point at one, or Tab and ↑ ↓: what it is."
            return (Piece(hint[:width], "quiet"),) if line == 1 else ()
        sentences = wrap(FIGURES[self.figure].about, width)
        rows = self._explaining - 1
        if line - 1 >= len(sentences):
            return ()
        last = line == rows and len(sentences) > rows
        text = sentences[line - 1]
        return (Piece(text[: width - 1] + "…" if last else text, "about"),)

    def _painted(self, pieces: tuple[Piece, ...], width: int, *, marked: bool) -> Strip:
        base = self._look("plain")
        sign = Segment("▎" if marked else " ", self._look("marked"))
        segments = [sign, Segment(" ", base)]
        segments += [Segment(piece.text, self._look(piece.style)) for piece in pieces]
        return Strip(segments).adjust_cell_length(width, base)

    def _look(self, name: str) -> Style:
        """A style of the panel; Textual makes each anew whenever it is asked for."""
        if name not in self._looks:
            self._looks[name] = self.get_component_rich_style(f"panel--{name}")
        return self._looks[name]

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._looks = {}

    def on_focus(self) -> None:
        if not self.figure:
            self.action_figure(1)
        self.refresh()

    def on_blur(self) -> None:
        self.refresh()
