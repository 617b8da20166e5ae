"""Help screen: all keys and commands."""

from collections.abc import Mapping
from itertools import zip_longest
from textwrap import wrap
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from localchat.session.commands import COMMANDS
from localchat.tui.keymap import KEYS, key_names

_TITLES = {
    "chat": "Anywhere",
    "app": "",
    "composer": "While you write",
    "transcript": "In the chat (Tab goes there)",
    "panel": "In the panel",
    "models": "In the list of models",
    "history": "In the list of conversations",
}


_CHANGE_KEYS = "Keys are changed in the settings file, under [keys], by the grey names:"
_KEY_CELLS = 24
_NARROW = 56
"""Width in cells below which the explanation stands under its key, not next to it."""


class HelpScreen(ModalScreen[None]):
    """Lists commands, then keys by the place where they work."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,f1,q", "leave", show=False)]
    AUTO_FOCUS = "#help-text"
    CSS_PATH = "dialog.tcss"

    def __init__(self, table: Mapping[str, str]) -> None:
        super().__init__()
        self._keymap_table = table

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog") as box:
            box.border_title = Content("Help")
            box.border_subtitle = Content("Esc back")
            with VerticalScroll(id="help-text"):
                yield Static("", id="help-lines", markup=False)

    def on_resize(self) -> None:
        width = self.query_one("#help-text").size.width - 2
        self.query_one("#help-lines", Static).update(self._text(max(20, width)))

    def _text(self, width: int) -> Content:
        lines: list[Content] = [Content.styled("Commands", "bold $primary")]
        lines += [
            _line(width, f"/{each.name} {each.arguments}".strip(), each.about) for each in COMMANDS
        ]
        lines += [
            _line(width, "@file", "Include a file; its size and tokens show before you send."),
            _line(width, "␣/text", "A space before the slash: it is sent as text."),
        ]
        for scope, title in _TITLES.items():
            if title:
                lines += [Content(""), Content.styled(title, "bold $primary")]
            for key in KEYS:
                if key.scope == scope:
                    lines.append(
                        _line(width, key_names(key.id, self._keymap_table), key.about, key.id)
                    )
        lines += [
            Content(""),
            *map(Content, wrap(_CHANGE_KEYS, width)),
            Content('[keys]\n"chat.new" = "ctrl+k"'),
        ]
        return Content("\n").join(lines)

    def action_leave(self) -> None:
        self.dismiss(None)


def _line(width: int, left: str, about: str, name: str = "") -> Content:
    """Two columns if there is room. A long explanation wraps in its column."""
    if width < _NARROW:
        under = [Content("  " + line) for line in wrap(about, width - 2)]
        under += [Content("  ") + Content.styled(name, "$foreground 45%")] if name else []
        keys = [Content.styled(line, "$accent") for line in wrap(left, width)]
        return Content("\n").join([*keys, *under])
    rows = zip_longest(
        wrap(left, _KEY_CELLS - 2), wrap(about, max(20, width - _KEY_CELLS)), fillvalue=""
    )
    lines = [
        Content.assemble((f"{key:<{_KEY_CELLS}}", "$accent" if key else ""), words)
        for key, words in rows
    ]
    if name:
        tail = Content.styled(name, "$foreground 45%")
        fits = lines[-1].cell_length + 2 + len(name) <= width
        lines[-1:] = (
            [lines[-1] + "  " + tail] if fits else [lines[-1], Content(" " * _KEY_CELLS) + tail]
        )
    return Content("\n").join(lines)
