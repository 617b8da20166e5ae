"""The message that has the focus in the transcript: its question, its text and its code blocks."""

from typing import TYPE_CHECKING

from localchat.session.blocks import ToolCallBlock
from localchat.session.view import node_of

if TYPE_CHECKING:
    from localchat.chat.conversation import Node
    from localchat.session.session import ChatSession
    from localchat.tui.transcript.widget import Transcript


class FocusedMessage:
    """Reads the block that has the focus."""

    def __init__(self, session: "ChatSession", transcript: "Transcript") -> None:
        self._session = session
        self._transcript = transcript
        self._code_at: dict[str, int] = {}

    @property
    def text(self) -> str:
        """Text of the message, or arguments of the tool call. Empty without a focus."""
        focused = self._transcript.focused_id
        if focused is None:
            return ""
        block = self._transcript.block(focused)
        if block is None:
            return ""
        if isinstance(block, ToolCallBlock):
            return block.arguments
        return block.text

    @property
    def node(self) -> "Node | None":
        focused = self._transcript.focused_id
        if focused:
            return self._session.conversation.nodes.get(node_of(focused))
        return None

    @property
    def question(self) -> "Node | None":
        """Question that has the focus, or whose answer has it."""
        nodes = self._session.conversation.nodes
        node = self.node
        while node is not None and node.message.role != "user":
            node = nodes.get(node.parent or "")
        return node

    def step_question(self, step: int) -> bool:
        """Focus the previous question (`step` -1) or the next one (1).

        After the last question, show the end. False if there is no question before.
        """
        if self._transcript.focus_question(step):
            return True
        if step > 0:
            self._transcript.unfocus_block()
            self._transcript.to_end()
        return step > 0

    def switch_version(self, step: int) -> bool:
        """Show the next (`step` 1) or previous (-1) version of the message.

        Without a focus, use the last message. False if there is no such version.
        """
        session = self._session
        node = self.node
        nodes = [node]
        if not node:
            nodes = [session.last_answer(), session.last_question()]
        return any(node and session.switch_version(node.id, step) is not None for node in nodes)

    def next_code(self) -> tuple[str, str]:
        """Return the next code block of the message and its name. After the last, restart."""
        focused = self._transcript.focused_id or ""
        blocks = self._transcript.code_blocks(focused)
        index = self._code_at.get(focused, 0) % max(1, len(blocks))
        self._code_at = {focused: index + 1}
        text = ""
        if blocks:
            text = blocks[index]
        return text, f"code {index + 1} of {len(blocks)}"
