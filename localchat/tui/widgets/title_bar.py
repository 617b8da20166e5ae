"""The title bar of the chat screen: title of the conversation, and the model."""

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content
from textual.widgets import Static

from localchat.chat.titles import title_for
from localchat.sanitize import sanitize_line
from localchat.session.session import ChatSession


class TitleBar(Horizontal):
    """Shows the title and the model in one row. Redraws only if its text changes."""

    def __init__(self, *, id: str) -> None:  # noqa: A002 - textual's word
        super().__init__(id=id)
        self._labels: dict[str, str] = {}

    def compose(self) -> ComposeResult:
        yield Static("", id="title", markup=False)
        yield Static("", id="model", markup=False)

    def show(self, session: ChatSession) -> None:
        """Show the title and the model of a session."""
        think = session.setup.settings.think
        suffix = ""
        if think != "auto":
            suffix = f" · think {think}"
        title = sanitize_line(title_for(session.conversation)) or "New conversation"
        self._set_label("#title", title)
        self._set_label("#model", f"{sanitize_line(session.status.model)}{suffix}")

    def _set_label(self, selector: str, text: str) -> None:
        if self._labels.get(selector) != text:
            self._labels[selector] = text
            self.query_one(selector, Static).update(Content(text))
