"""The transcript as the chat has it."""

from typing import ClassVar

from textual.binding import BindingType

from localchat.tui.keys import bindings
from localchat.tui.transcript import Transcript


class Talk(Transcript):
    """A transcript with the keys of the chat."""

    BINDINGS: ClassVar[list[BindingType]] = [*bindings("transcript")]
