"""Base of the screens of settings: a list, then a value for the chosen setting."""

from abc import abstractmethod
from collections.abc import Sequence

from textual.content import Content

from localchat.config.parameters import PARAMETERS
from localchat.config.settings import Given, convert
from localchat.errors import LocalchatError
from localchat.tui.screens.list_dialog import ListDialog
from localchat.tui.setting_labels import LABELS, matches


class SettingList(ListDialog[dict[str, str | None]]):
    """Lists settings, and takes a value for one of them. Returns the changes, by key."""

    _key: str | None = None
    """Setting whose value is typed."""

    @abstractmethod
    def keys(self) -> Sequence[str]:
        """Return the settings in the order of the list. Raises LocalchatError."""

    @abstractmethod
    def line(self, key: str) -> Content:
        """Return the line of a setting. Called after `keys`."""

    @abstractmethod
    def take(self, key: str, text: str) -> None:
        """Use a valid value. Raises LocalchatError."""

    def fill(self, text: str) -> None:
        if self._key is not None:
            self._check(self._key, text.strip())
            return
        try:
            keys = [key for key in self.keys() if matches(key, text)]
        except LocalchatError as problem:
            self.set_entries([])
            self.show_about(str(problem))
            return
        if keys:
            self.set_entries([(key, self.line(key)) for key in keys], mark=self.marked)
        else:
            self.show_nothing(f"no setting matches {text}")

    def width_changed(self) -> None:
        if self._key is None:
            self.fill(self.filter_input.value)

    def entry_chosen(self, id_: str) -> None:
        self._key = id_
        field = self.filter_input
        field.placeholder = f"{LABELS[id_].text}: {PARAMETERS[id_].valid}"
        field.value = ""
        field.focus()
        self.show_about(PARAMETERS[id_].meaning)

    def text_entered(self, text: str) -> None:
        if self._key is None:
            super().text_entered(text)
        elif not text:
            self.leave_key()
        else:
            self._take(self._key, text)

    def _take(self, key: str, text: str) -> None:
        try:
            convert(key, Given(text, ""))
            self.take(key, text)
        except LocalchatError as problem:
            self.show_about(str(problem))

    def _check(self, key: str, text: str) -> None:
        """Say below the list whether a typed value is valid."""
        if not text:
            return
        try:
            convert(key, Given(text, ""))
            self.show_about(f"Enter sets {key} to {text}")
        except LocalchatError as problem:
            self.show_about(problem.hint or problem.message)

    def leave_key(self) -> None:
        """Go back to the list."""
        self._key = None
        field = self.filter_input
        field.placeholder = self.FILTER_TEXT
        field.value = ""
        self.fill("")

    def action_leave(self) -> None:
        if self._key is not None:
            self.leave_key()
        else:
            self.leave()

    def leave(self) -> None:
        """Close the screen from the list."""
        self.dismiss(None)
