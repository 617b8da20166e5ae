"""Command palette: everything that keys, slash commands and settings can do, in one list with a filter."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple

from rich.cells import cell_len
from textual import work
from textual.content import Content
from textual.fuzzy import FuzzySearch

from localchat.history.queries import ConversationSummary
from localchat.sanitize import sanitize_line
from localchat.session.commands import COMMANDS
from localchat.tui.keymap import KEYS, key_names
from localchat.tui.screens.list_dialog import ListDialog
from localchat.tui.setting_labels import LABELS
from localchat.units import counted

_HIDDEN_KEYS = ("offer.", "view.up", "view.down", "view.end", "chat.", "screen.palette")
"""Prefixes of keys that commands repeat, or that have no meaning in a list."""


class PaletteEntry(NamedTuple):
    """Row of the palette."""

    label: str
    keys: str
    """Keys that do the same."""
    about: str
    action: str
    """`command LINE`, `write TEXT` (into the input), `action NAME` or `open ID` (a conversation)."""
    words: str = ""
    """More words that a filter finds it by."""


def fixed_entries(table: Mapping[str, str]) -> Iterator[PaletteEntry]:
    """Yield the entries that are always there. `table` is the keymap of the settings."""
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


def model_entries(names: Iterable[str]) -> Iterator[PaletteEntry]:
    """Yield entries that switch to a model of this computer."""
    for name in names:
        action = f"command /model {name}"
        yield PaletteEntry(f"Use {sanitize_line(name)}", "", "Model on this computer", action)


def conversation_entries(summaries: Iterable[ConversationSummary]) -> Iterator[PaletteEntry]:
    """Yield entries that open a conversation."""
    for summary in summaries:
        title = sanitize_line(summary.title) or "a conversation"
        about = f"Conversation of {counted(summary.messages, 'message')}"
        yield PaletteEntry(f"Open {title}", "", about, f"open {summary.id}")


class PaletteScreen(ListDialog[str]):
    """Returns the action of the chosen entry."""

    TITLE_TEXT = "Commands"
    KEYS_TEXT = "Enter run · Esc back"
    FILTER_TEXT = "type to filter: commands, settings, models, conversations"
    BINDINGS: ClassVar = []

    def __init__(
        self, entries: Sequence[PaletteEntry], more: Callable[[], Sequence[PaletteEntry]]
    ) -> None:
        """`more` returns entries that take time to find. It is called in a thread."""
        super().__init__()
        self._entries = list(entries)
        self._more = more
        self._filter = ""

    def on_mount(self) -> None:
        self._find_more()

    @work(thread=True, exclusive=True)
    def _find_more(self) -> None:
        entries = self._more()
        self.app.call_from_thread(self._add, entries)

    def _add(self, entries: Sequence[PaletteEntry]) -> None:
        self._entries += entries
        if self.is_open:
            self._show(keep=True)

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
