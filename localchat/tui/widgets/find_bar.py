"""Find in the conversation: one line above the transcript."""

from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.message import Message
from textual.widgets import Input, Static


class FindBar(Horizontal):
    """Posts nothing: it asks the `search` that it was given, which marks and counts."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", show=False),
        Binding("enter,down", "step(1)", show=False, priority=True),
        Binding("shift+enter,up", "step(-1)", show=False, priority=True),
    ]

    class Closed(Message):
        """The line is gone; the marks are to go, too."""

    def __init__(self, *, id: str) -> None:  # noqa: A002 - textual's word
        super().__init__(id=id)
        self.search: Callable[[str], int] = lambda text: 0
        self.step: Callable[[int], object] = lambda delta: None

    def compose(self) -> ComposeResult:
        yield Static(Content("find "), id="finder-label")
        yield Input(id="needle", compact=True)
        yield Static(Content(""), id="found")

    def open(self, text: str) -> None:
        """Show the line, and look for a text at once where one is given."""
        self.display = True
        needle = self.query_one(Input)
        needle.value = text
        needle.focus()
        self._look(text)

    def close(self) -> None:
        """Take the line and the marks away."""
        self.display = False
        self.search("")
        self.post_message(self.Closed())

    def action_close(self) -> None:
        self.close()

    def action_step(self, delta: int) -> None:
        self.step(delta)

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        if self.display:
            self._look(event.value)

    def _look(self, text: str) -> None:
        count = self.search(text)
        if count:
            self.step(0)
        words = "" if not text else "nothing" if not count else f"{count:,} found  ↑ ↓"
        self.query_one("#found", Static).update(Content(words))
