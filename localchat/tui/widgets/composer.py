"""The foot of the chat: completions, what is attached, and the editor."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from textual import work
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList, Static, TextArea
from textual.widgets.option_list import Option

from localchat.chat.conversation import Inclusion
from localchat.errors import FileMissing, LocalchatError
from localchat.sanitize import sanitize_line
from localchat.session.commands import COMMANDS, is_command, is_known, matching
from localchat.tui.attachments import Attachment, ComposerText, attachment_of_file, expand, present
from localchat.tui.file_completion import (
    find_files,
    is_path,
    list_folder,
    mentioned_files,
    missing_paths,
    path_of,
    rank_names,
)
from localchat.tui.widgets.editor import Editor

CountTokens = Callable[[str], Awaitable[int]]
"""How many tokens a text has for the model that answers now. Raises LocalchatError where nobody can say."""
_SHOWN = 8
_OFFERED = 50


class Composer(Vertical):
    """Writes one message at a time. `sent` holds the messages of before, oldest first, for the up key;
    `hindered` says whether a message, which is no command, must wait."""

    @dataclass
    class Sent(Message):
        """A message is complete: its text with everything included."""

        text: str
        inclusions: tuple[Inclusion, ...]

    class Blocked(Message):
        """A message is complete and cannot be sent now: it stays."""

    @dataclass
    class CommandEntered(Message):
        """A line that begins with a slash."""

        line: str

    class Changed(Message):
        """The text or its chips are not what they were: the draft is to be saved."""

    class EditorRequested(Message):
        """The person's own editor is to be opened."""

    class Left(Message):
        """The focus is to go to the transcript."""

    @dataclass
    class Refused(Message):
        """Something cannot be included."""

        problem: LocalchatError

    def __init__(self, *, id: str) -> None:  # noqa: A002 - textual's word
        super().__init__(id=id)
        self.root = Path.cwd()
        self.count_tokens: CountTokens | None = None
        self.is_blocked: Callable[[], bool] = lambda: False
        self.sent: list[ComposerText] = []
        self._at: int | None = None
        self._kept = ComposerText()
        self._files: tuple[str, ...] | None = None
        self._found: list[str] = []
        self._counted: dict[str, int | None] = {}
        self._refused: set[str] = set()
        self._silent: str | None = None
        self._seen = ""

    def compose(self) -> ComposeResult:
        yield OptionList(id="completions", markup=False)
        yield Static("", id="completion-help", markup=False)
        yield Static("", id="attached", markup=False)
        yield Editor(self._decide, id="editor")

    def on_mount(self) -> None:
        self.completions.can_focus = False
        self.editor.placeholder = Content("Ask anything   / commands   @ files")

    @property
    def editor(self) -> Editor:
        return self.query_one(Editor)

    @property
    def completions(self) -> OptionList:
        return self.query_one("#completions", OptionList)

    # ------------------------------------------------------------------ the message

    @property
    def text(self) -> str:
        """As it is written, signs for what is included."""
        return self.editor.text

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        return present(self.editor.text, self.editor.attachments)

    @property
    def written(self) -> ComposerText:
        """Text and chips together."""
        return ComposerText(self.text, self.attachments)

    def write(self, text: str, attachments: Sequence[Attachment] = ()) -> None:
        """Put a text into the editor, to be changed and sent."""
        self._silent = text
        self.editor.write(text, attachments)
        self.editor.focus()

    def replace_text(self, text: str) -> None:
        """The text as the person's own editor left it. What was a chip is text now, or one chip again where
        it is long."""
        self.editor.write("")
        self.editor.insert_paste(text)
        self.editor.focus()

    def _send(self) -> None:
        written = self.written
        if not written.text.strip():
            return
        if not is_command(written.text) and self.is_blocked():
            self.post_message(self.Blocked())
            return
        self.sent.append(written)
        self._at = None
        self._refused.clear()  # the next message may name a file that is there by then
        self.editor.write("")
        text, inclusions = expand(*written)
        if is_command(written.text):
            self.post_message(self.CommandEntered(text))
        else:
            self.post_message(self.Sent(text if inclusions else text.strip(), inclusions))

    # ------------------------------------------------------------------ keys

    def _decide(self, what: str) -> None:
        """Called by the editor between two keys."""
        if self.editor.text != self._seen:
            self._look_again()  # the keys came faster than the messages about them
        match what:
            case "send":
                taken = self._completing and self._accept(sending=True)
                if not taken and not self._include_named() and not self._hold_astray():
                    self._send()
            case "accept":
                if not (self._completing and self._accept(sending=False)):
                    self.post_message(self.Left())
            case "up" | "down" if self._completing:
                step = self.completions.action_cursor_up
                (step if what == "up" else self.completions.action_cursor_down)()
                self._explain()
            case "up":
                self._recall(-1)
            case "down":
                self._recall(1)
            case "editor":
                self.post_message(self.EditorRequested())

    def close_completions(self) -> bool:
        """Esc: whether there was a list to close."""
        was = self._completing
        self._silent = self.editor.text
        self._offer([])
        return was

    def _recall(self, step: int) -> None:
        at = len(self.sent) if self._at is None else self._at
        if at == len(self.sent):
            self._kept = self.written
        at += step
        if not 0 <= at <= len(self.sent):
            return
        self._at = None if at == len(self.sent) else at
        text, attachments = self._kept if self._at is None else self.sent[at]
        self._silent = text
        self.editor.write(text, attachments)
        if step < 0:
            self.editor.move_cursor((0, len(self.editor.document.get_line(0))))

    # ------------------------------------------------------------------ completion

    def on_text_area_changed(self, event: TextArea.Changed) -> None:
        event.stop()
        self.post_message(self.Changed())
        self._show_attached()
        self._look_again()

    def _look_again(self) -> None:
        """Offer what completes the text as it stands now."""
        self._seen = self.editor.text
        if self._seen == self._silent:
            self._offer([])
            return
        self._silent = None
        self._complete()

    def on_text_area_selection_changed(self, event: TextArea.SelectionChanged) -> None:
        event.stop()

    @property
    def _completing(self) -> bool:
        return self.editor.completing

    def _complete(self) -> None:
        row, column = self.editor.cursor_location
        before = self.editor.document.get_line(row)[:column]
        if row == 0 and before.startswith("/") and " " not in before:
            self._offer_commands(before[1:])
            return
        word = before.rpartition(" ")[2]
        if word.startswith("@") and not word.startswith("@@"):
            self._offer_files(word[1:])
            return
        self._offer([])
        if before.endswith(" "):
            self._include_named()
        if row == 0 and before.startswith("/"):
            self._explain_command(before[1:].partition(" ")[0])

    def _offer_commands(self, prefix: str) -> None:
        found = matching(prefix)
        rows = [
            (f"/{each.name}", f"/{each.name} {each.arguments}".ljust(21) + each.about)
            for each in found
        ]
        self._offer(rows)

    @work(exclusive=True, group="files")
    async def _offer_files(self, word: str) -> None:
        if is_path(word):
            names = await asyncio.to_thread(list_folder, word)
            ranked = [name for name in names if name.startswith(word)]
        else:
            if self._files is None:
                self._files = await asyncio.to_thread(find_files, self.root)
            ranked = await asyncio.to_thread(rank_names, word, self._files)
        if self._word_now() == f"@{word}":
            self._offer([(f"@{name}", sanitize_line(name)) for name in ranked[:_OFFERED]])

    def _word_now(self) -> str:
        row, column = self.editor.cursor_location
        return self.editor.document.get_line(row)[:column].rpartition(" ")[2]

    def _offer(self, rows: Sequence[tuple[str, str]]) -> None:
        """Show these completions (word, line); none closes the list."""
        self._found = [word for word, _ in rows]
        self.editor.completing = bool(rows)
        if rows or self.completions.display:
            self.completions.clear_options()
            self.completions.add_options([Option(Content(line)) for _, line in rows])
            self.completions.styles.height = min(_SHOWN, len(rows))
            self.completions.display = bool(rows)
            if rows:
                self.completions.highlighted = 0
        self._explain()

    def _explain(self) -> None:
        at = self.completions.highlighted
        if not self._completing or at is None:
            self._explain_command("")
        elif self._found[at].startswith("/"):
            self._explain_command("")  # the list says it already
        else:
            self._help("Enter includes the file; its size and tokens show before you send.")

    def _explain_command(self, name: str) -> None:
        known = next((each for each in COMMANDS if each.name == name), None)
        self._help(f"/{known.name} {known.arguments}  {known.about}" if known else "")

    def _help(self, text: str) -> None:
        line = self.query_one("#completion-help", Static)
        line.display = bool(text)
        line.update(Content(text))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self._accept(sending=False)

    def _accept(self, *, sending: bool) -> bool:
        """Take the marked completion. False where it is written out already, so that Enter sends it."""
        at = self.completions.highlighted or 0
        word = self._found[at]
        if word.startswith("/"):
            return self._accept_command(word, sending=sending)
        row, column = self.editor.cursor_location
        start = (row, column - len(self._word_now()))
        if word.endswith("/"):
            self.editor.replace(word, start, (row, column))
            self.editor.move_cursor((row, start[1] + len(word)))
        else:
            self.editor.delete(start, (row, column))
            self._include(word[1:])
        return True

    def _accept_command(self, word: str, *, sending: bool) -> bool:
        """What stands behind the half-written command stays."""
        line = self.editor.document.get_line(0)
        if sending and is_known(line.partition(" ")[0]):
            self._offer([])
            return False
        end = self.editor.cursor_location[1]
        missing = word[end:]
        end += len(missing) if line[end:].startswith(missing) else 0
        self.editor.replace(word if line[end:].startswith(" ") else f"{word} ", (0, 0), (0, end))
        self.editor.move_cursor((0, len(word) + 1))
        return True

    # ------------------------------------------------------------------ what is included

    @work(group="include")
    async def _include(self, name: str) -> None:
        attachment = await self._attachment_of(name)
        if attachment is not None:
            self.editor.insert_attachment(attachment)

    def _include_named(self) -> bool:
        """Include the files whose names were written out and not taken from the list, before the message is
        sent. False where there are none but those that were refused: these stay text."""
        names = [
            name
            for name in mentioned_files(self.editor.text, self.root)
            if name not in self._refused
        ]
        if names:
            self._include_all(names)
        return bool(names)

    def _hold_astray(self) -> bool:
        """Keep a message back, once, where a path after @ leads to no file: sent as it is, it would look as if
        the file went along."""
        text = self.editor.text
        names = [] if is_command(text) else missing_paths(text, self.root)
        names = [name for name in names if name not in self._refused]
        for name in names:
            hint = f"Enter again sends @{name} as it is written"
            self.post_message(self.Refused(FileMissing(f"there is no file {name}", hint=hint)))
        self._refused.update(names)
        return bool(names)

    @work(exclusive=True, group="include-named")
    async def _include_all(self, names: Sequence[str]) -> None:
        for name in names:
            attachment = await self._attachment_of(name)
            if attachment is None:
                self._refused.add(name)
            else:
                self.editor.replace_with_attachment(f"@{name}", attachment)

    async def _attachment_of(self, name: str) -> Attachment | None:
        signs = [attachment.sign for attachment in self.editor.attachments]
        try:
            return await asyncio.to_thread(
                attachment_of_file, path_of(name, self.root), name, signs
            )
        except LocalchatError as problem:
            self.post_message(self.Refused(problem))
            return None

    def _show_attached(self) -> None:
        line = self.query_one("#attached", Static)
        attachments = self.attachments
        line.display = bool(attachments)
        if not attachments:
            return
        parts = []
        for attachment in attachments:
            words = (
                attachment.label,
                attachment.size,
                self._tokens_of(attachment),
                attachment.note,
            )
            parts.append(" · ".join(filter(None, words)))
        line.update(Content("   ".join(parts)))
        if any(attachment.text not in self._counted for attachment in attachments):
            self._count(attachments)

    def _tokens_of(self, attachment: Attachment) -> str:
        if attachment.text not in self._counted:
            return "counting …"
        count = self._counted[attachment.text]
        return "tokens unknown" if count is None else f"{count:,} tokens"

    @work(exclusive=True, group="count")
    async def _count(self, attachments: Sequence[Attachment]) -> None:
        if self.count_tokens is None:
            return
        for attachment in attachments:
            if attachment.text not in self._counted:
                try:
                    self._counted[attachment.text] = await self.count_tokens(attachment.text)
                except LocalchatError:
                    self._counted[attachment.text] = (
                        None  # a server that does not count, or no engine
                    )
        self._show_attached()

    def recount(self) -> None:
        """Another model counts otherwise."""
        self._counted.clear()
        self._show_attached()
