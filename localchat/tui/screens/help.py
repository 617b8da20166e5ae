"""Keys and commands, all of them."""

from collections.abc import Mapping
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from localchat.tui.commands import COMMANDS
from localchat.tui.keys import KEYS, keys_of

_TITLES = {
    "chat": "Anywhere",
    "app": "",
    "composer": "While you write",
    "transcript": "In the text (Tab goes there)",
    "panel": "In the panel",
    "models": "In the list of models",
    "history": "In the list of conversations",
}


class HelpScreen(ModalScreen[None]):
    """`table`: the keys that the settings give."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,f1,q", "leave", show=False)]
    AUTO_FOCUS = "#help-text"

    def __init__(self, table: Mapping[str, str]) -> None:
        super().__init__()
        self._table = table

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog") as box:
            box.border_title = Content("Help")
            box.border_subtitle = Content("Esc back")
            with VerticalScroll(id="help-text"):
                yield Static(self._text(), id="help-lines")

    def _text(self) -> Content:
        lines: list[Content] = [Content.styled("Commands", "bold $primary")]
        lines += [_line(f"/{each.name} {each.arguments}".strip(), each.about) for each in COMMANDS]
        lines += [
            _line("@file", "Include a file; its size and tokens show before you send."),
            _line("␣/text", "A space before the slash: it is sent as text."),
        ]
        for scope, title in _TITLES.items():
            if title:
                lines += [Content(""), Content.styled(title, "bold $primary")]
            for key in KEYS:
                if key.scope == scope:
                    lines.append(_line(keys_of(key.id, self._table), key.about, key.id))
        lines += [
            Content(""),
            Content("Keys are changed in the settings file, under [keys], by the grey names:"),
            Content('[keys]\n"chat.new" = "ctrl+k"'),
        ]
        return Content("\n").join(lines)

    def action_leave(self) -> None:
        self.dismiss(None)


def _line(left: str, about: str, name: str = "") -> Content:
    return Content.assemble(
        (f"  {left:<22} ", "$accent"), about, (f"  {name}" if name else "", "$text-disabled")
    )
