"""Settings screen: edits the settings file and keeps its comments."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content

from localchat.config.parameters import AT_START, PARAMETERS
from localchat.config.settings_file import read_settings, write_setting
from localchat.errors import LocalchatError
from localchat.sanitize import sanitize_line
from localchat.tui.screens.setting_list import SettingList
from localchat.tui.setting_labels import LABELS, setting_line, value_words

if TYPE_CHECKING:
    from localchat.session.session import ChatSession

_GROUP_CELLS = 10
_NARROW = 60
"""Width of the window from which the groups of settings have a column."""


class SettingsScreen(SettingList):
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
        self._written: Mapping[str, object] = {}
        self._changed: dict[str, str | None] = {}

    def keys(self) -> Sequence[str]:
        self._written = read_settings(self._path).defaults
        return list(LABELS)

    def line(self, key: str) -> Content:
        group = LABELS[key].group
        cells = _GROUP_CELLS
        if self.app.size.width < _NARROW:
            cells = 0
        if key != _first_of(group):
            group = ""
        head = f"{group:<{cells}}"[:cells]
        value = self._written.get(key)
        style = "bold $accent"
        if value is None:
            value = getattr(self._session.setup.settings, key)
            style = "$foreground 70%"
        shown = sanitize_line(value_words(key, value))
        return setting_line(key, shown, style, self.line_cells, head)

    def about(self, id_: str) -> str:
        if id_ not in PARAMETERS:
            return ""
        where = f"{id_} in {sanitize_line(str(self._path))}"
        return f"{PARAMETERS[id_].meaning}\n{where}"

    def take(self, key: str, text: str) -> None:
        self._write(key, text)
        text = f"{key} saved"
        if key in AT_START:
            text += " for the next start"
        self.show_about(text)

    def action_reset(self) -> None:
        if self.marked is None:
            return
        key = self.marked
        try:
            self._write(key, None)
            self.show_about(f"{key} reset")
        except LocalchatError as problem:
            self.show_about(str(problem))

    def _write(self, key: str, text: str | None) -> None:
        write_setting(self._path, key, text)
        self._changed[key] = text
        self.leave_key()

    def leave(self) -> None:
        self.dismiss(self._changed or None)


def _first_of(group: str) -> str:
    """Return the first setting of a group, whose line names it."""
    return next(key for key, label in LABELS.items() if label.group == group)
