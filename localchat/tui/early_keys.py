"""Keys that come while a screen opens, kept until it can take them.

Textual shows a screen before it has composed it. A key of that moment finds no field to write to, and the
action of a key finds no widgets.
"""

from collections import deque
from collections.abc import Awaitable, Callable

from textual import events
from textual.app import App
from textual.screen import Screen


class EarlyKeys:
    """Holds keys and pastes until the screen on top has composed itself. For the event loop of the app."""

    def __init__(self, app: App[int], give: Callable[[events.Event], Awaitable[None]]) -> None:
        """`give`: handles a key that the screen can take."""
        self._app = app
        self._give = give
        self._held: deque[events.Event] = deque()
        self._ready: Screen[object] | None = None
        self._asked: Screen[object] | None = None

    def hold(self, event: events.Event) -> bool:
        """Buffer an event if the top screen is not ready, or if others wait."""
        if not self._held and self._app.screen is self._ready:
            return False
        self._held.append(event)
        self._wait()
        return True

    def _wait(self) -> None:
        """Have the screen call after what it has to do first: compose itself, and focus its field."""
        screen = self._app.screen
        if self._asked is not screen:
            self._asked = screen
            if not screen.call_later(self._screen_stands, screen):
                self._screen_stands(screen)

    def _screen_stands(self, screen: Screen[object]) -> None:
        self._asked = None
        self._ready = screen
        self._app.call_later(self._release)

    async def _release(self) -> None:
        """Give the held events in their order. One of them may open another screen."""
        while self._held:
            if self._app.screen is not self._ready:
                self._wait()
                return
            await self._give(self._held.popleft())
