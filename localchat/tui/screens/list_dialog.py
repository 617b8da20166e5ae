"""Base of the screens above the chat: a framed list with a filter, and a line about the marked entry."""

from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from localchat.tui.textual_internals.ordered_keys import run_own_key

R = TypeVar("R")
_FRAME_CELLS = 2
"""Cells of the inner width that a text on the frame leaves free."""
_SCROLLBAR_CELLS = 1
_JOINT = " · "
_PARTS = 4


class FilterInput(Input):
    """The filter of a list, which has the focus."""

    def __init__(self, placeholder: str) -> None:
        super().__init__(id="filter", placeholder=placeholder, compact=True)

    async def _on_key(self, event: events.Key) -> None:
        await run_own_key(self, event)


class DialogBox(Vertical):
    """The frame of a dialog. It is laid out after its screen's resize event, narrow windows a second time."""

    class Resized(Message):
        """The frame, and all that is in it, has another size."""

    def __init__(self) -> None:
        super().__init__(id="dialog")

    def on_resize(self) -> None:
        self.post_message(self.Resized())


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
    """True if the line below the list describes the marked entry."""
    _about = ""

    def compose(self) -> ComposeResult:
        with DialogBox() as box:
            box.border_title = Content(self.TITLE_TEXT)
            yield FilterInput(self.FILTER_TEXT)
            yield OptionList(id="entries", markup=False)
            yield Static("", id="about", markup=False)
            yield Static("", id="keys", markup=False)

    def on_mount(self) -> None:
        self.entries.can_focus = False
        self.fill("")

    def on_dialog_box_resized(self) -> None:
        """Show the keys on the frame if they fit there, else below the list."""
        if not self.is_open:
            return
        box = self.query_one("#dialog")
        keys = self.query_one("#keys", Static)
        keys.display = len(self.KEYS_TEXT) > box.size.width - _FRAME_CELLS
        keys.update(Content(_wrapped_parts(self.KEYS_TEXT, box.size.width)))
        if keys.display:
            box.border_subtitle = Content("")
        else:
            box.border_subtitle = Content(self.KEYS_TEXT)
        shows_entry = self.shows_entry
        about = self._about
        self.width_changed()
        if not shows_entry:
            self.show_about(about)

    def width_changed(self) -> None:
        """Lay out again what depends on the width of the list."""

    @property
    def entries(self) -> OptionList:
        return self.query_one("#entries", OptionList)

    @property
    def filter_input(self) -> Input:
        return self.query_one("#filter", Input)

    def fill(self, text: str) -> None:
        """Show the entries that match a filter."""
        raise NotImplementedError

    def entry_chosen(self, id_: str) -> None:
        """Handle Enter on an entry."""
        raise NotImplementedError

    def about(self, id_: str) -> str:
        """Return the line about an entry."""
        return ""

    # ------------------------------------------------------------------ the list

    def set_entries(self, rows: Sequence[tuple[str, Content]], *, mark: str | None = None) -> None:
        """Show entries (id, line). A line without an id is a heading.

        `mark` is the entry to mark. Without it, or if it is not listed, that is the first one.
        """
        ids = [id_ for id_, _ in rows]
        first = next((index for index, id_ in enumerate(ids) if id_), None)
        highlighted = first
        if mark and mark in ids:
            highlighted = ids.index(mark)
        # A queued message about the new mark would replace the line that is shown now.
        with self.prevent(OptionList.OptionHighlighted):
            self.entries.clear_options()
            self.entries.add_options(
                [Option(line, id=id_ or None, disabled=not id_) for id_, line in rows]
            )
            self.entries.highlighted = highlighted
            if self.entries.highlighted == first:
                self.entries.scroll_to(y=0, animate=False)  # with the heading above it
        self.show_about()

    def show_nothing(self, text: str) -> None:
        """Show in the empty list why it is empty."""
        self.set_entries([("", Content.styled(text, "$foreground 70%"))])

    @property
    def is_open(self) -> bool:
        """False once the screen is closed, which takes its widgets before it ends its workers."""
        return len(self.query("#filter, #entries, #about, #keys")) == _PARTS

    @property
    def line_cells(self) -> int:
        """Width of a line of the list, beside its scrollbar. Before the first layout, that of a wide window."""
        return (self.entries.size.width or self.app.size.width) - _SCROLLBAR_CELLS

    @property
    def marked(self) -> str | None:
        """Id of the marked entry."""
        index = self.entries.highlighted
        if index is not None:
            return self.entries.get_option_at_index(index).id
        return None

    def show_about(self, text: str | None = None) -> None:
        """Show a line below the list: by default the one about the marked entry."""
        self.shows_entry = text is None
        if text is None:
            text = ""
            if self.marked is not None:
                text = self.about(self.marked)
        self._about = text
        self.query_one("#about", Static).update(Content(text))

    def action_step(self, delta: int) -> None:
        options = self.entries.options
        enabled = [index for index, option in enumerate(options) if not option.disabled]
        if enabled:
            now = self.entries.highlighted
            position = delta
            if now in enabled:
                position += enabled.index(now)
            self.entries.highlighted = enabled[max(0, min(len(enabled) - 1, position))]
            if position <= 0:
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
        """Handle Enter with this text in the filter.

        Subclasses override this, not `on_input_submitted`: Textual also calls the handlers of base classes.
        """
        if self.marked is not None:
            self.entry_chosen(self.marked)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if event.option.id is not None:
            self.entry_chosen(event.option.id)

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        event.stop()
        self.show_about()


def _wrapped_parts(text: str, width: int) -> str:
    """Wrap a line of parts between them."""
    lines = [""]
    for part in text.split(_JOINT):
        longer = part
        if lines[-1]:
            longer = f"{lines[-1]}{_JOINT}{part}"
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(part)
    return "\n".join(lines)
