"""The find bar: one line above the transcript."""

from collections.abc import Callable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.message import Message
from textual.widgets import Input, Static


class FindBar(Horizontal):
    """Searches with the functions `search` and `step`, which the screen sets."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", show=False),
        Binding("enter,down", "step(1)", show=False, priority=True),
        Binding("shift+enter,up", "step(-1)", show=False, priority=True),
    ]

    DEFAULT_CSS = """
    FindBar {
        height: 1;
        padding: 0 2;
        background: $panel;
    }

    #finder-label, #found {
        width: auto;
        color: $text-muted;
    }

    #needle {
        width: 1fr;
        height: 1;
        border: none;
        padding: 0;
        background: $panel;
    }
    """

    class Closed(Message):
        """The bar was closed."""

    def __init__(self, *, id: str) -> None:  # noqa: A002 - textual's word
        self._needle = Input(id="needle", compact=True)
        self._found = Static(Content(""), id="found")
        label = Static(Content("find "), id="finder-label")
        super().__init__(label, self._needle, self._found, id=id)
        self.display = False
        self.search: Callable[[str], int] = lambda text: 0
        """Highlights the matches of a text and returns their number."""
        self.step: Callable[[int], int] = lambda delta: 0
        """Shows the next (1), previous (-1) or nearest (0) match, and returns its number."""
        self._count = 0

    def on_mount(self) -> None:
        # The bar may have been opened before it could have the focus.
        if self.display:
            self._needle.focus()

    def open(self, text: str) -> None:
        """Show the bar, and search for a text if one is given."""
        self.display = True
        self._needle.value = text
        self._needle.focus()
        self._find(text)

    def close(self) -> None:
        """Hide the bar and the highlights."""
        self.display = False
        self.search("")
        self.post_message(self.Closed())

    def action_close(self) -> None:
        self.close()

    def action_step(self, delta: int) -> None:
        self._show(self.step(delta))

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        if self.display:
            self._find(event.value)

    def _find(self, text: str) -> None:
        self._count = self.search(text)
        if not text:
            self._found.update(Content("type what to find"))
            return
        number = 0
        if self._count:
            number = self.step(0)
        self._show(number)

    def _show(self, number: int) -> None:
        """Show the number of the current match and the number of matches."""
        text = "nothing found"
        if self._count:
            text = f"{number:,} of {self._count:,}  ↑ ↓"
        self._found.update(Content(text))
