"""The message editor: a text area that sends with Enter and shows attachments as signs."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from textual import events
from textual.binding import BindingType
from textual.geometry import Offset
from textual.message import Message
from textual.strip import Strip
from textual.widgets import TextArea

from localchat.session.named_media import dropped_media
from localchat.tui.attachments import (
    ComposerAttachment,
    attachment_of_paste,
    clean,
    is_long,
)
from localchat.tui.keymap import bindings
from localchat.tui.textual_internals.ordered_keys import run_own_key


class Editor(TextArea):
    """Sends keys whose effect depends on completions and files to the composer."""

    BINDINGS: ClassVar[list[BindingType]] = [*bindings("composer")]

    @dataclass
    class ActionRequested(Message):
        """A key that the composer handles.

        A message keeps the order of keys: when it arrives, the editor contains all text typed before this key,
        and no text typed after it.
        """

        action: str
        """`send`, `accept`, `newline`, `editor`, or `up` and `down` at the edges of the text."""

    @dataclass
    class MediaDropped(Message):
        """Paths of pictures and recordings that were dropped on the terminal."""

        paths: list[Path]

    @dataclass
    class PictureRequested(Message):
        """Ctrl+V: paste the picture of the clipboard, or else this text."""

        text: str

    def __init__(self, on_action: Callable[[str], None], *, id: str) -> None:  # noqa: A002 - textual's word
        super().__init__(
            id=id,
            soft_wrap=True,
            tab_behavior="focus",
            show_line_numbers=False,
            highlight_cursor_line=False,
            max_checkpoints=200,
        )
        self.match_cursor_bracket = False
        self.attachments: tuple[ComposerAttachment, ...] = ()
        """All attachments. Those whose sign was deleted stay, because undo may restore it."""
        self.completing = False
        """Whether a list of completions is open."""
        self._on_action = on_action
        self._pastes = 0

    def render_line(self, y: int) -> Strip:
        # In a window of a few columns, Textual would wrap the placeholder to no column at all.
        if self.content_size.width < 1:
            return Strip.blank(self.size.width)
        return super().render_line(y)

    # ------------------------------------------------------------------ keys

    async def _on_key(self, event: events.Key) -> None:
        await run_own_key(self, event)

    def on_editor_action_requested(self, event: ActionRequested) -> None:
        event.stop()
        if event.action == "newline":
            self.insert("\n")
            self.scroll_cursor_visible()
        else:
            self._on_action(event.action)

    def action_request(self, action: str) -> None:
        self.post_message(self.ActionRequested(action))

    def action_up(self) -> None:
        if self.completing or (self.cursor_at_first_line and self.selection.is_empty):
            self.post_message(self.ActionRequested("up"))
        else:
            self.action_cursor_up()

    def action_down(self) -> None:
        if self.completing or (self.cursor_at_last_line and self.selection.is_empty):
            self.post_message(self.ActionRequested("down"))
        else:
            self.action_cursor_down()

    def action_delete_left(self) -> None:
        """Delete to the left. The sign of an attachment is deleted as a whole."""
        row, column = self.cursor_location
        before = self.document.get_line(row)[:column]
        for attachment in self.attachments:
            if self.selection.is_empty and before.endswith(attachment.sign):
                self.delete((row, column - len(attachment.sign)), (row, column))
                return
        super().action_delete_left()

    # ------------------------------------------------------------------ text

    async def on_paste(self, event: events.Paste) -> None:
        # Before TextArea handles it: a line of a megabyte would block the screen for seconds.
        event.stop()
        event.prevent_default()
        # Some terminals answer Ctrl+V with an empty paste if the clipboard has no text.
        if event.text:
            self.insert_paste(event.text)
        else:
            self.post_message(self.PictureRequested(""))

    def action_paste(self) -> None:
        """Paste a picture from the clipboard, or else the text that was cut here."""
        self.post_message(self.PictureRequested(self.app.clipboard))

    def insert_paste(self, text: str) -> None:
        """Insert a paste. A long paste becomes an attachment."""
        if paths := dropped_media(text):
            self.post_message(self.MediaDropped(paths))
            return
        text = clean(text)
        if not is_long(text):
            self.insert(text)
            self.scroll_cursor_visible()
            return
        self._pastes += 1
        attachment = attachment_of_paste(text, self._pastes)
        # An earlier message may have used the same sign.
        while any(attachment.sign == other.sign for other in self.attachments):
            self._pastes += 1
            attachment = attachment_of_paste(text, self._pastes)
        self.insert_attachment(attachment)

    def insert_attachment(self, attachment: ComposerAttachment) -> None:
        """Insert the sign of an attachment at the cursor."""
        self.attachments = (*self.attachments, attachment)
        self.insert(f"{attachment.sign} ")

    def replace_with_attachment(self, mention: str, attachment: ComposerAttachment) -> None:
        """Replace a mention with the sign of an attachment, if the text still contains it."""
        for row, line in enumerate(self.text.split("\n")):
            match = re.search(rf"(?<!\S){re.escape(mention)}", line)
            if match is not None:
                self.attachments = (*self.attachments, attachment)
                self.replace(attachment.sign, (row, match.start()), (row, match.end()))
                return

    def write(self, text: str, attachments: Sequence[ComposerAttachment] = ()) -> None:
        """Replace all text and move the cursor to the end."""
        self.attachments = tuple(attachments)
        self.load_text(text)
        self.move_cursor(self.document.end)

    def scroll_cursor_visible(self, center: bool = False, animate: bool = False) -> Offset:
        """Scroll to the cursor, unless an undo has removed its line."""
        if self.cursor_location[0] >= self.document.line_count:
            return Offset()
        return super().scroll_cursor_visible(center, animate)
