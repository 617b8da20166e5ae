"""The middle of the chat screen: the conversation, the find bar and the welcome."""

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Final

from textual import events
from textual.containers import Vertical

from localchat.tui.column import set_margins
from localchat.tui.pictures.painter import PicturePainter

if TYPE_CHECKING:
    from localchat.tui.transcript.widget import Transcript
    from localchat.tui.widgets.find_bar import FindBar

_WHEEL_ROWS: Final = 3


class Talk(Vertical):
    """Builds the conversation and the find bar at their first use.

    The wheel scrolls beside the column, too.
    """

    _left = 0
    """Cells left of the column."""

    def __init__(self, *, id: str) -> None:  # noqa: A002 - textual's word
        super().__init__(id=id)
        self.make_painter: Callable[[], PicturePainter] = PicturePainter
        """Returns the painter of pictures for the current settings."""

    @cached_property
    def transcript(self) -> "Transcript":
        """The conversation. The first frame does not need it."""
        from localchat.tui.transcript.widget import Transcript

        transcript = Transcript(id="transcript")
        transcript.draw_pictures(self.make_painter())
        self.mount(transcript)
        set_margins(transcript, self._left, 0)
        return transcript

    @cached_property
    def finder(self) -> "FindBar":
        """The find bar."""
        from localchat.tui.widgets.find_bar import FindBar

        finder = FindBar(id="finder")
        finder.search = self.transcript.search
        finder.step = self.transcript.show_match
        self.mount(finder, before=0)
        set_margins(finder, self._left, 0)
        return finder

    def close_finder(self) -> bool:
        """Close the find bar. False if it is not open."""
        if "finder" not in self.__dict__ or not self.finder.display:
            return False
        self.finder.close()
        return True

    @property
    def has_transcript(self) -> bool:
        """Whether the conversation is built."""
        return "transcript" in self.__dict__

    def indent(self, left: int) -> None:
        """Put the conversation into the column."""
        self._left = left
        for widget in self.query("#transcript, #finder"):
            set_margins(widget, left, 0)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self.transcript.scroll_relative(y=_WHEEL_ROWS, animate=False)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self.transcript.scroll_relative(y=-_WHEEL_ROWS, animate=False)
