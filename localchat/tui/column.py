"""The centred column of a wide window: lines as long as a page's are easier to read than those of a wall."""

from typing import Final

from textual import events
from textual.containers import Vertical
from textual.screen import Screen
from textual.widget import Widget

from localchat.tui.transcript.block_rows import GUTTER, MAX_TEXT_CELLS
from localchat.tui.transcript.widget import Transcript

COLUMN_CELLS: Final = MAX_TEXT_CELLS + 2 * GUTTER
"""Width of the column."""
_CENTERED_FROM: Final = 160
_SCROLLBAR: Final = 1
_PANEL_CELLS: Final = 46
"""Width of the panel beside the conversation, as in the style sheet."""
_WHEEL_ROWS: Final = 3


def column_margins(window: int, taken: int) -> tuple[int, int]:
    """Cells left and right of the column in a window that is `window` cells wide. `taken`: cells at the right
    that belong to something else."""
    room = window - taken - _SCROLLBAR
    if window < _CENTERED_FROM or room <= COLUMN_CELLS:
        return 0, 0
    left = (room - COLUMN_CELLS) // 2
    return left, window - left - COLUMN_CELLS


def place_column(screen: Screen[None], window: int, *, has_panel: bool) -> None:
    """Put the conversation and the rows around it into the middle of a window."""
    left, right = column_margins(window, _PANEL_CELLS if has_panel else 0)
    for widget in screen.query("#heading, #banner, #composer, #status, #footer"):
        _set_margins(widget, left, right)
    for widget in screen.query("#transcript, #finder"):
        _set_margins(widget, left, 0)


def _set_margins(widget: Widget, left: int, right: int) -> None:
    """Set the margins of a widget, only if they changed."""
    margin = (0, right, 0, left)
    if tuple(widget.styles.margin) != margin:
        widget.styles.margin = margin


class Talk(Vertical):
    """The conversation and what stands in its place. The wheel beside the column scrolls it, too."""

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self.query_one(Transcript).scroll_relative(y=_WHEEL_ROWS, animate=False)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self.query_one(Transcript).scroll_relative(y=-_WHEEL_ROWS, animate=False)
