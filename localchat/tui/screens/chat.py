"""The chat screen: conversation, composer, status bar and metrics panel.

Widgets post messages and keys run actions. Only this screen calls the session and the command runner.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.css.query import NoMatches
from textual.screen import Screen

from localchat.chat.conversation import Conversation, Question
from localchat.errors import EngineClosed, HistoryUnusable, LocalchatError
from localchat.session.blocks import END_PREFIX, OVERFLOW_PREFIX, RETRY, NoticeBlock, Offer
from localchat.session.outcome import STOPPED, AnswerUnderWay
from localchat.session.session import ChatSession
from localchat.session.view import SessionView
from localchat.tui import clipboard
from localchat.tui.attachments import ComposerText, contract, expand, joined, question_of
from localchat.tui.column import place_column
from localchat.tui.edited_message import EditedMessage
from localchat.tui.focused_message import FocusedMessage
from localchat.tui.footer_keys import FooterState, footer_keys
from localchat.tui.guide_answers import ASK_PREFIX
from localchat.tui.keymap import bindings, offer_key
from localchat.tui.message_queue import MessageQueue
from localchat.tui.progress import PROGRESS_ID, progress_block
from localchat.tui.textual_internals.compositor import redraw_changes_only
from localchat.tui.textual_internals.driver import alert, terminal_writer
from localchat.tui.transcript_view import TranscriptView
from localchat.tui.widgets.banner import Banner
from localchat.tui.widgets.composer import Composer
from localchat.tui.widgets.editor import Editor
from localchat.tui.widgets.key_footer import KeyFooter
from localchat.tui.widgets.status_bar import StatusBar
from localchat.tui.widgets.talk import Talk
from localchat.tui.widgets.title_bar import TitleBar
from localchat.tui.widgets.welcome import FETCH_PREFIX, Welcome, greeting

if TYPE_CHECKING:
    from localchat.chat.conversation import Node
    from localchat.session.command_runner import CommandRunner, OpenPart, Reply
    from localchat.tui.background_pull import BackgroundPull
    from localchat.tui.screens.models import ModelChoice
    from localchat.tui.transcript.widget import Transcript
    from localchat.tui.widgets.metrics_panel import MetricsPanel

_STATS_EVERY_S = 0.5
_OTHER_WINDOWS_EVERY_S = 2.0
_MIN_ALERT_S = 8.0
"""Shorter work ends without an alert."""
_INPUT_ERROR = "input-error"
"""Name of the notice about an input that was refused."""
_EDITING = "Changing a sent message: Enter sends it as a new branch, Esc leaves it as it was."
_EDITING_BUSY = "Changing a sent message: Enter sends it after the answer, Esc stops the answer."

Result = TypeVar("Result")


class ChatScreen(Screen[None]):
    """Shows a session, and turns keys and messages of widgets into calls of it.

    Size: Textual finds the handlers of keys and messages by their names on the screen.
    """

    BINDINGS: ClassVar[list[BindingType]] = [*bindings("chat")]
    # The panel is beside the conversation if the window is wide, below it if the window is high, and covers
    # it otherwise: lines stay readable.
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (76, "-middle"), (110, "-wide")]  # noqa: RUF012 - textual's own form
    AUTO_FOCUS = "#editor"

    def __init__(self, open_session: Callable[[SessionView], ChatSession]) -> None:
        super().__init__()
        redraw_changes_only(self)
        self.session = open_session(TranscriptView(self, self._offer_key))
        self._edited = EditedMessage()
        self._fetching_stats = False
        self._was_shown = False
        self.is_leaving = False
        """Whether the program ends. Nothing new is sent then."""
        self._queue = MessageQueue()
        self._set_aside: dict[str, ComposerText] = {}
        """Messages that waited when their conversation was left, by its id."""

    def compose(self) -> ComposeResult:
        yield TitleBar(id="heading")
        with Horizontal(id="body"), Talk(id="talk"):
            keys = self.session.context.keys
            yield Welcome(greeting(self.session.setup), keys, id="welcome")
        yield Banner(id="banner")
        yield Composer(id="composer")
        yield StatusBar(self.session.status, id="status")
        yield KeyFooter(id="footer")

    def on_screen_resume(self, event: events.ScreenResume) -> None:
        # Every widget got its styles when it was mounted. Applying them again before the first frame would
        # take a tenth of the time to that frame.
        event.refresh_styles = self._was_shown
        self._was_shown = True

    def on_mount(self) -> None:
        self.set_interval(_STATS_EVERY_S, self._watch_stats)
        self.set_interval(_OTHER_WINDOWS_EVERY_S, self._watch_other_windows)
        self.composer.is_blocked = lambda: self.session.busy and self._edited.id is not None
        self.composer.take_back = self._take_back
        self.composer.reads = self._read_media
        self.status_changed()

    @cached_property
    def talk(self) -> Talk:
        return self.query_one(Talk)

    @property
    def transcript(self) -> "Transcript":
        return self.talk.transcript

    @cached_property
    def panel(self) -> "MetricsPanel":
        """The metrics panel, built when it is first shown."""
        from localchat.tui.widgets.metrics_panel import MetricsPanel

        panel = MetricsPanel(self.session.status, id="panel")
        self.query_one("#body").mount(panel)
        return panel

    @property
    def shows_panel(self) -> bool:
        return "panel" in self.__dict__ and self.panel.display

    @cached_property
    def composer(self) -> Composer:
        return self.query_one(Composer)

    @cached_property
    def status(self) -> StatusBar:
        return self.query_one(StatusBar)

    @cached_property
    def focused_message(self) -> FocusedMessage:
        return FocusedMessage(self.session, self.transcript)

    @cached_property
    def _runner(self) -> "CommandRunner":
        # Imported late: the first frame needs no commands.
        from localchat.session.command_runner import CommandRunner

        return CommandRunner(self.session, "screen")

    @cached_property
    def pulls(self) -> "BackgroundPull":
        from localchat.tui.background_pull import BackgroundPull

        return BackgroundPull(self.session, self._call_from_any_thread)

    def status_changed(self) -> None:
        """Update status bar, panel and heading if the screen is mounted."""
        try:
            self.get_child_by_id("status")  # `query` would look at every widget
        except NoMatches:
            return
        self._show_keys()
        self._show_progress()
        if self._edited.id:
            self._update_banner()
        self.status.refresh_metrics()
        if self.shows_panel:
            self.panel.refresh_metrics()
        self.query_one(TitleBar).show(self.session)

    def _show_keys(self) -> None:
        """Show the useful keys in the footer, or one in a low window's status bar."""
        session = self.session
        offers: tuple[Offer, ...] = ()
        if self.talk.has_transcript:
            offers = self.transcript.open_offers
        state = FooterState(
            focus=getattr(self.focused, "id", None) or "",
            is_busy=session.busy,
            is_covered=self.is_covered,
            has_queue=bool(self._queue),
            can_continue=session.can_continue,
            offers=offers,
        )
        keys = footer_keys(state, session.context.keys)
        self.query_one(KeyFooter).show(keys)
        self.status.urgent = state.is_urgent and self.has_class("-low")
        self.status.hint = ""
        if self.has_class("-low"):
            key = keys[-1]
            if state.is_urgent or state.is_covered:
                key = keys[0]
            self.status.hint = f"{key.key} {key.label}"

    def _show_progress(self) -> None:
        """Show what the request waits for at the end of the transcript."""
        block = None
        if self.session.busy:
            block = progress_block(self.session.status, time.monotonic())
        if block is not None:
            self.transcript.put(block)
        elif self.talk.has_transcript and self.transcript.block(PROGRESS_ID) is not None:
            self.transcript.drop(PROGRESS_ID)

    def _offer_key(self, number: int) -> str:
        return offer_key(number, self.session.context.keys)

    @property
    def is_covered(self) -> bool:
        """Whether the panel covers the conversation."""
        has_room = self.has_class("-wide") or (
            self.has_class("-middle") and not self.has_class("-short")
        )
        return self.shows_panel and not has_room

    @property
    def is_welcoming(self) -> bool:
        """Whether the conversation is still empty."""
        # A call that is stopped by the end of the program still reports, and the widget may be gone.
        welcome = next(iter(self.query(Welcome)), None)
        return welcome is not None and welcome.display

    def blocks_changed(self) -> None:
        """Show the welcome or the transcript. Notices alone, such as those of a load, keep the welcome."""
        blocks = self.transcript.blocks
        self.query_one(Welcome).display = all(isinstance(block, NoticeBlock) for block in blocks)
        self.transcript.display = bool(blocks)

    @property
    def reserved_offers(self) -> int:
        """Number of offers that the welcome may show."""
        return self.query_one(Welcome).reserved

    def _watch_stats(self) -> None:
        """Update what changes with time, and the engine's own metrics while the panel shows them."""
        status = self.session.status
        if self.session.busy:
            self.status_changed()
        trouble = self.session.recorder.trouble
        if trouble is not None:
            self.hint(trouble.message)
        if status.info is not None and self.shows_panel and not self._fetching_stats:
            self._fetching_stats = True
            self.run_worker(self._fetch_stats(), group="stats")

    def _watch_other_windows(self) -> None:
        """Report messages of other windows before the next question. An answer looks for them itself."""
        if not self.session.busy:
            report = self.session.report_other_windows()
            self.run_worker(report, group="other-windows", exclusive=True)

    async def _fetch_stats(self) -> None:
        await self.session.fetch_stats()
        self._fetching_stats = False
        if self.shows_panel:
            self.panel.refresh_metrics()

    @property
    def suggested_models(self) -> tuple[Offer, ...]:
        """Models that the welcome offers."""
        return self.query_one(Welcome).greeting.models

    def hint(self, text: str) -> None:
        """Show a text above the composer for some seconds."""
        self.query_one(Banner).hint(text)

    def _update_banner(self) -> None:
        """Show above the composer that a sent message is being changed, or which messages wait."""
        banner = self.query_one(Banner)
        if self._edited.id and self.session.busy:
            banner.keep(_EDITING_BUSY, is_list=False)
        elif self._edited.id:
            banner.keep(_EDITING, is_list=False)
        else:
            banner.keep(self._queue.describe(), is_list=True)

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.height < 16, "-low")
        self.set_class(event.size.height < 20, "-short")
        self.set_class(event.size.height < 22, "-unframed")
        self.talk.indent(place_column(self, event.size.width, has_panel=self.shows_panel))
        self.status_changed()

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        self._show_keys()

    # Work of the session

    def start_work(self, work: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine of the session. Its errors become notices."""
        self.run_worker(self._guarded(work), group="session", exit_on_error=True)

    async def _guarded(self, work: Coroutine[Any, Any, object]) -> None:
        started_s = time.monotonic()
        try:
            await work
        except EngineClosed:
            pass  # The user stopped it; the status bar shows that.
        except LocalchatError as problem:
            self.show_error(problem)
        finally:
            if not self.app.app_focus and time.monotonic() - started_s > _MIN_ALERT_S:
                alert(self.app, "localchat is done")
            self._work_ended()

    def _ask(self, question: Question) -> None:
        """Send a question. Questions that follow before its answer begins wait in the queue."""
        self._queue.is_sending = True
        self.start_work(self.session.ask(question))

    def _work_ended(self) -> None:
        """Send the next queued message, or put all back if the answer is not complete."""
        # During shutdown Textual removes widgets one by one, so a query may fail.
        if self.session.busy or self.is_leaving or not self.app.is_running:
            return
        self._queue.is_sending = False
        self.status_changed()
        if not self._queue:
            return
        answer = self.session.last_answer()
        is_last = answer is not None and answer.id == self.session.conversation.head
        if answer is not None and is_last and answer.state in ("whole", "length"):
            self.transcript.to_end()
            self._ask(self._queue.next())
        else:
            self._put_back(self._queue.take_all())
        self._save_draft()
        self._update_banner()

    def _put_back(self, unsent: ComposerText) -> None:
        """Put unsent messages into the input, before its text."""
        self.composer.write(*joined((unsent, self.composer.written)))

    def _set_queue_aside(self) -> None:
        """Keep the messages that wait with their conversation, which is about to be left."""
        self.leave_editing()
        if self._queue:
            self._set_aside[self.session.conversation.id] = self._queue.take_all()
            self._update_banner()

    def _restore_unsent(self) -> None:
        """Put back what was not sent in this conversation before. The text of the input stays."""
        conversation = self.session.conversation
        unsent = self._set_aside.pop(conversation.id, None)
        # The draft of a new conversation may be what another window shows.
        if unsent is None and conversation.nodes:
            with suppress(HistoryUnusable):  # `recorder.trouble` reports it
                unsent = ComposerText(self.session.recorder.kept_draft())
        if unsent is not None and unsent.text:
            self._put_back(unsent)
        self._save_draft()

    def _read_media(self) -> Collection[str] | None:
        """Return the kinds of media that the model reads. None if that is unknown, as for a remote one."""
        info = self.session.status.info
        if info is None or info.backend == "remote":
            return None
        return info.media

    def _take_back(self) -> ComposerText | None:
        """Remove the newest message of the queue and return it, for the up key."""
        message = self._queue.take_last()
        self._update_banner()
        self.status_changed()
        return message

    def _call_from_any_thread(self, callback: Callable[..., object], *arguments: object) -> None:
        """Call a function on the event loop, unless the program has ended."""
        with suppress(RuntimeError):  # the screen has no app any more
            self.app.call_later(callback, *arguments)

    # Commands and their replies

    def run_command(self, line: str, *, typed: bool = False) -> None:
        """Run a line that begins with a slash. A typed one that has to wait returns to the input."""
        self._remove_error()
        try:
            self._show_reply(self._runner.run(line))
        except LocalchatError as problem:
            self.show_error(problem)
            if typed and isinstance(problem, AnswerUnderWay) and not self.composer.text:
                self.composer.write(line)

    def show_error(self, problem: LocalchatError) -> None:
        """Show an error in the conversation, or as a hint if waiting resolves it."""
        if isinstance(problem, AnswerUnderWay):
            self.hint(f"{problem.message}; {problem.hint}")
            return
        self._reveal_end()
        self.session.notice(str(problem), "error", name=_INPUT_ERROR)

    def _remove_error(self) -> None:
        """Remove the error of the previous input, which the next one answers."""
        self.session.view.remove(_INPUT_ERROR)

    def _show_reply(self, reply: "Reply") -> None:
        # Imported late: the first frame needs no commands.
        from localchat.session import command_runner as replies

        match reply:
            case replies.Output(text):
                self._reveal_end()
                self.session.notice(text)
            case replies.Hint(text):
                self.hint(text)
            case replies.AskQuestion(""):
                self.start_work(self.session.regenerate())
            case replies.AskQuestion(text):
                self._ask(Question(text))
            case replies.QuestionUndone(question, hint):
                if not self.composer.text:
                    self.composer.write(*contract(question_of(question)))
                self.hint(hint)
            case replies.LeaveConversation():
                self._set_queue_aside()
            case replies.NewConversation():
                self._restore_unsent()
                self.composer.editor.focus()
            case replies.SetupChanged(before, hint):
                after = self.session.setup
                if after.settings.theme != before.settings.theme:
                    self.use_theme(after.settings.theme)
                if after.settings.pictures != before.settings.pictures:
                    self.transcript.draw_pictures(self.talk.make_painter())
                if after.options != before.options:
                    self.composer.recount()
                if hint:
                    self.hint(hint)
            case replies.OpenPart():
                self._open(reply)
            case replies.LongCommand(stream):
                self.start_work(self._show_replies(stream))
            case replies.Quit():
                self.quit()

    async def _show_replies(self, stream: "AsyncIterator[Reply]") -> None:
        try:
            async for reply in stream:
                self._show_reply(reply)
        finally:
            if self.session.conversation.id in self._set_aside:  # it could not be left
                self._restore_unsent()

    def change(self, model_name: str | None, changes: Mapping[str, str]) -> None:
        """Use another model or other parameters for the next answer."""
        self.start_work(self._show_replies(self._runner.change(model_name, changes)))

    def _open(self, reply: "OpenPart") -> None:
        match reply.part:
            case "models":
                self._open_models()
            case "parameters":
                self._open_parameters()
            case "history":
                self.action_history()
            case "help":
                from localchat.tui.screens.help import HelpScreen

                self.app.push_screen(HelpScreen(self.session.context.keys))
            case "metrics":
                self._reveal_end()
                self.session.notice(reply.argument)
                if not self.shows_panel:
                    self.action_panel()
            case "copy":
                self.copy(*clipboard.chosen_text(self.transcript, reply.argument))
            case "pull":
                self._reveal_end()  # where the result will appear
                offline = self.session.setup.settings.offline
                self.pulls.begin(reply.argument, offline=offline)
            case "edit":
                self._edit(self.session.last_question())

    def _open_models(self) -> None:
        from localchat.history.used_models import used_models
        from localchat.tui.screens.models import ModelScreen

        def closed(choice: "ModelChoice | None") -> None:
            if choice is None:
                return
            if choice.pull:
                self._confirm_pull(choice.name, choice.about)
            else:
                self.change(choice.name, {})

        session = self.session
        model = session.setup.model
        read_used = partial(used_models, session.recorder.history)
        screen = ModelScreen(session.context, (model.word, model.name), read_used)
        self.app.push_screen(screen, closed)

    def _open_parameters(self) -> None:
        from localchat.tui.screens.parameters import ParameterScreen

        def closed(changes: dict[str, str | None] | None) -> None:
            if changes:
                self.change(None, {key: text or "" for key, text in changes.items()})

        self.app.push_screen(ParameterScreen(self.session), closed)

    def action_settings(self) -> None:
        """Edit the settings file in a dialog, and apply the changes."""
        from localchat.tui.screens.settings import SettingsScreen

        def closed(changed: dict[str, str | None] | None) -> None:
            if not changed:
                return
            if theme := changed.get("theme"):
                self.use_theme(theme)
            for key in changed:
                # The saved setting overrides an earlier /set.
                self.session.changes.pop(key, None)
            # Resolving everything again also applies keys that were removed from the file.
            self.change(None, {})

        self.app.push_screen(SettingsScreen(self.session), closed)

    def action_history(self) -> None:
        """List all conversations, and resume the chosen one."""
        from localchat.tui.screens.history import HistoryScreen

        recorder = self.session.recorder
        if recorder.history is None and recorder.trouble is not None:
            self.run_worker(self.app.run_action("app.open_history"), group="start")
            return
        if recorder.history is None:
            self.hint("the history is not open yet")
            return

        def closed(chosen: tuple[str, str | None, str] | None) -> None:
            if chosen is not None:
                self.open_conversation(*chosen)
            elif not self.session.busy and self.session.conversation.id in screen.deleted_ids:
                self.run_command("/new")

        def renamed(id_: str, title: str) -> None:
            if id_ == self.session.conversation.id:
                self.session.conversation.title = title
                self.status_changed()

        screen = HistoryScreen(recorder.history, recorder.flush, renamed)
        self.app.push_screen(screen, closed)

    def open_conversation(self, id_: str, message_id: str | None = None, text: str = "") -> None:
        """Resume a conversation, and scroll to the match of `text` in a message."""
        session = self.session
        if id_ != session.conversation.id or not session.busy:
            self.start_work(self._load_conversation(id_, message_id, text))
        elif message_id and not session.conversation.shows(message_id):
            self._hint_busy()
        else:
            self._reveal(message_id, text)

    async def _load_conversation(self, id_: str, message_id: str | None, text: str) -> None:
        session = self.session
        assert session.recorder.history is not None
        if id_ == session.conversation.id:
            # Its last messages may not be on disk yet.
            await asyncio.to_thread(session.recorder.flush)
        conversation = await asyncio.to_thread(session.recorder.history.load, id_)
        self._set_queue_aside()
        was_stopped = await session.stop_and_wait()
        if message_id and not conversation.shows(message_id):
            conversation.show(message_id)
        self.resume(conversation)
        self._reveal(message_id, text)
        if was_stopped:
            self.hint(STOPPED)

    def _reveal(self, message_id: str | None, text: str) -> None:
        """Scroll to the match of a search in a message."""
        from localchat.history.search_query import match_start, parse

        if message_id is None:
            return
        if self.is_covered:
            self.action_panel()
        nodes = self.session.conversation.nodes
        while (node := nodes.get(message_id)) and node.message.role == "tool":
            # The block of the call shows the result.
            message_id = node.parent or ""
        self.transcript.reveal(message_id, partial(match_start, parts=parse(text).parts))

    def resume(self, conversation: Conversation) -> None:
        """Show a conversation and continue it with the current model."""
        try:
            self.session.resume(conversation)
        finally:
            self._restore_unsent()
        self.composer.sent = [
            contract(question_of(node))
            for node in conversation.path()
            if node.message.role == "user"
        ]
        self.composer.editor.focus()

    def _confirm_pull(self, name: str, about: str) -> None:
        """Ask before a download begins. `about` states its size and what the model is good for."""
        from localchat.tui.screens.confirm import ConfirmScreen

        def closed(confirmed: bool | None) -> None:
            if confirmed:
                self.run_command(f"/pull {name}")

        text = f"{about}\n\nIt downloads in the background; the chat goes on meanwhile."
        dialog = ConfirmScreen(f"Download {name}?", text.strip(), "Download")
        self.app.push_screen(dialog, closed)

    def take_offer(self, action: str) -> None:
        """Do what a notice or the welcome offers."""
        if action == RETRY:
            self.start_work(self.session.retry())
        elif action.startswith(END_PREFIX):
            from localchat.session.answer_end import take_way_on

            self.start_work(take_way_on(self.session, action))
        elif action.startswith(OVERFLOW_PREFIX):
            self.start_work(self.session.take_offer(action))
        elif action.startswith(ASK_PREFIX):
            self.composer.ask(action.removeprefix(ASK_PREFIX))
        elif action.startswith(FETCH_PREFIX):
            name, _, about = action.removeprefix(FETCH_PREFIX).partition(" ")
            self._confirm_pull(name, about)
        else:
            self.run_command(f"/{action}")

    def _reveal_end(self) -> None:
        """Show the end of the conversation, where the result of a command appears."""
        if self.is_covered:
            self.action_panel()
        self.transcript.to_end()

    def copy(self, text: str, what: str) -> None:
        """Copy text to the clipboard of the terminal. The hint names it as `what`."""
        if not text:
            self.hint("there is nothing to copy")
            return
        write = terminal_writer(self.app)
        self.run_worker(
            asyncio.to_thread(clipboard.send, text, write, self.session.context.environ)
        )
        self.hint(f"Copied {what}")

    def use_theme(self, name: str) -> None:
        """Switch to a theme, by its name in the settings."""
        self.run_worker(self.app.run_action(f"app.use_theme({name!r})"))

    @property
    def has_draft(self) -> bool:
        """Whether the input has text, or a sent message is being changed."""
        return bool(self.composer.text.strip() or self._edited.id)

    def clear_draft(self) -> bool:
        """Clear the input, or stop changing a sent message. Return False if there is nothing to clear."""
        return self.leave_editing() or self.composer.clear_draft()

    def quit(self) -> None:
        """Leave the program."""
        self.run_worker(self.app.action_quit(), group="leave")

    # Messages of widgets

    def on_composer_sent(self, event: Composer.Sent) -> None:
        self._remove_error()
        self.session.recorder.draft("")
        self.transcript.unfocus_block()
        self.transcript.to_end()
        edited_id = self._edited.id
        self.leave_editing()
        if edited_id is not None:
            self.start_work(self.session.edit(edited_id, event.question))
        elif self.session.busy or self._queue.is_sending:
            self._queue.put(event.question)
            self._save_draft()
            self._update_banner()
            self.status_changed()
        else:
            self._ask(event.question)

    def on_composer_blocked(self, event: Composer.Blocked) -> None:
        self._hint_busy()

    def _hint_busy(self) -> None:
        self.show_error(AnswerUnderWay())

    def on_composer_command_entered(self, event: Composer.CommandEntered) -> None:
        self.session.recorder.draft("")
        self.run_command(event.line, typed=True)

    def on_composer_refused(self, event: Composer.Refused) -> None:
        self.show_error(event.problem)

    def on_composer_changed(self, event: Composer.Changed) -> None:
        self._save_draft()

    def _save_draft(self) -> None:
        """Record what is not sent yet: the queue, the draft, and a sent message that is being changed."""
        waiting = self._queue.texts()
        if aside := self._set_aside.get(self.session.conversation.id):
            waiting.append(expand(*aside).text)
        drafts = [expand(*draft).text for draft in self._edited.drafts(self.composer)]
        # The text of the input goes along to the next conversation.
        texts = ("\n\n".join(filter(None, parts)) for parts in ((*waiting, *drafts), waiting))
        self.session.recorder.draft(*texts)

    def on_composer_left(self, event: Composer.Left) -> None:
        if self.transcript.blocks and not self.is_covered:
            self.transcript.focus()
            if self.transcript.focused_id is None:
                self.action_mark(0)
        elif self.shows_panel:
            self.panel.focus()

    def on_composer_editor_requested(self, event: Composer.EditorRequested) -> None:
        self.run_worker(self._write_in_editor(), group="editor", exclusive=True)

    async def _write_in_editor(self) -> None:
        """Edit the message in the user's editor. The answer under way continues meanwhile."""
        from localchat.tui.external_editor import edit_text

        attachments = self.composer.attachments
        media = [item for item in attachments if item.media is not None]
        # The signs of pictures stay in the text, where the user can move or delete them.
        included = [item for item in attachments if item.media is None]
        text = expand(self.composer.text, included).text
        try:
            written = await edit_text(self.app, text, self.session.context.environ)
        except LocalchatError as problem:
            self.show_error(problem)
            return
        if written.status == 0 and written.text != text.rstrip("\n"):
            self.composer.replace_text(written.text, media)
        elif written.status == 0:
            self.composer.editor.focus()
        else:
            status = f"{written.command} exited with {written.status}"
            self.hint(f"{status}; the message is unchanged")

    def on_transcript_offer_taken(self, event: "Transcript.OfferTaken") -> None:
        self.take_offer(event.action)

    def on_transcript_copy_requested(self, event: "Transcript.CopyRequested") -> None:
        self.copy(event.text, event.what)

    def on_welcome_taken(self, event: Welcome.Taken) -> None:
        self.take_offer(event.action)

    # Actions of keys

    def action_command(self, line: str) -> None:
        self.run_command(line)

    def action_stop(self) -> None:
        if self.composer.close_completions() or self.session.stop() or self.leave_editing():
            return
        if self.is_covered:
            self.action_panel()
        else:
            self.transcript.unfocus_block()
            self.composer.editor.focus()

    def action_leave_if_empty(self) -> None:
        focused = self.focused
        if isinstance(focused, Editor) and focused.text:
            focused.action_delete_right()
        else:
            self.quit()

    def action_go_on(self) -> None:
        if not self.session.busy:
            self._reveal_end()
            self.start_work(self.session.continue_answer())

    def action_think(self) -> None:
        following = {"auto": "on", "on": "off", "off": "auto"}
        self.run_command(f"/think {following[self.session.setup.settings.think]}")

    def action_copy_answer(self) -> None:
        if selection := self.get_selected_text():
            self.copy(selection, "selection")
            self.clear_selection()
        elif self.transcript.focused_id is not None:
            self.action_copy_marked()
        else:
            self.run_command("/copy")

    def action_branch(self, step: int) -> None:
        """Switch to another version of the focused message, by default of the last one."""
        if self.session.busy:
            self._hint_busy()
        elif not self.focused_message.switch_version(step):
            kind = "earlier" if step < 0 else "later"
            self.hint(f"there is no {kind} version")

    def action_page(self, step: int) -> None:
        if step < 0:
            self.transcript.scroll_page_up(animate=False)
        else:
            self.transcript.scroll_page_down(animate=False)

    def action_question(self, step: int) -> None:
        """Go to the previous or next question. After the last one, go to the end."""
        if self.is_covered:
            self.action_panel()
        if not self.focused_message.step_question(step):
            self.hint("there is no question before this one")
        elif self.transcript.focused_id is None:
            self.composer.editor.focus()
        elif not self.composer.text:
            self.transcript.focus()  # so that the keys of a message work at once

    def action_to_end(self) -> None:
        self.transcript.to_end()

    def action_panel(self) -> None:
        self.panel.display = not self.panel.display
        left = place_column(self, self.size.width, has_panel=self.panel.display)
        self.talk.indent(left)
        if self.panel.display:
            self.panel.refresh_metrics()
            self._watch_stats()
        elif self.focused is None or self.focused is self.panel:
            self.composer.editor.focus()
        self.status_changed()

    def action_offer(self, number: int) -> None:
        welcome = self.query_one(Welcome)
        if self.transcript.take_offer(number):
            return
        if not (welcome.display and welcome.choose(number)):
            self.hint("there is no such offer")

    # Actions on the focused block

    def action_mark(self, step: int) -> None:
        self.transcript.focus_block(step)

    def action_open(self) -> None:
        focused = self.transcript.focused_id
        if focused is not None:
            self.transcript.toggle(focused)

    def action_write(self) -> None:
        self.transcript.unfocus_block()
        if self.shows_panel and self.focused is self.transcript:
            self.panel.focus()
        else:
            self.composer.editor.focus()

    def action_copy_marked(self) -> None:
        self.copy(self.focused_message.text, "message")

    def action_copy_code(self) -> None:
        """Copy the next code block of the focused message."""
        self.copy(*self.focused_message.next_code())

    def action_edit_marked(self) -> None:
        self._edit(self.focused_message.question or self.session.last_question())

    def action_regenerate_marked(self) -> None:
        if self.session.busy:
            self._hint_busy()
            return
        self.start_work(self.session.regenerate(self.focused_message.question))

    def _edit(self, question: "Node | None") -> None:
        """Put a sent message into the composer."""
        if question is None:
            self.hint("there is no question to change")
            return
        self._edited.begin(question, self.composer)
        self._update_banner()

    def leave_editing(self) -> bool:
        """Stop changing a sent message and restore the draft. False: none is being changed."""
        left = self._edited.leave(self.composer)
        if left:
            self._update_banner()
        return left
