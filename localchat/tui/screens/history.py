"""History screen: search, resume, rename, delete and restore conversations."""

import asyncio
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import PurePath
from typing import TYPE_CHECKING, ClassVar

from textual import work
from textual.binding import BindingType
from textual.content import Content

from localchat.chat import ID_DIGITS
from localchat.errors import LocalchatError, UsageError
from localchat.sanitize import sanitize_line
from localchat.tui.keymap import bindings
from localchat.tui.screens.list_dialog import ListDialog
from localchat.units import counted, moment

if TYPE_CHECKING:
    from localchat.history.queries import ConversationSummary, SearchHit
    from localchat.history.store import History

_MAX_SHOWN = 100
"""Conversations that are listed first, and that each end of the list adds."""
_MATCH_STYLE = "bold $accent"


class HistoryScreen(ListDialog[tuple[str, str | None, str]]):
    """Returns a conversation's id, its matching message's id and the search, or None."""

    TITLE_TEXT = "Conversations"
    FILTER_TEXT = "Search titles and messages"
    KEYS_TEXT = "Enter open · ^S rename · Del delete · ^Z undo · Esc back"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("history")]

    def __init__(
        self,
        history: "History",
        flush: Callable[[], bool] = lambda: False,
        on_rename: Callable[[str, str], None] = lambda _id, _title: None,
    ) -> None:
        """`flush`: writes what is on its way to the history, and returns whether anything was.

        `on_rename`: called with the id and the new title of a conversation.
        """
        super().__init__()
        self._on_rename = on_rename
        self._history = history
        self._flush = flush
        self._summaries: dict[str, ConversationSummary] = {}
        self._matches: dict[str, str | None] = {}
        """Matching message of each conversation that a search lists."""
        self._deleted: list[ConversationSummary] = []
        self._renaming: str | None = None
        self._limit = _MAX_SHOWN
        self._has_more = False

    def on_mount(self) -> None:
        # Textual also calls `ListDialog.on_mount`, which fills the list.
        self._fill_once_written()

    @work(group="flush")
    async def _fill_once_written(self) -> None:
        try:
            was_behind = await asyncio.to_thread(self._flush)
        except LocalchatError:
            return  # the chat says what is wrong
        if was_behind and self.is_open:
            self.fill(self.filter_input.value)

    @property
    def deleted_ids(self) -> set[str]:
        """Ids of the conversations that were deleted here and not restored."""
        return {summary.id for summary in self._deleted}

    def fill(self, text: str) -> None:
        if self._renaming is not None:
            return
        self._fill(text)

    def _fill(self, text: str) -> None:
        self._matches = {}
        try:
            if text.strip():
                hits = self._history.search(text, self._limit + 1)
                rows = [(hit.summary, _match_lines(hit)) for hit in hits]
                self._matches = {hit.summary.id: hit.node_id for hit in hits}
            else:
                summaries = self._history.list(self._limit + 1)
                rows = [(summary, _title_line(summary)) for summary in summaries]
        except LocalchatError as problem:
            self.show_about(str(problem))
            return
        self._has_more = len(rows) > self._limit
        title = self.TITLE_TEXT
        if self._has_more:
            title += f", the newest {self._limit}: search for older ones"
        self.query_one("#dialog").border_title = Content(title)
        del rows[self._limit :]
        self._summaries = {summary.id: summary for summary, _ in rows}
        if not rows:
            reason = "no conversations yet"
            if text.strip():
                reason = f"nothing found for {text.strip()}"
            self.show_nothing(sanitize_line(reason))
            return
        self.set_entries(list(_in_days(rows, not text.strip())), mark=self.marked)

    def action_step(self, delta: int) -> None:
        """Move the mark. At the end of the list, load more conversations first."""
        enabled = [option.id for option in self.entries.options if not option.disabled]
        at_end = self.marked in enabled[-max(1, delta) :]
        if delta > 0 and at_end and self._has_more and self._renaming is None:
            self._limit += _MAX_SHOWN
            self._fill(self.filter_input.value)
        super().action_step(delta)

    def about(self, id_: str) -> str:
        summary = self._summaries.get(id_)
        if summary is None:
            return ""
        messages = counted(summary.messages, "message")
        return (
            f"{messages} · {_model_name(summary.model)} · "
            f"begun {moment(summary.created_s)} · {_short(id_)}"
        )

    def entry_chosen(self, id_: str) -> None:
        if self._renaming is None:
            self.dismiss((id_, self._matches.get(id_), self.filter_input.value))
            return
        try:
            title = self._history.rename(self._renaming, self.filter_input.value)
            self._on_rename(self._renaming, title)
        except LocalchatError as problem:
            self.show_about(str(problem))
        self._show_all()

    def _show_all(self) -> None:
        """Return from a title to the list."""
        self._renaming = None
        self.filter_input.value = ""
        self._fill("")

    def action_rename(self) -> None:
        if self.marked is None:
            return
        self._renaming = self.marked
        title = self._summaries[self.marked].title
        self.filter_input.value = title
        self.filter_input.cursor_position = len(title)
        self.show_about("Enter renames, Esc keeps the old title")

    def action_delete(self) -> None:
        if self.marked is None or self._renaming is not None:
            return
        summary = self._summaries[self.marked]
        try:
            self._history.delete(summary.id)
        except LocalchatError as problem:  # another program deleted it
            self._fill(self.filter_input.value)
            self.show_about(str(problem))
            return
        self._deleted.append(summary)
        self._fill(self.filter_input.value)
        self.show_about(f"Deleted {sanitize_line(summary.title)}, Ctrl+Z to restore")

    def action_undo(self) -> None:
        if not self._deleted:
            self.show_about("nothing to restore")
            return
        summary = self._deleted.pop()
        try:
            self._history.restore(summary.id)
        except UsageError:
            title = sanitize_line(summary.title)
            self.show_about(f"{title} cannot be restored: it was deleted for good")
            return
        except LocalchatError as problem:
            self.show_about(str(problem))
            return
        self._fill(self.filter_input.value)
        self.show_about(f"Restored {sanitize_line(summary.title)}")

    def action_leave(self) -> None:
        if self._renaming is not None:
            self._show_all()
        else:
            self.dismiss(None)


def _in_days(
    rows: "list[tuple[ConversationSummary, Content]]", with_days: bool
) -> Iterator[tuple[str, Content]]:
    """Yield the lines, each day below its name. A search lists the best match first."""
    before = ""
    for summary, line in rows:
        day = _day(summary.updated_s)
        if with_days and day != before:
            yield "", Content.styled(day, "$primary")
        before = day
        yield summary.id, line


def _day(seconds: float) -> str:
    """Return `Today`, `Yesterday`, `Earlier this week` or a month."""
    today = datetime.now().date()
    # The clock may have been wrong, by more years than a date has.
    then = datetime.fromtimestamp(min(seconds, time.time())).date()
    days = (today - then).days
    if days < 1:
        return "Today"
    if days == 1:
        return "Yesterday"
    if days < 7:
        return "Earlier this week"
    return then.strftime("%B %Y")


def _title_line(summary: "ConversationSummary") -> Content:
    return Content.assemble(
        (f"{_when(summary.updated_s):>9}  ", "$foreground 70%"), sanitize_line(summary.title)
    )


def _model_name(model: str) -> str:
    """Return the name of a model, or the last part of its path."""
    if model.startswith("/"):
        model = PurePath(model).name
    return sanitize_line(model) or "no model"


def _match_lines(hit: "SearchHit") -> Content:
    """The title and, below it, the text around the match."""
    snippet = Content(sanitize_line(hit.snippet))
    for start, end in hit.marks:
        snippet = snippet.stylize(_MATCH_STYLE, start, end)
    head = _title_line(hit.summary)
    if hit.node_id is None:
        return head
    return Content("\n").join([head, Content(" " * 11) + snippet])


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
    return id_[:ID_DIGITS]
