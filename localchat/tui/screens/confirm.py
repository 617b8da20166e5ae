"""Confirmation: one question with a yes and a no."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option


class ConfirmScreen(ModalScreen[bool]):
    """Returns True for the first answer. Leaving the screen is a no."""

    AUTO_FOCUS = "#answers"
    CSS_PATH = "dialog.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,n", "answer(False)", show=False),
        Binding("y", "answer(True)", show=False),
    ]

    def __init__(self, title: str, about: str, yes: str) -> None:
        super().__init__()
        self._title = title
        self._about = about
        self._answers = (yes, "Not now")

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog", classes="-small") as box:
            box.border_title = Content(self._title)
            box.border_subtitle = Content("Enter choose · Esc back")
            yield Static(Content(self._about), id="question", markup=False)
            yield OptionList(*map(Option, map(Content, self._answers)), id="answers", markup=False)

    def on_mount(self) -> None:
        self.query_one(OptionList).highlighted = 0

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.dismiss(event.option_index == 0)

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)
