"""The composer: editor, completions and attachments of the next message."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from textual import work
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList, Static, TextArea
from textual.widgets.option_list import Option

from localchat.chat.conversation import Question
from localchat.documents.folder import find_files
from localchat.errors import FileMissing, LocalchatError, UsageError
from localchat.sanitize import sanitize_line
from localchat.session.commands import COMMANDS, Command, is_command, is_known, matching
from localchat.session.file_mentions import (
    is_path,
    mentioned_files,
    missing_paths,
    path_of,
    unquoted,
)
from localchat.tui.attachments import (
    ComposerAttachment,
    ComposerText,
    attachment_of_file,
    attachment_of_media,
    clean,
    expand,
    present,
)
from localchat.tui.file_completion import list_folder, rank_names
from localchat.tui.widgets.editor import Editor

CountTokens = Callable[[str], Awaitable[int]]
"""Counts the tokens of a text for the current model. Raises LocalchatError if the server cannot count."""
_MAX_VISIBLE = 8
_MAX_COMPLETIONS = 50
_OTHER_ROWS = 7
"""Rows for the conversation, the help, the frame and the status."""
_NARROW = 60
"""Width below which the list of commands omits the arguments."""


class Completions(OptionList):
    """Completions of the word before the cursor.

    The first frame does not parse their styles.
    """

    DEFAULT_CSS = """
    Completions {
        height: auto;
        max-height: 8;
        text-wrap: nowrap;
        text-overflow: ellipsis;
        padding: 0 1;
        margin: 0 1;
        border: none;
        background: $surface;
    }

    Completions > .option-list--option-highlighted {
        background: $primary 15%;
        color: $foreground;
        text-style: none;
    }

    Completions:ansi > .option-list--option-highlighted {
        background: transparent;
        text-style: reverse;
    }
    #completion-help {
        height: auto;
        padding: 0 2;
        color: $text-muted;
    }
    """
    SCOPED_CSS = False


class Composer(Vertical):
    """Edits one message at a time, and posts it once it is complete.

    Size: completions, attachments and recalled messages share the editor.
    """

    @dataclass
    class Sent(Message):
        """A complete message with everything it includes."""

        question: Question

    class Blocked(Message):
        """A changed message cannot be sent now and stays in the editor."""

    @dataclass
    class CommandEntered(Message):
        """A slash command."""

        line: str

    class Changed(Message):
        """The text or its attachments changed, so the draft must be saved."""

    class EditorRequested(Message):
        """The user asked for the external editor."""

    class Left(Message):
        """The focus moves to the transcript."""

    @dataclass
    class Refused(Message):
        """A file cannot be included."""

        problem: LocalchatError

    def __init__(self, *, id: str) -> None:  # noqa: A002 - textual's word
        super().__init__(id=id)
        self.root = Path()
        with suppress(FileNotFoundError):  # the folder was deleted
            self.root = Path.cwd()
        self.count_tokens: CountTokens | None = None
        self.is_blocked: Callable[[], bool] = lambda: False
        """Returns whether a message that is not a command must stay in the editor."""
        self.take_back: Callable[[], ComposerText | None] = lambda: None
        """Removes and returns the newest queued message."""
        self.documents: Callable[[], Sequence[str]] = tuple
        """Names of documents for `@name` anywhere in a message."""
        self.prompt_commands: Callable[[], Sequence[Command]] = tuple
        """Commands of the prompts of MCP servers."""
        self.reads: Callable[[], Collection[str] | None] = lambda: None
        """Returns the kinds of media that the model reads. None if unknown."""
        self.sent: list[ComposerText] = []
        """Messages sent before, oldest first, for the up key."""
        self._recalled: int | None = None
        """Index in `sent` of the message that the editor shows."""
        self._unsent = ComposerText()
        """Text of the editor before the up key."""
        self._files: tuple[str, ...] | None = None
        self._insertions: list[str] = []
        """Text that each completion inserts."""
        self._counted: dict[str, int | None] = {}
        self._refused: dict[str, LocalchatError | None] = {}
        """Names that are sent as text, each with the error of its file."""
        self._accepted: set[str] = set()
        """Refused names for which the user pressed Enter again."""
        self._uncompleted: str | None = None
        """Text that gets no completions."""
        self._completed = ""
        """Text that the completions belong to."""
        self.completions = Completions(id="completions", markup=False)
        self.completions.can_focus = False
        self._help = Static("", id="completion-help", markup=False)
        self.completions.display = self._help.display = False

    def compose(self) -> ComposeResult:
        yield Static("", id="attached", markup=False)
        yield Editor(self._on_action, id="editor")

    def on_mount(self) -> None:
        self.editor.placeholder = Content("Ask anything   / commands   @ files")

    @property
    def editor(self) -> Editor:
        return self.query_one(Editor)

    @property
    def text(self) -> str:
        """Text with signs for attachments."""
        return self.editor.text

    @property
    def attachments(self) -> tuple[ComposerAttachment, ...]:
        return present(self.editor.text, self.editor.attachments)

    @property
    def written(self) -> ComposerText:
        """Text and attachments."""
        return ComposerText(self.text, self.attachments)

    @property
    def drafts(self) -> tuple[ComposerText, ...]:
        """Texts that are not sent yet.

        Includes the text before the up key, but not a recalled message that is unchanged.
        """
        if self._recalled is None:
            return (self.written,)
        is_unchanged = self.written in self.sent[self._recalled : self._recalled + 1]
        if is_unchanged:
            return (self._unsent,)
        return (self._unsent, self.written)

    def write(self, text: str, attachments: Sequence[ComposerAttachment] = ()) -> None:
        """Put a text into the editor, and focus it."""
        self._uncompleted = text
        self.editor.write(text, attachments)
        self.editor.focus()

    def clear_draft(self) -> bool:
        """Clear the message, which the up key and undo restore. Return False if it was empty."""
        written = self.written
        if not written.text.strip():
            return False
        if self._recalled is not None and self._unsent.text.strip():
            self.sent.append(self._unsent)
        self._recalled = None
        self.sent.append(written)
        self.editor.clear()
        return True

    def replace_text(self, text: str, media: Sequence[ComposerAttachment]) -> None:
        """Replace the message by text from the external editor, with signs of `media`.

        Long text without media becomes an attachment.
        """
        if media:
            self.editor.write(clean(text), media)
        else:
            self.editor.write("")
            self.editor.insert_paste(text)
        self.editor.focus()

    def ask(self, question: str) -> None:
        """Send a question without changing the draft."""
        self.sent.append(ComposerText(question))
        self.post_message(self.Sent(Question(question)))

    def _send(self) -> None:
        written = self.written
        if not written.text.strip():
            return
        if not is_command(written.text) and self.is_blocked():
            self.post_message(self.Blocked())
            return
        draft = ComposerText()
        if self._recalled is not None:
            draft = self._unsent
        self._recalled = None
        self.sent.append(written)
        # A refused file may exist by the next message.
        self._refused.clear()
        self._accepted.clear()
        self._uncompleted = draft.text
        self.editor.write(*draft)
        question = expand(*written)
        if is_command(written.text):
            self.post_message(self.CommandEntered(question.text))
        elif question.inclusions:
            self.post_message(self.Sent(question))
        else:
            self.post_message(self.Sent(question.stripped()))

    def _on_action(self, action: str) -> None:
        """Handle a key of the editor (`Editor.ActionRequested`)."""
        if self.editor.text != self._completed:
            # Keys arrive faster than the messages about changed text.
            self._update_completions()
        match action:
            case "send":
                is_completed = self._completing and self._accept(sending=True)
                if not is_completed and not self._must_wait():
                    self._send()
            case "accept":
                if not (self._completing and self._accept(sending=False)):
                    self.post_message(self.Left())
            case "up" | "down" if self._completing:
                if action == "up":
                    self.completions.action_cursor_up()
                else:
                    self.completions.action_cursor_down()
                self._show_help()
            case "up":
                self._recall(-1)
            case "down":
                self._recall(1)
            case "editor":
                self.post_message(self.EditorRequested())

    def close_completions(self) -> bool:
        """Close the list of completions. Return False if it was not open."""
        was_open = self._completing
        self._uncompleted = self.editor.text
        self._offer([])
        return was_open

    def _recall(self, step: int) -> None:
        """Show the previous (-1) or next (1) sent message, or take back a queued one."""
        if step < 0 and not self.editor.text and (queued := self.take_back()) is not None:
            if self.sent and self.sent[-1].text == queued.text:
                self.sent.pop()
            self._recalled = None
            self.editor.write(*queued)
            return
        count = len(self.sent)
        # Another conversation may have fewer messages than the index of the recalled one.
        index = count
        if self._recalled is not None:
            index = min(self._recalled, count)
        written = self.written
        if index == count:
            self._unsent = written
        if not 0 <= index + step <= count:
            return
        if index < count and written.text.strip() and written != self.sent[index]:
            # Keep a sent message that was changed, after the original.
            self.sent.insert(index + 1, written)
            index += step > 0
        index += step
        if index == len(self.sent):
            self._recalled = None
            message = self._unsent
        else:
            self._recalled = index
            message = self.sent[index]
        self._uncompleted = message.text
        self.editor.write(*message)
        if step < 0:
            self.editor.move_cursor((0, len(self.editor.document.get_line(0))))

    def on_text_area_changed(self, event: TextArea.Changed) -> None:
        event.stop()
        self.post_message(self.Changed())
        self._show_attached()
        self._update_completions()

    def _update_completions(self) -> None:
        """Offer completions for the current text."""
        self._completed = self.editor.text
        if self._completed == self._uncompleted:
            self._offer([])
            return
        self._uncompleted = None
        self._complete()

    def on_text_area_selection_changed(self, event: TextArea.SelectionChanged) -> None:
        event.stop()

    @property
    def _completing(self) -> bool:
        return self.editor.completing

    def _complete(self) -> None:
        row, column = self.editor.cursor_location
        line = self.editor.document.get_line(row)[:column]
        if row == 0 and line.startswith("/") and " " not in line:
            self._offer_commands(line[1:])
            return
        mention = line.rpartition(" ")[2]
        if mention.startswith("@") and not mention.startswith("@@"):
            prefix = mention[1:]
            self._offer_files(prefix, self._documents_for(prefix))
            return
        self._offer([])
        if line.endswith(" "):
            self._include_named()
        if row == 0 and line.startswith("/"):
            self._show_command_help(line[1:].partition(" ")[0])

    def _offer_commands(self, prefix: str) -> None:
        rows = []
        prompts = [row for row in self.prompt_commands() if row.name.startswith(prefix)]
        for command in (*matching(prefix), *prompts):
            name = f"/{command.name}"
            if self.app.size.width < _NARROW:
                # The help shows the arguments once the command is complete.
                line = f"{name:<9}{command.about}"
            else:
                line = f"{name + ' ' + command.arguments:<20} {command.about}"
            rows.append((name, line))
        self._offer(rows)

    def _documents_for(self, prefix: str) -> list[tuple[str, str]]:
        """Return completions for a name of documents."""
        return [
            (f"@{name} ", f"@{name}".ljust(21) + "documents that were learned")
            for name in self.documents()
            if name.startswith(prefix)
        ]

    @work(exclusive=True, group="files")
    async def _offer_files(self, prefix: str, names: Sequence[tuple[str, str]]) -> None:
        """Offer files that match the prefix, after the completions `names`."""
        if is_path(prefix):
            paths = await asyncio.to_thread(list_folder, prefix)
            ranked = [path for path in paths if path.startswith(prefix)]
        else:
            if self._files is None:
                self._files = await asyncio.to_thread(find_files, self.root)
            ranked = await asyncio.to_thread(rank_names, prefix, self._files)
        # The user may have typed on meanwhile.
        if self._word_before_cursor() == f"@{prefix}":
            files = [(f"@{name}", sanitize_line(name)) for name in ranked[:_MAX_COMPLETIONS]]
            self._offer([*names, *files])

    def _word_before_cursor(self) -> str:
        row, column = self.editor.cursor_location
        return self.editor.document.get_line(row)[:column].rpartition(" ")[2]

    def _offer(self, rows: Sequence[tuple[str, str]]) -> None:
        """Show completions as pairs of inserted text and line. An empty list closes them."""
        self._insertions = [text for text, _ in rows]
        self.editor.completing = bool(rows)
        # Mounted late: the first frame must not wait for them.
        if rows and not self.completions.is_attached:
            self.mount(self.completions, self._help, before=0)
        if rows or self.completions.display:
            self.completions.clear_options()
            self.completions.add_options([Option(Content(line)) for _, line in rows])
            room = self.app.size.height - self.editor.size.height - _OTHER_ROWS
            self.completions.styles.height = min(_MAX_VISIBLE, len(rows), max(1, room))
            self.completions.display = bool(rows)
            if rows:
                self.completions.highlighted = 0
        self._show_help()

    def _show_help(self) -> None:
        index = self.completions.highlighted
        if not self._completing or index is None:
            self._show_command_help("")
            return
        text = self._insertions[index]
        if text.startswith("/"):
            # In a wide window the list already shows the arguments.
            name = ""
            if self.app.size.width < _NARROW:
                name = text[1:]
            self._show_command_help(name)
        elif text.endswith(" "):
            # Documents.
            self._set_help("")
        else:
            self._set_help("Enter includes the file; its size and tokens show before you send.")

    def _show_command_help(self, name: str) -> None:
        for command in (*COMMANDS, *self.prompt_commands()):
            if command.name == name:
                self._set_help(f"/{command.name} {command.arguments}  {command.about}")
                return
        self._set_help("")

    def _set_help(self, text: str) -> None:
        self._help.display = bool(text)
        self._help.update(Content(text))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self._accept(sending=False)

    def _accept(self, *, sending: bool) -> bool:
        """Insert the highlighted completion. Return False if Enter should send the complete command."""
        text = self._insertions[self.completions.highlighted or 0]
        if text.startswith("/"):
            return self._accept_command(text, sending=sending)
        row, column = self.editor.cursor_location
        start = (row, column - len(self._word_before_cursor()))
        if text.endswith(("/", " ")):  # a folder or documents
            self.editor.replace(text, start, (row, column))
            self.editor.move_cursor((row, start[1] + len(text)))
        else:
            self.editor.delete(start, (row, column))
            self._include([text[1:]])
        return True

    def _accept_command(self, command: str, *, sending: bool) -> bool:
        """Complete a command, and keep the text after it."""
        line = self.editor.document.get_line(0)
        name = line.partition(" ")[0]
        names = [f"/{row.name}" for row in self.prompt_commands()]
        if sending and (is_known(name) or name in names):
            self._offer([])
            return False
        end = self.editor.cursor_location[1]
        missing = command[end:]
        if line[end:].startswith(missing):
            end += len(missing)
        space = " "
        if line[end:].startswith(" "):
            space = ""
        self.editor.replace(f"{command}{space}", (0, 0), (0, end))
        self.editor.move_cursor((0, len(command) + 1))
        return True

    def on_editor_media_dropped(self, event: Editor.MediaDropped) -> None:
        event.stop()
        self._include([str(path) for path in event.paths])

    def on_editor_picture_requested(self, event: Editor.PictureRequested) -> None:
        event.stop()
        self._paste_picture(event.text)

    @work(group="include")
    async def _paste_picture(self, text: str) -> None:
        """Insert the picture of the clipboard, or else `text`."""
        from localchat.tui.clipboard import clipboard_picture

        signs = [attachment.sign for attachment in self.editor.attachments]
        try:
            media = await asyncio.to_thread(clipboard_picture)
            if media is None:
                self.editor.insert_paste(text)
            else:
                self.editor.insert_attachment(
                    await asyncio.to_thread(attachment_of_media, media, signs)
                )
        except LocalchatError as problem:
            self.post_message(self.Refused(problem))

    @work(group="include")
    async def _include(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                self.editor.insert_attachment(await self._attachment_of(name))
            except LocalchatError as problem:
                self.post_message(self.Refused(problem))

    def _must_wait(self) -> bool:
        """Include the files that the message names. Return whether the message must not be sent yet."""
        return (
            self._include_named(sending=True)
            or self._warn_missing_paths()
            or self._warn_refused_files()
        )

    def _include_named(self, *, sending: bool = False) -> bool:
        """Include files whose names were typed in full. Return False if nothing is included.

        With `sending`, the user pressed Enter and sees the errors.
        """
        skipped = {*self._refused, *self.documents()}
        mentioned = mentioned_files(self.editor.text, self.root)
        names = [name for name in mentioned if name not in skipped]
        if names:
            self._include_all(names, sending=sending)
        return bool(names)

    def _warn_refused_files(self) -> bool:
        """Refuse to send once if a file that the message names could not be included."""
        names = [
            name
            for name in mentioned_files(self.editor.text, self.root)
            if self._refused.get(name) is not None and name not in self._accepted
        ]
        for name in names:
            self._report_refused(name)
        return bool(names)

    def _report_refused(self, name: str) -> None:
        """Show why a file is not included. The next Enter sends the message without it."""
        problem = self._refused[name]
        assert problem is not None
        self._accepted.add(name)
        hint = "nothing was sent; Enter again sends the message without this file"
        self.post_message(self.Refused(UsageError(problem.message, hint=hint)))

    def _warn_missing_paths(self) -> bool:
        """Refuse to send once if a path after @ is not a file.

        The user would assume that the file was sent. Also refuses a name that both a file and documents have.
        """
        text = self.editor.text
        missing: list[str] = []
        if not is_command(text):
            paths = missing_paths(text, self.root)
            missing = [name for name in paths if name not in self._refused]
        for name in missing:
            hint = f"Enter again sends @{name} as text"
            self.post_message(self.Refused(FileMissing(f"there is no file {name}", hint=hint)))
        documents = set(self.documents()) - self._refused.keys()
        ambiguous = [name for name in mentioned_files(text, self.root) if name in documents]
        for name in ambiguous:
            problem = f"@{name} is the name of documents and of a file here"
            hint = f"@./{name} includes the file; Enter again asks the documents"
            self.post_message(self.Refused(UsageError(problem, hint=hint)))
        self._refused.update(dict.fromkeys((*missing, *ambiguous)))
        return bool(missing or ambiguous)

    @work(exclusive=True, group="include-named")
    async def _include_all(self, names: Sequence[str], *, sending: bool) -> None:
        for name in names:
            try:
                attachment = await self._attachment_of(unquoted(name))
            except LocalchatError as problem:
                self._refused[name] = problem
                if sending:
                    self._report_refused(name)
                else:
                    self.post_message(self.Refused(problem))
            else:
                self.editor.replace_with_attachment(f"@{name}", attachment)

    async def _attachment_of(self, name: str) -> ComposerAttachment:
        """Read a file. Raises LocalchatError."""
        signs = [attachment.sign for attachment in self.editor.attachments]
        return await asyncio.to_thread(attachment_of_file, path_of(name, self.root), name, signs)

    def _show_attached(self) -> None:
        attachments = self.attachments
        # The query is empty once the screen is closed.
        for line in self.query("#attached").results(Static):
            line.display = bool(attachments)
            if attachments:
                line.update(Content("   ".join(map(self._described, attachments))))
        if any(item.text not in self._counted and item.media is None for item in attachments):
            self._count(attachments)

    def _described(self, attachment: ComposerAttachment) -> str:
        """Return an attachment as the line below the completions shows it."""
        note = attachment.note
        reads = self.reads()
        if (
            attachment.media is not None
            and reads is not None
            and attachment.media.kind not in reads
        ):
            note = "this model cannot read it"
        details = (attachment.label, attachment.size, self._tokens_of(attachment), note)
        return " · ".join(filter(None, details))

    def _tokens_of(self, attachment: ComposerAttachment) -> str:
        if attachment.media is not None:
            return ""
        if attachment.text not in self._counted:
            return "counting …"
        count = self._counted[attachment.text]
        if count is None:
            return "tokens unknown"
        return f"{count:,} tokens"

    @work(exclusive=True, group="count")
    async def _count(self, attachments: Sequence[ComposerAttachment]) -> None:
        if self.count_tokens is None:
            return
        for attachment in attachments:
            if attachment.text not in self._counted and attachment.media is None:
                try:
                    self._counted[attachment.text] = await self.count_tokens(attachment.text)
                except LocalchatError:
                    # A server cannot count tokens, or the engine has exited.
                    self._counted[attachment.text] = None
        self._show_attached()

    def recount(self) -> None:
        """Count the tokens again, for another model."""
        self._counted.clear()
        self._show_attached()
