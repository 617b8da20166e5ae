"""Base of the screens above the chat: a framed list with a filter, and a line about the marked entry."""

from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

R = TypeVar("R")


class ListDialog(ModalScreen[R], Generic[R]):
    """A list with a filter. Subclasses implement `fill` and `entry_chosen`."""

    TITLE_TEXT: ClassVar[str] = ""
    FILTER_TEXT: ClassVar[str] = "type to filter"
    KEYS_TEXT: ClassVar[str] = ""
    AUTO_FOCUS = "#filter"
    CSS_PATH = "dialog.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", show=False),
        Binding("down", "step(1)", show=False, priority=True),
        Binding("up", "step(-1)", show=False, priority=True),
        Binding("pagedown", "step(8)", show=False, priority=True),
        Binding("pageup", "step(-8)", show=False, priority=True),
    ]

    shows_entry = False
    """Whether the line below the list is about the marked entry."""

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog") as box:
            box.border_title = Content(self.TITLE_TEXT)
            box.border_subtitle = Content(self.KEYS_TEXT)
            yield Input(id="filter", placeholder=self.FILTER_TEXT, compact=True)
            yield OptionList(id="entries", markup=False)
            yield Static("", id="about", markup=False)

    def on_mount(self) -> None:
        self.entries.can_focus = False
        self.fill("")

    @property
    def entries(self) -> OptionList:
        return self.query_one("#entries", OptionList)

    def fill(self, text: str) -> None:
        """Show the entries that match a filter."""
        raise NotImplementedError

    def entry_chosen(self, id_: str) -> None:
        """Handle Enter on an entry."""
        raise NotImplementedError

    def about(self, id_: str) -> str:
        """The line about an entry."""
        return ""

    # ------------------------------------------------------------------ the list

    def set_entries(self, rows: Sequence[tuple[str, Content]], *, keep: bool = False) -> None:
        """Show entries (id, line). A line without an id is a heading. `keep`: the marked entry stays marked."""
        before = self.marked if keep else None
        ids = [id_ for id_, _ in rows]
        first = next((at for at, id_ in enumerate(ids) if id_), None)
        # A queued message about the new mark would replace the line that is shown now.
        with self.prevent(OptionList.OptionHighlighted):
            self.entries.clear_options()
            self.entries.add_options(
                [Option(line, id=id_ or None, disabled=not id_) for id_, line in rows]
            )
            self.entries.highlighted = ids.index(before) if before and before in ids else first
            if self.entries.highlighted == first:
                self.entries.scroll_to(y=0, animate=False)  # with the heading above it
        self.show_about()

    def show_nothing(self, text: str) -> None:
        """Say in the empty list why it is empty."""
        self.set_entries([("", Content.styled(text, "$foreground 60%"))])

    @property
    def marked(self) -> str | None:
        """The id of the marked entry."""
        at = self.entries.highlighted
        return self.entries.get_option_at_index(at).id if at is not None else None

    def show_about(self, text: str | None = None) -> None:
        """Show a line below the list: by default the one about the marked entry."""
        self.shows_entry = text is None
        if text is None:
            text = self.about(self.marked) if self.marked is not None else ""
        self.query_one("#about", Static).update(Content(text))

    def action_step(self, delta: int) -> None:
        enabled = [at for at, option in enumerate(self.entries.options) if not option.disabled]
        if enabled:
            now = self.entries.highlighted
            at = (enabled.index(now) if now in enabled else 0) + delta
            self.entries.highlighted = enabled[max(0, min(len(enabled) - 1, at))]
            if at <= 0:
                self.entries.scroll_to(y=0, animate=False)
            self.show_about()

    def action_leave(self) -> None:
        self.dismiss(None)

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self.fill(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.text_entered(event.value.strip())

    def text_entered(self, text: str) -> None:
        """Handle Enter with this text in the filter. Subclasses override this, not `on_input_submitted`:
        Textual calls the handlers of base classes, too."""
        if self.marked is not None:
            self.entry_chosen(self.marked)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if event.option.id is not None:
            self.entry_chosen(event.option.id)

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        event.stop()
        self.show_about()
