"""The banner above the composer: what lasts, and for some seconds what just happened."""

from textual.content import Content
from textual.timer import Timer
from textual.widgets import Static

_HINT_S = 2.5


class Banner(Static):
    """Hidden while it has nothing to show."""

    def __init__(self, *, id: str) -> None:  # noqa: A002 - textual's word
        super().__init__("", id=id, markup=False)
        self._lasting = ""
        self._is_list = False
        self._timer: Timer | None = None

    def keep(self, text: str, *, is_list: bool = False) -> None:
        """Show a text until another one is kept; an empty one hides the banner. `is_list`: each line has one
        row, which is cut where it does not fit."""
        self._lasting = text
        self._is_list = is_list
        self._restore()

    def hint(self, text: str) -> None:
        """Show a text for some seconds."""
        self._show(text)
        if self._timer is not None:
            self._timer.stop()  # the time of this text begins now
        self._timer = self.set_timer(_HINT_S, self._restore)

    def _restore(self) -> None:
        self._show(self._lasting, is_list=self._is_list)

    def _show(self, text: str, *, is_list: bool = False) -> None:
        self.display = bool(text)
        self.set_class(is_list, "-list")
        self.update(Content(text))
