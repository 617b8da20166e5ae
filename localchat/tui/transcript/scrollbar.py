"""The scroll bar of a transcript that follows its end: drawn at most four times a second, because one drawing
costs as much as ten rows, and more bytes."""

import time
from typing import Final

from textual.scroll_view import ScrollView
from textual.timer import Timer

_EVERY_S: Final = 0.25


class ScrollbarUpdates:
    """Tells the scroll bar of a view where the view is."""

    def __init__(self, view: ScrollView) -> None:
        self._view = view
        self._updated_s = float("-inf")
        self._timer: Timer | None = None

    @property
    def is_pending(self) -> bool:
        """Whether an update is still to come."""
        return self._timer is not None

    def update(self, *, following: bool) -> None:
        """Update it; while the end is followed, maybe later."""
        view = self._view
        now = time.monotonic()
        if following and now - self._updated_s < _EVERY_S:
            if self._timer is None and view.is_attached:
                self._timer = view.set_timer(_EVERY_S, self._is_due)
            return
        if self._timer is not None:
            self._timer.stop()
            self._timer = None
        self._updated_s = now
        bar = view.vertical_scrollbar
        bar.window_virtual_size = view.virtual_size.height
        bar.window_size = view.size.height
        bar.position = view.scroll_y

    def _is_due(self) -> None:
        self._timer = None
        self.update(following=False)
