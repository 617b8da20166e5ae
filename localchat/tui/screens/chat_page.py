"""The page of the chat screen: what its session shows goes to the transcript."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from localchat.tui.blocks import Block
from localchat.tui.repainting import ChangedOnly

if TYPE_CHECKING:
    from localchat.tui.screens.chat_frame import ChatFrame


class TranscriptPage:
    """Where the session shows blocks: see `page.Page`. Of the screen that it is made for, only what changed is
    drawn again."""

    def __init__(self, screen: "ChatFrame") -> None:
        self._screen = screen
        screen._compositor = ChangedOnly()

    def show(self, blocks: Sequence[Block]) -> None:
        self._screen.transcript.show(blocks)
        self._screen.blocks_changed()

    def put(self, block: Block) -> None:
        self._screen.transcript.put(block)
        if self._screen.is_welcoming:
            self._screen.blocks_changed()

    def append_text(self, id_: str, text: str) -> None:
        self._screen.transcript.append_text(id_, text)

    def finish(self, block: Block) -> None:
        self._screen.transcript.put(block)
        self._screen.transcript.finish(block.id)

    def figures_changed(self) -> None:
        self._screen.figures_changed()
