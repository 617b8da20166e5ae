"""Viewer screen: a file or paste that a message includes. Loaded when it is first opened."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import TextArea

from localchat.sanitize import sanitize, sanitize_line

_MAX_CHARACTERS = 200_000
_MAX_LINE_CHARACTERS = 2_000


class ViewerScreen(ModalScreen[None]):
    """Shows up to 200,000 characters, and how many more there are."""

    CSS_PATH = "dialog.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,alt+o", "leave", show=False)]

    def __init__(self, title: str, text: str) -> None:
        super().__init__()
        self._title = title
        self._text = text

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog") as box:
            box.border_title = Content(sanitize_line(self._title))
            box.border_subtitle = Content("Esc back")
            yield TextArea(
                _readable(self._text), id="reading", read_only=True, show_line_numbers=True
            )

    def action_leave(self) -> None:
        self.dismiss(None)


def _readable(text: str) -> str:
    """Split the lines of a text to a length that a text area can show."""
    lines: list[str] = []
    for line in sanitize(text[:_MAX_CHARACTERS]).split("\n"):
        lines += [
            line[start : start + _MAX_LINE_CHARACTERS]
            for start in range(0, len(line) or 1, _MAX_LINE_CHARACTERS)
        ]
    if len(text) > _MAX_CHARACTERS:
        lines.append(
            f"… {len(text) - _MAX_CHARACTERS:,} more characters are sent but not shown here"
        )
    return "\n".join(lines)
