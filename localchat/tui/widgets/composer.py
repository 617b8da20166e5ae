"""The composer: editor, completions and attachments of the next message."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
from localchat.config.presets import Preset
from localchat.documents.folder import find_files
from localchat.errors import FileMissing, LocalchatError, UsageError
from localchat.sanitize import sanitize_line
from localchat.session.commands import COMMANDS, is_command, is_known, matching
from localchat.tui.attachments import Attachment, ComposerText, attachment_of_file, expand, present
from localchat.tui.file_completion import (
    is_path,
    list_folder,
    mentioned_files,
    missing_paths,
    path_of,
    rank_names,
)
from localchat.tui.widgets.editor import Editor

CountTokens = Callable[[str], Awaitable[int]]
"""Counts the tokens of a text for the current model. Raises LocalchatError if the server cannot count."""
_MAX_VISIBLE = 8
_MAX_COMPLETIONS = 50
_OTHER_ROWS = 7
"""Rows of a window that completions leave to the conversation, the help, the frame and the status."""
_NARROW = 60
"""Below, the list of commands has no column of arguments."""


class Completions(OptionList):
    """Completions of the word before the cursor, with styles of their own: the first frame needs none."""

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
    """Edits one message at a time, and posts it once it is complete."""

    @dataclass
    class Sent(Message):
        """A complete message with everything it includes."""

        text: str
        inclusions: tuple[Inclusion, ...]

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
        self.root = Path.cwd()
        self.count_tokens: CountTokens | None = None
        self.is_blocked: Callable[[], bool] = lambda: False
        """Whether a message that is not a command must stay in the editor."""
        self.take_back: Callable[[], ComposerText | None] = lambda: None
        """Takes back the newest message that waits to be sent."""
        self.presets: Mapping[str, Preset] = {}
        """Presets that `@name` at the beginning of a message means."""
        self.documents: Callable[[], Sequence[str]] = tuple
        """Names of documents that `@name` anywhere in a message means."""
        self.sent: list[ComposerText] = []
        """Messages sent before, oldest first, for the up key."""
        self._recalled: int | None = None  # index of the message in `sent` that the editor shows
        self._unsent = ComposerText()  # what the editor held before the up key
        self._files: tuple[str, ...] | None = None
        self._words: list[str] = []  # what each completion inserts
        self._counted: dict[str, int | None] = {}
        self._refused: dict[str, LocalchatError | None] = {}
        """Names that are sent as text, with the error if the file could not be included."""
        self._accepted: set[str] = set()
        """Refused names for which the user pressed Enter again."""
        self._uncompleted: str | None = None  # a text that gets no completions
        self._completed = ""  # the text that the completions belong to
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

    # ------------------------------------------------------------------ the message

    @property
    def text(self) -> str:
        """The text with signs for attachments."""
        return self.editor.text

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        return present(self.editor.text, self.editor.attachments)

    @property
    def written(self) -> ComposerText:
        """Text and attachments."""
        return ComposerText(self.text, self.attachments)

    @property
    def drafts(self) -> tuple[ComposerText, ...]:
        """What is not sent yet: the text, but for a sent message that the up key shows as it was, and the text
        that was there before that key."""
        if self._recalled is None:
            return (self.written,)
        as_sent = self.written in self.sent[self._recalled : self._recalled + 1]
        if as_sent:
            return (self._unsent,)
        return (self._unsent, self.written)

    def write(self, text: str, attachments: Sequence[Attachment] = ()) -> None:
        """Put a text into the editor and focus it."""
        self._uncompleted = text
        self.editor.write(text, attachments)
        self.editor.focus()

    def clear_draft(self) -> bool:
        """Clear the message; the up key and undo bring it back. False if it was empty."""
        written = self.written
        if not written.text.strip():
            return False
        if self._recalled is not None and self._unsent.text.strip():
            self.sent.append(self._unsent)
        self._recalled = None
        self.sent.append(written)
        self.editor.clear()
        return True

    def replace_text(self, text: str) -> None:
        """Replace the message with text from the external editor. Long text becomes one attachment."""
        self.editor.write("")
        self.editor.insert_paste(text)
        self.editor.focus()

    def ask(self, question: str) -> None:
        """Send a question besides what is being written."""
        self.sent.append(ComposerText(question))
        self.post_message(self.Sent(question, ()))

    def _send(self) -> None:
        written = self.written
        if not written.text.strip():
            return
        if not is_command(written.text) and self.is_blocked():
            self.post_message(self.Blocked())
            return
        unsent = ComposerText() if self._recalled is None else self._unsent
        self._recalled = None
        self.sent.append(written)
        self._refused.clear()  # the file may exist by the next message
        self._accepted.clear()
        self._uncompleted = unsent.text
        self.editor.write(*unsent)
        text, inclusions = expand(*written)
        if is_command(written.text):
            self.post_message(self.CommandEntered(text))
        else:
            self.post_message(self.Sent(text if inclusions else text.strip(), inclusions))

    # ------------------------------------------------------------------ keys

    def _on_action(self, action: str) -> None:
        """Handle a key of the editor (`Editor.ActionRequested`)."""
        if self.editor.text != self._completed:
            self._update_completions()  # keys arrive faster than messages about them
        match action:
            case "send":
                taken = self._completing and self._accept(sending=True)
                if not taken and not self._holds_message():
                    self._send()
            case "accept":
                if not (self._completing and self._accept(sending=False)):
                    self.post_message(self.Left())
            case "up" | "down" if self._completing:
                step = self.completions.action_cursor_up
                (step if action == "up" else self.completions.action_cursor_down)()
                self._show_help()
            case "up":
                self._recall(-1)
            case "down":
                self._recall(1)
            case "editor":
                self.post_message(self.EditorRequested())

    def close_completions(self) -> bool:
        """Close the list of completions; False if it was not open."""
        was = self._completing
        self._uncompleted = self.editor.text
        self._offer([])
        return was

    def _recall(self, step: int) -> None:
        if step < 0 and not self.editor.text and (taken := self.take_back()) is not None:
            if self.sent and self.sent[-1].text == taken.text:
                self.sent.pop()
            self._recalled = None
            self.editor.write(*taken)
            return
        at = len(self.sent)  # another conversation may have fewer than the one recalled from
        at = at if self._recalled is None else min(self._recalled, at)
        written = self.written
        if at == len(self.sent):
            self._unsent = written
        if not 0 <= at + step <= len(self.sent):
            return
        if at < len(self.sent) and written.text.strip() and written != self.sent[at]:
            self.sent.insert(at + 1, written)  # a sent message that was changed stands behind it
            at += step > 0
        at += step
        self._recalled = None if at == len(self.sent) else at
        text, attachments = self._unsent if self._recalled is None else self.sent[at]
        self._uncompleted = text
        self.editor.write(text, attachments)
        if step < 0:
            self.editor.move_cursor((0, len(self.editor.document.get_line(0))))

    # ------------------------------------------------------------------ completion

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
        before = self.editor.document.get_line(row)[:column]
        if row == 0 and before.startswith("/") and " " not in before:
            self._offer_commands(before[1:])
            return
        word = before.rpartition(" ")[2]
        if word.startswith("@") and not word.startswith("@@"):
            presets = self._presets_for(word[1:]) if word == before else []
            self._offer_files(word[1:], [*presets, *self._documents_for(word[1:])])
            return
        self._offer([])
        if before.endswith(" "):
            self._include_named()
        if row == 0 and before.startswith("/"):
            self._show_command_help(before[1:].partition(" ")[0])

    def _offer_commands(self, prefix: str) -> None:
        narrow = self.app.size.width < _NARROW  # arguments are shown once the command is written
        rows = [
            (
                f"/{each.name}",
                f"/{each.name} {'' if narrow else each.arguments}".ljust(9 if narrow else 21)
                + each.about,
            )
            for each in matching(prefix)
        ]
        self._offer(rows)

    def _presets_for(self, prefix: str) -> list[tuple[str, str]]:
        """Completions for the first word of a message."""
        return [
            (f"@{name} ", f"@{name}".ljust(21) + sanitize_line(self.presets[name].about))
            for name in sorted(self.presets)
            if name.startswith(prefix)
        ]

    def _documents_for(self, prefix: str) -> list[tuple[str, str]]:
        """Completions for the beginning of a name of documents."""
        return [
            (f"@{name} ", f"@{name}".ljust(21) + "documents that were learned")
            for name in self.documents()
            if name.startswith(prefix)
        ]

    @work(exclusive=True, group="files")
    async def _offer_files(self, word: str, before: Sequence[tuple[str, str]]) -> None:
        """Offer files whose name is like `word`, after the completions `before`."""
        if is_path(word):
            names = await asyncio.to_thread(list_folder, word)
            ranked = [name for name in names if name.startswith(word)]
        else:
            if self._files is None:
                self._files = await asyncio.to_thread(find_files, self.root)
            ranked = await asyncio.to_thread(rank_names, word, self._files)
        if self._word_now() == f"@{word}":
            files = [(f"@{name}", sanitize_line(name)) for name in ranked[:_MAX_COMPLETIONS]]
            self._offer([*before, *files])

    def _word_now(self) -> str:
        row, column = self.editor.cursor_location
        return self.editor.document.get_line(row)[:column].rpartition(" ")[2]

    def _offer(self, rows: Sequence[tuple[str, str]]) -> None:
        """Show completions as (word, line); an empty list closes it."""
        self._words = [word for word, _ in rows]
        self.editor.completing = bool(rows)
        if rows and not self.completions.is_attached:  # not earlier: the first frame would wait
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
        at = self.completions.highlighted
        if not self._completing or at is None:
            self._show_command_help("")
        elif self._words[at].startswith("/"):
            cut = self.app.size.width < _NARROW  # else the list shows it
            self._show_command_help(self._words[at][1:] if cut else "")
        elif self._words[at].endswith(" "):  # a preset or documents, by name
            self._set_help("")
        else:
            self._set_help("Enter includes the file; its size and tokens show before you send.")

    def _show_command_help(self, name: str) -> None:
        known = next((each for each in COMMANDS if each.name == name), None)
        self._set_help(f"/{known.name} {known.arguments}  {known.about}" if known else "")

    def _set_help(self, text: str) -> None:
        self._help.display = bool(text)
        self._help.update(Content(text))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self._accept(sending=False)

    def _accept(self, *, sending: bool) -> bool:
        """Insert the highlighted completion. False if the command is complete, so that Enter sends it."""
        at = self.completions.highlighted or 0
        word = self._words[at]
        if word.startswith("/"):
            return self._accept_command(word, sending=sending)
        row, column = self.editor.cursor_location
        start = (row, column - len(self._word_now()))
        if word.endswith(("/", " ")):  # a folder, a preset or documents
            self.editor.replace(word, start, (row, column))
            self.editor.move_cursor((row, start[1] + len(word)))
        else:
            self.editor.delete(start, (row, column))
            self._include(word[1:])
        return True

    def _accept_command(self, word: str, *, sending: bool) -> bool:
        """Complete a command and keep the text after it."""
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

    # ------------------------------------------------------------------ attachments

    @work(group="include")
    async def _include(self, name: str) -> None:
        try:
            self.editor.insert_attachment(await self._attachment_of(name))
        except LocalchatError as problem:
            self.post_message(self.Refused(problem))

    def _holds_message(self) -> bool:
        """Include the files that the message names, and hold it back while one of them is missing."""
        return (
            self._include_named(sending=True)
            or self._warn_missing_paths()
            or self._warn_refused_files()
        )

    def _include_named(self, *, sending: bool = False) -> bool:
        """Include files whose names were typed in full. False if there are none besides refused ones.

        `sending`: Enter was pressed, so an error counts as seen."""
        taken = {*self._refused, *self.documents()}
        names = [name for name in mentioned_files(self.editor.text, self.root) if name not in taken]
        if names:
            self._include_all(names, sending=sending)
        return bool(names)

    def _warn_refused_files(self) -> bool:
        """Hold a message back once if a file that it names could not be included."""
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
        """Hold a message back once if a path after @ is not a file: it would look as if the file was sent.

        Also if a word after @ is the name of both a file and documents."""
        text = self.editor.text
        names = [] if is_command(text) else missing_paths(text, self.root)
        names = [name for name in names if name not in self._refused]
        for name in names:
            hint = f"Enter again sends @{name} as text"
            self.post_message(self.Refused(FileMissing(f"there is no file {name}", hint=hint)))
        documents = set(self.documents()) - self._refused.keys()
        both = [name for name in mentioned_files(text, self.root) if name in documents]
        for name in both:
            problem = f"@{name} is the name of documents and of a file here"
            hint = f"@./{name} includes the file; Enter again asks the documents"
            self.post_message(self.Refused(UsageError(problem, hint=hint)))
        self._refused.update(dict.fromkeys((*names, *both)))
        return bool(names or both)

    @work(exclusive=True, group="include-named")
    async def _include_all(self, names: Sequence[str], *, sending: bool) -> None:
        for name in names:
            try:
                attachment = await self._attachment_of(name)
            except LocalchatError as problem:
                self._refused[name] = problem
                if sending:
                    self._report_refused(name)
                else:
                    self.post_message(self.Refused(problem))
            else:
                self.editor.replace_with_attachment(f"@{name}", attachment)

    async def _attachment_of(self, name: str) -> Attachment:
        """Read a file. Raises LocalchatError."""
        signs = [attachment.sign for attachment in self.editor.attachments]
        return await asyncio.to_thread(attachment_of_file, path_of(name, self.root), name, signs)

    def _show_attached(self) -> None:
        attachments = self.attachments
        for line in self.query("#attached").results(Static):  # none once the screen is closed
            line.display = bool(attachments)
            if attachments:
                line.update(Content("   ".join(map(self._described, attachments))))
        if any(each.text not in self._counted for each in attachments):
            self._count(attachments)

    def _described(self, attachment: Attachment) -> str:
        """One attachment in the line below the completions."""
        words = (
            attachment.label,
            attachment.size,
            self._tokens_of(attachment),
            attachment.note,
        )
        return " · ".join(filter(None, words))

    def _tokens_of(self, attachment: Attachment) -> str:
        if attachment.text not in self._counted:
            return "counting …"
        count = self._counted[attachment.text]
        if count is None:
            return "tokens unknown"
        return f"{count:,} tokens"

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
        """Count the tokens anew, for another model."""
        self._counted.clear()
        self._show_attached()
