"""Command palette: everything that keys, slash commands and settings can do, in one list with a filter."""

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple

from rich.cells import cell_len
from textual.content import Content
from textual.fuzzy import FuzzySearch

from localchat.session.commands import COMMANDS
from localchat.tui.keymap import KEYS, key_names
from localchat.tui.screens.list_dialog import ListDialog
from localchat.tui.setting_labels import LABELS

_HIDDEN_KEYS = ("offer.", "view.up", "view.down", "view.end", "chat.", "screen.palette")
"""Prefixes of keys that commands repeat, or that have no meaning in a list."""


class PaletteEntry(NamedTuple):
    """Row of the palette."""

    label: str
    keys: str
    """Keys that do the same."""
    about: str
    action: str
    """`command LINE`, `write TEXT` (into the input) or `action NAME`."""
    words: str = ""
    """More words that a filter finds it by."""


def fixed_entries(table: Mapping[str, str]) -> Iterator[PaletteEntry]:
    """Yield all entries. `table` is the keymap of the settings."""
    keys = {key.action: key_names(key.id, table) for key in KEYS}
    for key in KEYS:
        is_command = key.action.startswith("command(")
        is_hidden = key.id.startswith(_HIDDEN_KEYS) or is_command
        if key.scope in ("chat", "app") and not is_hidden:
            yield PaletteEntry(key.about, key_names(key.id, table), "", f"action {key.action}")
    for command in COMMANDS:
        line = f"/{command.name}"
        action = f"command {line}"
        label = line
        if command.required:
            action = f"write {line} "
            label = f"{line} {command.arguments}"
        yield PaletteEntry(label, keys.get(f"command('{line}')", ""), command.about, action)
    for key_name, row in LABELS.items():
        text = f"/set {key_name} "
        about = f"{row.group}: {row.text}"
        yield PaletteEntry(text.strip(), "", about, f"write {text}", key_name.replace("_", " "))


class PaletteScreen(ListDialog[str]):
    """Returns the action of the chosen entry."""

    TITLE_TEXT = "Commands"
    KEYS_TEXT = "Enter run · Esc back"
    FILTER_TEXT = "type to filter: commands and settings"
    BINDINGS: ClassVar = []

    def __init__(self, entries: Sequence[PaletteEntry]) -> None:
        super().__init__()
        self._entries = entries
        self._filter = ""

    def fill(self, text: str) -> None:
        self._filter = text.strip()
        self._show(keep=False)

    def _show(self, *, keep: bool) -> None:
        rows = [(str(index), self._row(self._entries[index])) for index in self._matching()]
        if rows:
            self.set_entries(rows, keep=keep)
        else:
            self.show_nothing(f"nothing matches {self._filter}")

    def _matching(self) -> list[int]:
        """Return indexes of the entries that match the filter, the best first."""
        if not self._filter:
            return list(range(len(self._entries)))
        search = FuzzySearch(case_sensitive=False)
        scored = []
        for index, entry in enumerate(self._entries):
            text = f"{entry.label} {entry.words} {entry.about}"
            is_word = self._filter.lower() in text.lower()
            score = search.match(self._filter, entry.label)[0]
            if is_word or score:
                scored.append((not is_word, -score, index))
        return [index for _, _, index in sorted(scored)]

    def _row(self, entry: PaletteEntry) -> Content:
        """Lay out a row: the label, its effect if there is room, and its keys."""
        room = self.line_cells - cell_len(entry.keys) - 1
        label = entry.label
        if entry.about:
            label = f"{entry.label:<26} "
        text = label + entry.about
        if cell_len(text) > room:
            text = f"{text[: max(1, room - 1)]}…"
        space = " " * max(1, room - cell_len(text))
        return Content.assemble(
            text[: len(label)],
            (text[len(label) :] + space, "$foreground 70%"),
            (entry.keys, "$primary"),
        )

    def width_changed(self) -> None:
        self._show(keep=True)

    def about(self, id_: str) -> str:
        entry = self._entries[int(id_)]
        return entry.about

    def entry_chosen(self, id_: str) -> None:
        self.dismiss(self._entries[int(id_)].action)
