"""The centred column of a wide window: lines as long as a page's are easier to read than those of a wall."""

from typing import Final

from textual.screen import Screen
from textual.widget import Widget

GUTTER: Final = 2
"""Cells beside a text."""
MAX_TEXT_CELLS: Final = 104
"""Longer lines are hard to read. Code and tables obey, too."""
COLUMN_CELLS: Final = MAX_TEXT_CELLS + 2 * GUTTER
"""Width of the column."""
_CENTERED_FROM: Final = 160
_SCROLLBAR: Final = 1
_PANEL_CELLS: Final = 46
"""Width of the panel beside the conversation, as in the style sheet."""


def column_margins(window: int, right_cells: int) -> tuple[int, int]:
    """Return the cells left and right of the column in a window of this width.

    `right_cells` are cells at the right that belong to something else.
    """
    room = window - right_cells - _SCROLLBAR
    if window < _CENTERED_FROM or room <= COLUMN_CELLS:
        return 0, 0
    left = (room - COLUMN_CELLS) // 2
    return left, window - left - COLUMN_CELLS


def place_column(screen: Screen[None], window: int, *, has_panel: bool) -> int:
    """Center the rows around the conversation in a window. Returns the cells left of them."""
    right_cells = 0
    if has_panel:
        right_cells = _PANEL_CELLS
    left, right = column_margins(window, right_cells)
    for widget in screen.query("#heading, #banner, #composer, #status, #footer"):
        set_margins(widget, left, right)
    return left


def set_margins(widget: Widget, left: int, right: int) -> None:
    """Set the margins of a widget, only if they changed."""
    margin = (0, right, 0, left)
    if tuple(widget.styles.margin) != margin:
        widget.styles.margin = margin
