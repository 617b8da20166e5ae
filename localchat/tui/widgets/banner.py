"""The banner above the composer: a lasting text, or a hint for some seconds."""

from textual.content import Content
from textual.timer import Timer
from textual.widgets import Static

_HINT_S = 2.5


class Banner(Static):
    """Shows a text above the composer. Hidden while the text is empty."""

    def __init__(self, *, id: str) -> None:  # noqa: A002 - textual's word
        super().__init__("", id=id, markup=False)
        self._lasting = ""
        self._is_list = False
        self._timer: Timer | None = None

    def keep(self, text: str, *, is_list: bool = False) -> None:
        """Show a lasting text. An empty text hides the banner.

        With `is_list`, each line has one row, which is cut at the width of the window. A text that is already
        shown does not end a hint.
        """
        if (text, is_list) == (self._lasting, self._is_list):
            return
        self._lasting = text
        self._is_list = is_list
        self._restore()

    def hint(self, text: str) -> None:
        """Show a text for some seconds."""
        self._show(text)
        if self._timer is not None:
            self._timer.stop()
        self._timer = self.set_timer(_HINT_S, self._restore)

    def _restore(self) -> None:
        self._show(self._lasting, is_list=self._is_list)

    def _show(self, text: str, *, is_list: bool = False) -> None:
        self.display = bool(text)
        self.set_class(is_list, "-list")
        self.update(Content(text))
