"""The conversation as the page shows it: its last messages, its versions. Nothing is asked here."""

from localchat.chat.conversation import Conversation, Node
from localchat.errors import UsageError
from localchat.tui.keeping import Keeper
from localchat.tui.live import Live
from localchat.tui.page import Page, blocks_of, node_blocks
from localchat.tui.workplace import Settled


class Shown:
    """See the module. `live`: figures, which another conversation does not take over. `settled`: the model and
    the settings that a new one begins with."""

    def __init__(
        self, conversation: Conversation, page: Page, keeper: Keeper, settled: Settled
    ) -> None:
        self.conversation = conversation
        self.keeper = keeper
        self.settled = settled
        self.live = Live(model=settled.model.name)
        self._page = page
        keeper.hold(conversation)

    def show(self) -> None:
        """The whole conversation anew."""
        self._page.show(blocks_of(self.conversation))
        self._page.figures_changed()

    def _show_new(self, node: Node) -> None:
        for block in node_blocks(self.conversation, node):
            self._page.put(block)
        self.keeper.changed(node)

    def last_question(self) -> Node | None:
        """The last message of the user on the shown path."""
        return self._last("user")

    def last_answer(self) -> Node | None:
        """The last message of a model on the shown path."""
        return self._last("assistant")

    def _last(self, role: str) -> Node | None:
        path = self.conversation.path()
        return next((node for node in reversed(path) if node.message.role == role), None)

    def undo(self) -> Node:
        """Take the last question and what followed it off the path. Raises UsageError."""
        question = self.last_question()
        if question is None:
            raise UsageError("there is nothing to undo")
        self.conversation.back_to(question.parent)
        self.keeper.changed()
        self.show()
        return question

    def walk(self, id_: str, step: int) -> str | None:
        """Show the next (1) or the previous (-1) version of a message; returns its id, None where there is
        no other."""
        siblings = self.conversation.siblings(id_)
        at = next(n for n, node in enumerate(siblings) if node.id == id_) + step
        if not 0 <= at < len(siblings):
            return None
        self.conversation.show(siblings[at].id)
        self.keeper.changed()
        self.show()
        return siblings[at].id

    def begin(self, *, system: str | None = None) -> None:
        """A new, empty conversation."""
        self.resume(
            Conversation(
                model=self.settled.model.word,
                system=(self.settled.settings.system or "") if system is None else system,
            )
        )

    def resume(self, conversation: Conversation) -> None:
        """Go on with another conversation."""
        self.keeper.hold(conversation)
        self.conversation = conversation
        self.live.done = self.live.figures = self.live.prefill = None
        self.show()

    def instruct(self, text: str) -> None:
        """Set the instructions that come first."""
        self.conversation.system = text
        self.keeper.changed()
