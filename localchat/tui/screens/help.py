"""Help screen: the essentials first, then all commands and keys, with a filter."""

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from textwrap import wrap
from typing import ClassVar, Final, NamedTuple

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from localchat.metrics import SHOWN
from localchat.session.commands import COMMANDS, QUESTIONS
from localchat.tui.keymap import KEYS, key_names
from localchat.tui.screens.list_dialog import DialogBox, FilterInput

_TITLES = {
    "chat": "Anywhere",
    "app": "",
    "composer": "While you write",
    "transcript": "In the chat (Tab goes there)",
    "models": "In the list of models",
    "history": "In the list of conversations",
}


_ESSENTIALS: Final = (
    *("composer.send", "composer.newline", "chat.stop", "chat.interrupt"),
    *("screen.models", "screen.history", "view.panel", "app.quit"),
)
"""Ids of the keys to know first."""
_CHANGE_KEYS = "Keys are changed in the settings file, under [keys], by the grey names:"
_KEY_CELLS = 24
_NARROW = 56
"""Width in cells below which an explanation is shown under its key instead of next to it."""


class HelpLine(NamedTuple):
    """A key or a command, and what it does."""

    section: str
    keys: str
    about: str
    name: str = ""
    """Name of a key in the settings file."""

    def matches(self, words: str) -> bool:
        """Return True if the line contains all these words."""
        text = " ".join(self).lower()
        return all(part in text for part in words.lower().split())


def help_lines(table: Mapping[str, str]) -> Iterator[HelpLine]:
    """Yield all lines, the essentials first. `table` is the keymap of the settings."""
    keys_by_id = {key.id: key for key in KEYS}
    for id_ in _ESSENTIALS:
        yield HelpLine("Essentials", key_names(id_, table), keys_by_id[id_].about)
    yield HelpLine("Essentials", "/", "Commands; type on to filter them")
    yield HelpLine(
        "Essentials", "@file", "Include a file; its size and tokens show before you send."
    )
    for command in COMMANDS:
        yield HelpLine("Commands", f"/{command.name} {command.arguments}".strip(), command.about)
    yield HelpLine("Commands", "␣/text", "A space before the slash: it is sent as text.")
    section = ""
    for scope, title in _TITLES.items():
        section = title or section
        for key in KEYS:
            if key.scope == scope:
                yield HelpLine(section, key_names(key.id, table), key.about, key.id)
        if scope == "composer":
            yield HelpLine(section, "Ctrl+V", "Paste; a picture in the clipboard is attached")
    for metric in SHOWN:
        yield HelpLine("Metrics", metric.label, metric.about)
    for question in QUESTIONS:
        for line in question.commands:
            yield HelpLine("In a shell", f"localchat {line}", question.question)


class HelpScreen(ModalScreen[None]):
    """Lists what to know first, commands, then keys by the place where they work."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,f1", "leave", show=False, priority=True),
        Binding("down", "scroll(1)", show=False, priority=True),
        Binding("up", "scroll(-1)", show=False, priority=True),
        Binding("pagedown", "scroll(12)", show=False, priority=True),
        Binding("pageup", "scroll(-12)", show=False, priority=True),
    ]
    AUTO_FOCUS = "#filter"
    CSS_PATH = "dialog.tcss"

    def __init__(self, table: Mapping[str, str]) -> None:
        super().__init__()
        self._lines = tuple(help_lines(table))

    def compose(self) -> ComposeResult:
        with DialogBox() as box:
            box.border_title = Content("Help")
            box.border_subtitle = Content("↑↓ PgDn scroll · Esc back")
            yield FilterInput("type to filter")
            with VerticalScroll(id="help-text", can_focus=False):
                yield Static("", id="help-lines", markup=False)

    def on_dialog_box_resized(self) -> None:
        self._show()

    def on_input_changed(self) -> None:
        self._show()
        self.query_one("#help-text").scroll_to(y=0, animate=False)

    def _show(self) -> None:
        width = max(20, self.query_one("#help-text").size.width - 2)
        words = self.query_one("#filter", Input).value
        self.query_one("#help-lines", Static).update(self._text(width, words))

    def _text(self, width: int, words: str) -> Content:
        lines: list[Content] = []
        section = ""
        shown: set[str] = set()  # a search needs no line twice
        for line in self._lines:
            if words.strip() and (not line.matches(words) or line.keys in shown):
                continue
            shown.add(line.keys)
            if line.section != section:
                if lines:
                    lines.append(Content(""))
                lines.append(Content.styled(line.section, "bold $primary"))
            section = line.section
            lines.append(_line(width, line.keys, line.about, line.name))
        if words.strip():
            return Content("\n").join(lines or [Content(f"nothing about {words.strip()}")])
        lines += [
            Content(""),
            *map(Content, wrap(_CHANGE_KEYS, width)),
            Content('[keys]\n"chat.new" = "ctrl+k"'),
        ]
        return Content("\n").join(lines)

    def action_scroll(self, rows: int) -> None:
        self.query_one("#help-text").scroll_relative(y=rows, animate=False)

    def action_leave(self) -> None:
        self.dismiss(None)


def _line(width: int, left: str, about: str, name: str = "") -> Content:
    """Lay out a line in two columns if there is room. A long explanation wraps."""
    if width < _NARROW:
        under = [Content("  " + line) for line in wrap(about, width - 2)]
        if name:
            under.append(Content("  ") + Content.styled(name, "$foreground 45%"))
        keys = [Content.styled(line, "$accent") for line in wrap(left, width)]
        return Content("\n").join([*keys, *under])
    rows = zip_longest(
        wrap(left, _KEY_CELLS - 2), wrap(about, max(20, width - _KEY_CELLS)), fillvalue=""
    )
    lines = []
    for key, words in rows:
        style = ""
        if key:
            style = "$accent"
        lines.append(Content.assemble((f"{key:<{_KEY_CELLS}}", style), words))
    if name:
        tail = Content.styled(name, "$foreground 45%")
        if lines[-1].cell_length + 2 + len(name) <= width:
            lines[-1] = lines[-1] + "  " + tail
        else:
            lines.append(Content(" " * _KEY_CELLS) + tail)
    return Content("\n").join(lines)
