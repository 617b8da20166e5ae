"""Settings screen: edits the settings file and keeps its comments."""

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Input

from localchat.config.parameters import PARAMETERS
from localchat.config.settings_file import read_settings, write_setting
from localchat.errors import LocalchatError
from localchat.sanitize import sanitize_line
from localchat.tui.screens.list_dialog import ListDialog
from localchat.tui.setting_labels import LABELS, matches, setting_line, value_words

if TYPE_CHECKING:
    from localchat.session.session import ChatSession

_GROUP_CELLS = 10
_NARROW = 60
"""Width of the window from which the groups of settings have a column."""


class SettingsScreen(ListDialog[dict[str, str | None]]):
    """Returns what was changed in the file, by key (None: removed)."""

    TITLE_TEXT = "Settings"
    KEYS_TEXT = "Enter change · ^X reset · Esc back"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+x", "reset", show=False, priority=True),
    ]

    def __init__(self, session: "ChatSession") -> None:
        super().__init__()
        self._session = session
        self._path = session.context.paths.settings_file
        self._changed: dict[str, str | None] = {}
        self._key: str | None = None

    def fill(self, text: str) -> None:
        if self._key is not None:
            return
        try:
            written = read_settings(self._path).defaults
        except LocalchatError as problem:
            self.set_entries([])
            self.show_about(str(problem))
            return
        keys = [key for key in LABELS if matches(key, text)]
        if not keys:
            self.show_nothing(f"no setting matches {text}")
            return
        self.set_entries([(key, self._line(key, written.get(key))) for key in keys], keep=True)

    def width_changed(self) -> None:
        self.fill(self.query_one("#filter", Input).value)

    def _line(self, key: str, written: object) -> Content:
        group = LABELS[key].group
        cells = _GROUP_CELLS
        if self.app.size.width < _NARROW:
            cells = 0
        if key != _first_of(group):
            group = ""
        head = f"{group:<{cells}}"[:cells]
        value = written
        style = "bold $accent"
        if written is None:
            value = getattr(self._session.setup.settings, key)
            style = "$foreground 70%"
        shown = sanitize_line(value_words(key, value))
        return setting_line(key, shown, style, self.line_cells, head)

    def about(self, id_: str) -> str:
        if id_ not in PARAMETERS:
            return ""
        where = f"{id_} in {sanitize_line(str(self._path))}"
        return f"{PARAMETERS[id_].meaning}\n{where}"

    def entry_chosen(self, id_: str) -> None:
        self._key = id_
        field = self.query_one("#filter", Input)
        field.placeholder = f"{LABELS[id_].text}: {PARAMETERS[id_].valid}"
        field.value = ""
        field.focus()
        self.show_about(f"{PARAMETERS[id_].meaning} Enter saves it.")

    def text_entered(self, text: str) -> None:
        if self._key is None:
            super().text_entered(text)
        elif text:
            self._write(self._key, text)
        else:
            self.action_leave()

    def action_reset(self) -> None:
        if self.marked is not None:
            self._write(self.marked, None)

    def _write(self, key: str, text: str | None) -> None:
        try:
            write_setting(self._path, key, text)
        except LocalchatError as problem:
            self.show_about(str(problem))
            return
        self._changed[key] = text
        self._leave_key()
        if text is not None:
            self.show_about(f"{key} saved")
        else:
            self.show_about(f"{key} reset")

    def _leave_key(self) -> None:
        self._key = None
        field = self.query_one("#filter", Input)
        field.placeholder = self.FILTER_TEXT
        field.value = ""
        self.fill("")

    def action_leave(self) -> None:
        if self._key is not None:
            self._leave_key()
        else:
            self.dismiss(self._changed or None)


def _first_of(group: str) -> str:
    """Return the first setting of a group, whose line names it."""
    return next(key for key, label in LABELS.items() if label.group == group)
