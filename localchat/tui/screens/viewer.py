"""A text to be read: a file or a paste that a message includes."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import TextArea

from localchat.sanitize import sanitize, sanitize_line

_MOST = 200_000
_LONGEST_LINE = 2_000


class ViewerScreen(ModalScreen[None]):
    """Shows up to 200,000 characters; says so where there are more."""

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
    """Lines cut into pieces that a text area can take."""
    lines: list[str] = []
    for line in sanitize(text[:_MOST]).split("\n"):
        lines += [line[at : at + _LONGEST_LINE] for at in range(0, len(line) or 1, _LONGEST_LINE)]
    if len(text) > _MOST:
        lines.append(f"… {len(text) - _MOST:,} more characters are sent, and not shown here")
    return "\n".join(lines)
