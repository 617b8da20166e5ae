"""The chat screen: conversation, composer, status bar and metrics panel.

Widgets post messages, keys run actions; only this screen and the command handlers call the session.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.css.query import NoMatches
from textual.screen import Screen

from localchat.chat.conversation import Inclusion
from localchat.errors import EngineClosed, LocalchatError
from localchat.session.blocks import NoticeBlock, Offer
from localchat.session.session import ChatSession
from localchat.session.view import SessionView
from localchat.tui import clipboard
from localchat.tui.attachments import ComposerText, expand
from localchat.tui.column import place_column
from localchat.tui.edited_message import EditedMessage
from localchat.tui.focused_message import FocusedMessage
from localchat.tui.footer_keys import FooterState, footer_keys
from localchat.tui.keymap import bindings, offer_key
from localchat.tui.message_queue import MessageQueue
from localchat.tui.progress import PROGRESS_ID, progress_block
from localchat.tui.textual_internals.compositor import redraw_changes_only
from localchat.tui.textual_internals.driver import alert, terminal_released, terminal_writer
from localchat.tui.transcript_view import TranscriptView
from localchat.tui.widgets.banner import Banner
from localchat.tui.widgets.composer import Composer
from localchat.tui.widgets.editor import Editor
from localchat.tui.widgets.key_footer import KeyFooter
from localchat.tui.widgets.status_bar import StatusBar
from localchat.tui.widgets.talk import Talk
from localchat.tui.widgets.title_bar import TitleBar
from localchat.tui.widgets.welcome import Welcome, greeting

if TYPE_CHECKING:
    from localchat.tui.command_handlers import CommandHandlers
    from localchat.tui.transcript.widget import Transcript
    from localchat.tui.widgets.find_bar import FindBar
    from localchat.tui.widgets.metrics_panel import MetricsPanel

_STATS_EVERY_S = 0.5
_BUSY = "an answer is under way; Esc stops it"
_LONG_S = 8.0  # longer work is announced where the window is not looked at
_EDITING = "Changing a sent message: Enter sends it as a new branch, Esc leaves it as it was."

Result = TypeVar("Result")


class ChatScreen(Screen[None]):
    """Shows a session, and turns messages of widgets and keys into calls of it."""

    BINDINGS: ClassVar[list[BindingType]] = [*bindings("chat")]
    # The panel stands beside the conversation, below it on a high screen, or in its place: lines stay readable.
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (76, "-middle"), (110, "-wide")]  # noqa: RUF012 - textual's own form
    AUTO_FOCUS = "#editor"

    def __init__(self, open_session: Callable[[SessionView], ChatSession]) -> None:
        super().__init__()
        redraw_changes_only(self)
        self.session = open_session(TranscriptView(self, self._offer_key))
        self._edited = EditedMessage()
        self._fetching_stats = False
        self._resumed = False
        """It was shown before."""
        self.is_leaving = False
        """Nothing new is sent any more."""
        self._queue = MessageQueue()

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
        """Apply no styles before the first frame: every widget got them when it was mounted, and applying
        them again takes a tenth of the time to that frame."""
        event.refresh_styles = self._resumed
        self._resumed = True

    def on_mount(self) -> None:
        self.set_interval(_STATS_EVERY_S, self._watch_stats)
        self.composer.is_blocked = lambda: self.session.busy and self._edited.id is not None
        self.composer.take_back = self._take_back
        self.status_changed()

    @cached_property
    def talk(self) -> Talk:
        return self.query_one(Talk)

    @property
    def transcript(self) -> "Transcript":
        return self.talk.transcript

    @cached_property
    def panel(self) -> "MetricsPanel":
        """The metrics panel, built when it is shown first."""
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
    def commands(self) -> "CommandHandlers":
        # Imported late: the first frame needs no commands.
        from localchat.tui.command_handlers import CommandHandlers

        return CommandHandlers(self)

    # ------------------------------------------------------------------ following the session

    def status_changed(self) -> None:
        """Update status bar, panel and heading, of a mounted screen."""
        try:
            self.get_child_by_id("status")  # `query` would look at every widget
        except NoMatches:
            return
        self._show_keys()
        self._show_progress()
        self.status.refresh_metrics()
        if self.shows_panel:
            self.panel.refresh_metrics()
        self.query_one(TitleBar).show(self.session)

    def _show_keys(self) -> None:
        """Show the keys that are of use: in the footer, or one of them in the status bar of a low window."""
        session = self.session
        focus = getattr(self.focused, "id", None) or ""
        queue = bool(self._queue)
        offers = self.transcript.open_offers if self.talk.has_transcript else ()
        covered = self.is_covered
        continues = session.can_continue
        state = FooterState(focus, session.busy, covered, queue, continues, offers)
        keys = footer_keys(state, self.session.context.keys)
        self.query_one(KeyFooter).show(keys)
        first = keys[:1] if state.is_urgent or state.is_covered else keys[-1:]
        self.status.urgent = state.is_urgent and self.has_class("-low")
        self.status.hint = " ".join(first[0][:2]) if self.has_class("-low") else ""

    def _show_progress(self) -> None:
        """Show what the request waits for at the end of the transcript, until its first words."""
        status = self.session.status
        block = progress_block(status, time.monotonic()) if self.session.busy else None
        if block is not None:
            self.transcript.put(block)
        elif self.talk.has_transcript and self.transcript.block(PROGRESS_ID) is not None:
            self.transcript.drop(PROGRESS_ID)

    def _offer_key(self, number: int) -> str:
        return offer_key(number, self.session.context.keys)

    @property
    def is_covered(self) -> bool:
        """Whether the panel replaces the conversation."""
        has_room = self.has_class("-wide") or (
            self.has_class("-middle") and not self.has_class("-short")
        )
        return self.shows_panel and not has_room

    @property
    def is_welcoming(self) -> bool:
        """Whether the conversation is still empty."""
        return self.query_one(Welcome).display

    def blocks_changed(self) -> None:
        """Show the welcome or the transcript. Notices alone, as of a load, do not hide the welcome."""
        blocks = self.transcript.blocks
        self.query_one(Welcome).display = all(isinstance(one, NoticeBlock) for one in blocks)
        self.transcript.display = bool(blocks)

    @property
    def reserved_offers(self) -> int:
        """How many offers the welcome may number."""
        return self.query_one(Welcome).reserved

    def _watch_stats(self) -> None:
        """Update what changes with time alone, and the engine's metrics while the panel shows them."""
        status = self.session.status
        if self.session.busy:
            self.status_changed()
        trouble = self.session.recorder.trouble
        if trouble is not None:
            self.hint(trouble.message)
        if status.info is not None and self.shows_panel and not self._fetching_stats:
            self._fetching_stats = True
            self.run_worker(self._fetch_stats(), group="stats")

    async def _fetch_stats(self) -> None:
        await self.session.fetch_stats()
        self._fetching_stats = False
        if self.shows_panel:
            self.panel.refresh_metrics()

    @property
    def suggested_models(self) -> tuple[Offer, ...]:
        """Models that the welcome offers."""
        return self.query_one(Welcome).greeting.models

    # ------------------------------------------------------------------ banner above the composer

    def hint(self, text: str) -> None:
        """Show a text above the composer for some seconds."""
        self.query_one(Banner).hint(text)

    def _update_banner(self) -> None:
        """Show what lasts: a sent message that is being changed, or messages that wait."""
        banner = self.query_one(Banner)
        is_list = not self._edited.id
        banner.keep(self._queue.describe() if is_list else _EDITING, is_list=is_list)

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.height < 16, "-low")
        self.set_class(event.size.height < 20, "-short")
        self.set_class(event.size.height < 22, "-unframed")
        self.talk.indent(place_column(self, event.size.width, has_panel=self.shows_panel))
        self.status_changed()

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        self._show_keys()

    # ------------------------------------------------------------------ for the command handlers

    def start_work(self, work: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine of the session; an error becomes a notice."""
        self.run_worker(self._guarded(work), group="session", exit_on_error=True)

    async def _guarded(self, work: Coroutine[Any, Any, object]) -> None:
        begun_s = time.monotonic()
        try:
            await work
        except EngineClosed:
            pass  # stopped on purpose; the status bar shows it
        except LocalchatError as problem:
            self.commands.refuse(problem)
        finally:
            if not self.app.app_focus and time.monotonic() - begun_s > _LONG_S:
                alert(self.app, "localchat is done")
            self._work_ended()

    def _ask(self, text: str, inclusions: tuple[Inclusion, ...]) -> None:
        """Send a question. Those that come before it is on its way wait, too."""
        self._queue.is_sending = True
        self.start_work(self.session.ask(text, inclusions))

    def _work_ended(self) -> None:
        """Send the next message of the queue, or give all of them back if the answer is not complete."""
        # An app that no longer runs takes its widgets away, one after the other.
        if self.session.busy or self.is_leaving or not self.app.is_running:
            return
        self._queue.is_sending = False
        self.status_changed()
        if not self._queue:
            return
        last = self.session.last_answer()
        if last and last.id == self.session.conversation.head and last.state in ("whole", "length"):
            self.transcript.to_end()
            self._ask(*self._queue.next())
        else:
            waited = self._queue.take_all()
            written = self.composer.written
            text = "\n\n".join(filter(None, (waited.text, written.text)))
            self.composer.write(text, (*waited.attachments, *written.attachments))
        self._update_banner()

    def _take_back(self) -> ComposerText | None:
        """The newest message of the queue, which the up key takes back."""
        taken = self._queue.take_last()
        self._update_banner()
        self.status_changed()
        return taken

    def reveal_end(self) -> None:
        """Show the end of the conversation, where the result of a command appears."""
        if self.is_covered:
            self.action_panel()
        self.transcript.to_end()

    def reply(self, text: str, offers: Sequence[Offer] = ()) -> None:
        """Show the result of a command where it is seen."""
        self.reveal_end()
        self.session.notice(text, "info", offers)

    async def stop_and_wait(self) -> None:
        """Stop the answer under way and wait until it has ended."""
        self.session.stop()
        while self.session.busy:
            await asyncio.sleep(0.01)

    def copy(self, text: str, what: str) -> None:
        """Copy text to the clipboard of the terminal."""
        if not text:
            self.hint("there is nothing to copy")
            return
        write = terminal_writer(self.app)
        self.run_worker(
            asyncio.to_thread(clipboard.send, text, write, self.session.context.environ)
        )
        self.hint(f"Copied {what}")

    def find(self, text: str) -> None:
        """Open the find bar, with a text to search for."""
        self.talk.finder.open(text)

    def show_panel(self) -> None:
        """Show the metrics panel."""
        if not self.shows_panel:
            self.action_panel()

    def open_dialog(
        self, dialog: Screen[Result], closed: Callable[[Result | None], None] | None = None
    ) -> None:
        """Show a screen above this one; `closed` gets its result."""
        self.app.push_screen(dialog, closed)

    def use_theme(self, name: str) -> None:
        """Switch to a theme, by its name in the settings."""
        self.run_worker(self.app.run_action(f"app.use_theme({name!r})"))

    def terminal_released(self) -> AbstractContextManager[None]:
        """Leave the terminal to another program inside the block, which must not raise."""
        return terminal_released(self.app)

    def call_from_any_thread(self, callback: Callable[..., object], *arguments: object) -> None:
        """Call a function on the event loop, unless the program has ended."""
        with suppress(RuntimeError):  # the screen has no app any more
            self.app.call_later(callback, *arguments)

    @property
    def has_draft(self) -> bool:
        """Whether the input holds a message, or a change of a sent one."""
        return bool(self.composer.text.strip() or self._edited.id)

    def clear_draft(self) -> bool:
        """Clear the input, or stop changing a sent message. False if there is nothing to clear."""
        return self.leave_editing() or self.composer.clear_draft()

    def quit(self) -> None:
        """Leave the program."""
        self.run_worker(self.app.action_quit(), group="leave")

    # ------------------------------------------------------------------ messages of widgets

    def on_composer_sent(self, event: Composer.Sent) -> None:
        session = self.session
        self.session.recorder.draft("")
        self.transcript.unfocus_block()
        self.transcript.to_end()
        editing = self._edited.id
        self.leave_editing()
        if editing is not None:
            self.start_work(session.edit(editing, event.text, event.inclusions))
        elif session.busy or self._queue.is_sending:
            self._queue.put(event.text, event.inclusions)
            self._save_draft()
            self._update_banner()
            self.status_changed()
        else:
            self._ask(event.text, event.inclusions)

    def on_composer_blocked(self, event: Composer.Blocked) -> None:
        self.hint(_BUSY)

    def on_composer_command_entered(self, event: Composer.CommandEntered) -> None:
        self.session.recorder.draft("")
        self.commands.run(event.line)

    def on_composer_refused(self, event: Composer.Refused) -> None:
        self.commands.refuse(event.problem)

    def on_composer_changed(self, event: Composer.Changed) -> None:
        self._save_draft()

    def _save_draft(self) -> None:
        """Record what is not sent yet: the queue, the draft, and a sent message that is being changed."""
        texts = [expand(*each)[0] for each in self._edited.drafts(self.composer)]
        self.session.recorder.draft("\n\n".join(filter(None, (*self._queue.texts(), *texts))))

    def on_composer_left(self, event: Composer.Left) -> None:
        if self.transcript.blocks and not self.is_covered:
            self.transcript.focus()
            if self.transcript.focused_id is None:
                self.action_mark(0)
        elif self.shows_panel:
            self.panel.focus()

    def on_composer_editor_requested(self, event: Composer.EditorRequested) -> None:
        self.run_worker(self.commands.write_in_editor(), group="editor", exclusive=True)

    def on_editor_opened(self, event: Editor.Opened) -> None:
        from localchat.tui.screens.viewer import ViewerScreen

        self.app.push_screen(ViewerScreen(event.attachment.label, event.attachment.text))

    def on_transcript_offer_taken(self, event: "Transcript.OfferTaken") -> None:
        self.commands.take_offer(event.action)

    def on_transcript_link_clicked(self, event: "Transcript.LinkClicked") -> None:
        self.app.open_url(event.url)

    def on_transcript_copy_requested(self, event: "Transcript.CopyRequested") -> None:
        self.copy(event.text, event.what)

    def on_find_bar_closed(self, event: "FindBar.Closed") -> None:
        self.composer.editor.focus()

    def on_welcome_taken(self, event: Welcome.Taken) -> None:
        self.commands.take_offer(event.action)

    # ------------------------------------------------------------------ actions of keys

    def action_command(self, line: str) -> None:
        self.commands.run(line)

    def action_stop(self) -> None:
        closed = self.composer.close_completions() or self.talk.close_finder()
        if closed or self.session.stop() or self.leave_editing():
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
            self.reveal_end()
            self.start_work(self.session.continue_answer())

    def action_think(self) -> None:
        following = {"auto": "on", "on": "off", "off": "auto"}
        self.commands.run(f"/think {following[self.session.setup.settings.think]}")

    def action_copy_answer(self) -> None:
        if selected := self.get_selected_text():
            self.copy(selected, "selection")
            self.clear_selection()
        elif self.transcript.focused_id is not None:
            self.action_copy_marked()
        else:
            self.commands.run("/copy")

    def action_branch(self, step: int) -> None:
        """Switch to another version of the focused message, else of the last one."""
        if self.session.busy:
            self.hint(_BUSY)
        elif not self.focused_message.switch_version(step):
            self.hint("there is no other version")

    def action_page(self, step: int) -> None:
        scroll = self.transcript.scroll_page_up if step < 0 else self.transcript.scroll_page_down
        scroll(animate=False)

    def action_question(self, step: int) -> None:
        """Go to the previous question, or to the next one; after the last one to the end."""
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

    def action_palette(self) -> None:
        self.app.action_command_palette()

    def action_open_screen(self, name: str) -> None:
        getattr(self.commands, f"open_{name}")()

    def action_offer(self, number: int) -> None:
        welcome = self.query_one(Welcome)
        taken = self.transcript.take_offer(number) or (welcome.display and welcome.choose(number))
        if not taken:
            self.hint("there is no such offer")

    # ------------------------------------------------------------------ actions on the focused block

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
        question = self.focused_message.question
        self.edit(question.id if question else None)

    def action_regenerate_marked(self) -> None:
        if self.session.busy:
            self.hint(_BUSY)
            return
        question = self.focused_message.question
        self.start_work(self.session.regenerate(question.id if question else None))

    def edit(self, id_: str | None) -> None:
        """Put a sent message into the composer; the last question if `id_` is None."""
        node = self.session.conversation.nodes.get(id_) if id_ else self.session.last_question()
        if node is None:
            self.hint("there is no question to change")
            return
        self._edited.begin(node, self.composer)
        self._update_banner()

    def leave_editing(self) -> bool:
        """Stop changing a sent message and restore the draft. False where none was being changed."""
        if left := self._edited.leave(self.composer):
            self._update_banner()
        return left
