"""The middle of the chat screen: the conversation and the welcome."""

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Final

from textual import events
from textual.containers import Vertical

from localchat.tui.column import set_margins
from localchat.tui.pictures.painter import PicturePainter

if TYPE_CHECKING:
    from localchat.tui.transcript.widget import Transcript

_WHEEL_ROWS: Final = 3


class Talk(Vertical):
    """Builds the conversation at its first use. The wheel scrolls beside the column, too."""

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

    @property
    def has_transcript(self) -> bool:
        """Whether the conversation is built."""
        return "transcript" in self.__dict__

    def indent(self, left: int) -> None:
        """Put the conversation into the column."""
        self._left = left
        for widget in self.query("#transcript"):
            set_margins(widget, left, 0)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self.transcript.scroll_relative(y=_WHEEL_ROWS, animate=False)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self.transcript.scroll_relative(y=-_WHEEL_ROWS, animate=False)
