"""History screen: search, resume, rename, delete and restore conversations."""

import time
from datetime import datetime
from typing import TYPE_CHECKING, ClassVar

from textual.binding import BindingType
from textual.content import Content
from textual.widgets import Input

from localchat.errors import LocalchatError
from localchat.sanitize import sanitize_line
from localchat.tui.keymap import bindings
from localchat.tui.screens.list_dialog import ListDialog

if TYPE_CHECKING:
    from localchat.history.queries import ConversationSummary, SearchHit
    from localchat.history.store import History

_MAX_SHOWN = 100
_MATCH_STYLE = "bold $accent"


class HistoryScreen(ListDialog[str]):
    """Returns the id of the conversation to resume, or None."""

    TITLE_TEXT = "Conversations"
    FILTER_TEXT = "Search titles and messages"
    KEYS_TEXT = "Enter open · ^S rename · Del delete · ^Z undo · Esc back"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("history")]

    def __init__(self, history: "History") -> None:
        super().__init__()
        self._history = history
        self._summaries: dict[str, ConversationSummary] = {}
        self._deleted: list[ConversationSummary] = []
        self._renaming: str | None = None

    def fill(self, text: str) -> None:
        if self._renaming is not None:
            return
        self._fill(text)

    def _fill(self, text: str) -> None:
        try:
            if text.strip():
                hits = self._history.search(text, _MAX_SHOWN + 1)
                rows = [(hit.summary, _match_lines(hit)) for hit in hits]
            else:
                rows = [(one, _title_line(one)) for one in self._history.list(_MAX_SHOWN + 1)]
        except LocalchatError as problem:
            self.show_about(str(problem))
            return
        more = f", the newest {_MAX_SHOWN}: search for older ones" if len(rows) > _MAX_SHOWN else ""
        self.query_one("#dialog").border_title = Content(f"{self.TITLE_TEXT}{more}")
        del rows[_MAX_SHOWN:]
        self._summaries = {summary.id: summary for summary, _ in rows}
        self.set_entries([(summary.id, line) for summary, line in rows], keep=True)
        if not rows:
            self.show_about("nothing found" if text.strip() else "no conversations yet")

    def about(self, id_: str) -> str:
        summary = self._summaries.get(id_)
        if summary is None:
            return ""
        plural = "" if summary.messages == 1 else "s"
        return (
            f"{summary.messages} message{plural} · {sanitize_line(summary.model) or 'no model'} · "
            f"begun {_date(summary.created_s)} · {_short(id_)}"
        )

    def entry_chosen(self, id_: str) -> None:
        if self._renaming is None:
            self.dismiss(id_)
            return
        renamed, self._renaming = self._renaming, None
        field = self.query_one("#filter", Input)
        try:
            self._history.rename(renamed, field.value)
        except LocalchatError as problem:
            self.show_about(str(problem))
        field.placeholder = self.FILTER_TEXT
        field.value = ""
        self._fill("")

    def action_rename(self) -> None:
        if self.marked is None:
            return
        self._renaming = self.marked
        field = self.query_one("#filter", Input)
        field.value = self._summaries[self.marked].title
        field.cursor_position = len(field.value)
        self.show_about("Enter renames, Esc keeps the old title")

    def action_delete(self) -> None:
        if self.marked is None or self._renaming is not None:
            return
        summary = self._summaries[self.marked]
        self._history.delete(summary.id)
        self._deleted.append(summary)
        self._fill(self.query_one("#filter", Input).value)
        self.show_about(f"Deleted {sanitize_line(summary.title)}, Ctrl+Z to restore")

    def action_undo(self) -> None:
        if not self._deleted:
            self.show_about("nothing to restore")
            return
        summary = self._deleted.pop()
        self._history.restore(summary.id)
        self._fill(self.query_one("#filter", Input).value)
        self.show_about(f"Restored {sanitize_line(summary.title)}")

    def action_leave(self) -> None:
        if self._renaming is not None:
            self._renaming = None
            self.query_one("#filter", Input).value = ""
            self._fill("")
            return
        self.dismiss(None)


def _title_line(summary: "ConversationSummary") -> Content:
    return Content.assemble(
        (f"{_when(summary.updated_s):>9}  ", "$foreground 60%"), sanitize_line(summary.title)
    )


def _match_lines(hit: "SearchHit") -> Content:
    """The title and, below it, the text around the match."""
    snippet = Content(sanitize_line(hit.snippet))
    for start, end in hit.marks:
        snippet = snippet.stylize(_MATCH_STYLE, start, end)
    head = _title_line(hit.summary)
    return head if hit.node_id is None else Content("\n").join([head, Content(" " * 11) + snippet])


def _when(seconds: float) -> str:
    passed = time.time() - seconds
    if passed < 60:
        return "now"
    if passed < 3600:
        return f"{passed // 60:.0f} min"
    if passed < 24 * 3600:
        return f"{passed // 3600:.0f} h"
    return datetime.fromtimestamp(seconds).strftime("%d %b")


def _short(id_: str) -> str:
    """An abbreviated id, as `localchat history show` accepts it."""
    return id_[:12]


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
