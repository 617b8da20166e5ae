"""The chat: what is done where a widget posts something or a key is pressed. It calls the session; what stands
on the screen is the frame's (chat_frame.py)."""

import asyncio
from collections.abc import Coroutine, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import Static

from localchat.chat.conversation import Node
from localchat.chat.titles import title_for
from localchat.errors import EngineClosed, LocalchatError
from localchat.sanitize import sanitize_line
from localchat.session.blocks import Block, NoticeBlock, ToolCallBlock
from localchat.session.session import OVERFLOW_PREFIX, RETRY, ChatSession
from localchat.session.view import node_of
from localchat.tui import clipboard
from localchat.tui.attachments import ComposerText, contract, expand
from localchat.tui.keymap import bindings, key_names
from localchat.tui.textual_internals.compositor import ChangedRegionsCompositor
from localchat.tui.transcript.widget import Transcript
from localchat.tui.widgets.composer import Composer
from localchat.tui.widgets.editor import Editor
from localchat.tui.widgets.find_bar import FindBar
from localchat.tui.widgets.metrics_panel import MetricsPanel
from localchat.tui.widgets.status_bar import StatusBar
from localchat.tui.widgets.welcome import Welcome

if TYPE_CHECKING:
    from localchat.tui.command_handlers import CommandHandlers


# The page of the chat screen: what its session shows goes to the transcript.


class TranscriptView:
    """Where the session shows blocks: see `page.Page`. Of the screen that it is made for, only what changed is
    drawn again."""

    def __init__(self, screen: "ChatFrame") -> None:
        self._screen = screen
        screen._compositor = ChangedRegionsCompositor()

    def show(self, blocks: Sequence[Block]) -> None:
        self._screen.transcript.show(blocks)
        self._screen.blocks_changed()

    def put(self, block: Block) -> None:
        self._screen.transcript.put(block)
        if self._screen.is_welcoming:
            self._screen.blocks_changed()

    def append_text(self, id_: str, text: str) -> None:
        self._screen.transcript.append_text(id_, text)

    def finish(self, block: Block) -> None:
        self._screen.transcript.put(block)
        self._screen.transcript.finish(block.id)

    def status_changed(self) -> None:
        self._screen.status_changed()


# The transcript as the chat has it.


class Talk(Transcript):
    """A transcript with the keys of the chat."""

    BINDINGS: ClassVar[list[BindingType]] = [*bindings("transcript")]


# The frame of the chat: what stands on it, and how it follows the session. What is done stands in chat.py.


_STATS_EVERY_S = 0.5
_HINT_S = 2.5


class ChatFrame(Screen[None]):
    """Draws; asks the session for figures and nothing else. `session` is handed in by the app. While a sent
    message is being changed, `_editing` names it, and what was written before is laid aside."""

    # The figures stand beside the conversation where that is wide, below it where there is room, and else in
    # its place: nobody can read half a line.
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (76, "-middle"), (110, "-wide")]  # noqa: RUF012 - textual's own form
    AUTO_FOCUS = "#editor"

    def __init__(self) -> None:
        super().__init__()
        self.view = TranscriptView(self)
        self.session: ChatSession
        self._editing: str | None = None
        self._saved_draft = ComposerText()
        self._fetching_stats = False
        self._hint_timer: Timer | None = None
        self._labels: dict[str, str] = {}

    def compose(self) -> ComposeResult:
        with Horizontal(id="heading"):
            yield Static("", id="title", markup=False)
            yield Static("", id="model", markup=False)
        with Horizontal(id="body"):
            with Vertical(id="talk"):
                yield FindBar(id="finder")
                yield Welcome(id="welcome")
                yield Talk(id="transcript")
            yield MetricsPanel(self.session.status, id="panel")
        yield Static("", id="banner", markup=False)
        yield Composer(id="composer")
        yield StatusBar(self.session.status, id="status")

    def on_mount(self) -> None:
        self.set_interval(_STATS_EVERY_S, self._watch_stats)
        self.composer.is_blocked = lambda: self.session.busy
        self.status_changed()

    @cached_property
    def transcript(self) -> Talk:
        return self.query_one(Talk)

    @cached_property
    def composer(self) -> Composer:
        return self.query_one(Composer)

    @cached_property
    def status(self) -> StatusBar:
        return self.query_one(StatusBar)

    @cached_property
    def panel(self) -> MetricsPanel:
        return self.query_one(MetricsPanel)

    # ------------------------------------------------------------------ what the session shows

    def status_changed(self) -> None:
        """State, figures or title are other ones. Before the screen stands and after it, nothing is drawn."""
        if self._nodes._get_by_id("status") is None:  # `query` would look at every widget
            return
        session = self.session
        urgent = "Esc stops" if session.busy else self._offer_hint() or self._continue_hint()
        self.status.urgent = bool(urgent)
        self.status.hint = urgent or ("Esc closes" if self.is_covered else "^O figures  F1 help")
        self.status.refresh_metrics()
        self.panel.refresh_metrics()
        title = sanitize_line(title_for(session.conversation)) or "New conversation"
        self._set_label("#title", title)
        think = session.setup.settings.think
        thinking = "" if think == "auto" else f" · think {think}"
        self._set_label("#model", f"{sanitize_line(session.status.model)}{thinking}")

    def _offer_hint(self) -> str:
        blocks = self.transcript.blocks
        last = blocks[-1] if blocks else None
        if isinstance(last, NoticeBlock) and last.offers:
            return "Alt+1 takes it" if len(last.offers) == 1 else f"Alt+1…{len(last.offers)} choose"
        return ""

    def _continue_hint(self) -> str:
        conversation = self.session.conversation
        last = conversation.nodes.get(conversation.head or "")
        if last is None or last.message.role != "assistant" or last.state == "whole":
            return ""
        return f"{key_names('chat.continue', self.session.context.keys)} goes on with it"

    def _set_label(self, where: str, text: str) -> None:
        if self._labels.get(where) != text:
            self._labels[where] = text
            self.query_one(where, Static).update(Content(text))

    @property
    def is_covered(self) -> bool:
        """Whether the figures stand in the place of the conversation."""
        beside = self.has_class("-wide") or (
            self.has_class("-middle") and not self.has_class("-short")
        )
        return self.panel.display and not beside

    @property
    def is_welcoming(self) -> bool:
        """Whether nobody has said anything yet."""
        return self.query_one(Welcome).display

    def blocks_changed(self) -> None:
        """The transcript holds something, or nothing any more. A notice alone, of a load for instance, does not
        hide who answers and what one can do."""
        blocks = self.transcript.blocks
        notices = [one for one in blocks if isinstance(one, NoticeBlock)]
        welcome = self.query_one(Welcome)
        welcome.display = len(notices) == len(blocks)
        welcome.set_offers_hidden(any(one.offers for one in notices))
        self.transcript.display = bool(blocks)

    def _watch_stats(self) -> None:
        status = self.session.status
        trouble = self.session.recorder.trouble
        if trouble is not None:
            self.hint(trouble.message)
        if status.info is None or self._fetching_stats or not self.panel.display:
            return
        self._fetching_stats = True
        self.run_worker(self._fetch_stats(), group="stats")

    async def _fetch_stats(self) -> None:
        try:
            engine = await self.session.engine()
            self.session.status.stats = await asyncio.to_thread(engine.stats)
            for panel in self.query(MetricsPanel):  # none where the screen was taken down meanwhile
                panel.refresh_metrics()
        except LocalchatError:
            self.session.status.stats = None  # the engine is gone; the next question starts another
        finally:
            self._fetching_stats = False

    # ------------------------------------------------------------------ words above the composer

    def hint(self, text: str) -> None:
        """A word above the composer that goes away by itself."""
        self._show_banner(text)
        if self._hint_timer is not None:
            self._hint_timer.stop()  # the time of this word begins now
        self._hint_timer = self.set_timer(_HINT_S, self._restore_banner)

    def _show_banner(self, text: str) -> None:
        line = self.query_one("#banner", Static)
        line.display = bool(text)
        line.update(Content(text))

    def _restore_banner(self) -> None:
        editing = (
            "Changing a sent message: Enter sends it as a new branch, Esc leaves it as it was."
        )
        self._show_banner(editing if self._editing else "")

    # ------------------------------------------------------------------ size

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.height < 16, "-low")
        self.set_class(event.size.height < 20, "-short")


class ChatScreen(ChatFrame):
    """See the module. The app hands in the session, whose page this screen has."""

    BINDINGS: ClassVar[list[BindingType]] = [*bindings("chat")]

    @cached_property
    def commands(self) -> "CommandHandlers":
        from localchat.tui.command_handlers import (
            CommandHandlers,  # the first frame does without commands
        )

        return CommandHandlers(self)

    # ------------------------------------------------------------------ doing

    def start_work(self, work: Coroutine[Any, Any, object]) -> None:
        """Let the session do something; what goes wrong becomes a notice."""
        self.run_worker(self._guarded(work), group="session", exit_on_error=True)

    async def _guarded(self, work: Coroutine[Any, Any, object]) -> None:
        try:
            await work
        except EngineClosed:
            pass  # stopped on purpose; the state line says so
        except LocalchatError as problem:
            self.session.show_error(problem)

    async def settle_down(self) -> None:
        """Stop what is under way and wait until it has ended."""
        self.session.stop()
        while self.session.busy:
            await asyncio.sleep(0.01)

    def copy(self, text: str, what: str) -> None:
        """Send text to the clipboard of the terminal."""
        if not text:
            self.hint("there is nothing to copy")
            return
        driver = self.app._driver  # the only way to write beside the screen's own updates
        write = driver.write if driver is not None else lambda sequence: None
        self.run_worker(
            asyncio.to_thread(clipboard.send, text, write, self.session.context.environ)
        )
        self.hint(f"{what}: sent to the terminal's clipboard")

    # ------------------------------------------------------------------ messages of widgets

    def on_composer_sent(self, event: Composer.Sent) -> None:
        session = self.session
        self.session.recorder.draft("")
        self.transcript.unfocus_block()
        self.transcript.to_end()
        editing = self._editing
        self.leave_editing()
        if editing is not None:
            self.start_work(session.edit(editing, event.text, event.inclusions))
        else:
            self.start_work(session.ask(event.text, event.inclusions))

    def on_composer_blocked(self, event: Composer.Blocked) -> None:
        self.hint("an answer is under way; Esc stops it")

    def on_composer_command_entered(self, event: Composer.CommandEntered) -> None:
        self.session.recorder.draft("")
        self.commands.run(event.line)

    def on_composer_refused(self, event: Composer.Refused) -> None:
        self.session.show_error(event.problem)

    def on_composer_changed(self, event: Composer.Changed) -> None:
        text, _ = expand(*(self._saved_draft if self._editing else self.composer.written))
        self.session.recorder.draft(text)

    def on_composer_left(self, event: Composer.Left) -> None:
        if self.transcript.blocks and not self.is_covered:
            self.transcript.focus()
            if self.transcript.focused_id is None:
                self.action_mark(0)
        elif self.panel.display:
            self.panel.focus()

    def on_composer_editor_requested(self, event: Composer.EditorRequested) -> None:
        self.run_worker(self.commands.write_in_editor(), group="editor", exclusive=True)

    def on_editor_opened(self, event: Editor.Opened) -> None:
        from localchat.tui.screens.viewer import ViewerScreen

        self.app.push_screen(ViewerScreen(event.attachment.label, event.attachment.text))

    def on_transcript_offer_taken(self, event: Transcript.OfferTaken) -> None:
        self.take_offer(event.action)

    def on_transcript_link_clicked(self, event: Transcript.LinkClicked) -> None:
        self.app.open_url(event.url)

    def on_transcript_copy_requested(self, event: Transcript.CopyRequested) -> None:
        self.copy(event.text, "selection")

    def on_find_bar_closed(self, event: FindBar.Closed) -> None:
        self.composer.editor.focus()

    def on_welcome_taken(self, event: Welcome.Taken) -> None:
        self.take_offer(event.action)

    def take_offer(self, action: str) -> None:
        """Do what a notice offers."""
        if action == RETRY:
            self.start_work(self.session.retry())
        elif action.startswith(OVERFLOW_PREFIX):
            self.start_work(self.session.take_offer(action))
        else:
            self.commands.run(f"/{action}")

    # ------------------------------------------------------------------ actions of keys

    def action_command(self, line: str) -> None:
        self.commands.run(line)

    def action_stop(self) -> None:
        if self.composer.close_completions():
            return
        if self.query_one(FindBar).display:
            self.query_one(FindBar).close()
        elif self.session.stop() or self.leave_editing():
            pass
        elif self.is_covered:
            self.action_panel()
        else:
            self.transcript.unfocus_block()
            self.composer.editor.focus()

    def action_leave_if_empty(self) -> None:
        focused = self.focused
        if isinstance(focused, Editor) and focused.text:
            focused.action_delete_right()
        else:
            self.run_worker(self.app.action_quit(), group="leave")

    def action_go_on(self) -> None:
        if not self.session.busy:
            self.start_work(self.session.continue_answer())

    def action_think(self) -> None:
        order = ("auto", "on", "off")
        now = order.index(self.session.setup.settings.think)
        self.commands.run(f"/think {order[(now + 1) % 3]}")

    def action_copy_answer(self) -> None:
        if self.transcript.focused_id is not None:
            self.action_copy_marked()
        else:
            self.commands.run("/copy")

    def action_branch(self, step: int) -> None:
        if self.session.busy:
            self.hint("an answer is under way; Esc stops it")
            return
        marked = self.transcript.focused_id
        node = self.session.conversation.nodes.get(node_of(marked)) if marked else None
        candidates = [node] if node else [self.session.last_answer(), self.session.last_question()]
        for candidate in candidates:
            if (
                candidate is not None
                and self.session.switch_version(candidate.id, step) is not None
            ):
                return
        self.hint("there is no other version")

    def action_page(self, step: int) -> None:
        view = self.transcript
        (view.scroll_page_up if step < 0 else view.scroll_page_down)(animate=False)

    def action_to_end(self) -> None:
        self.transcript.to_end()

    def action_panel(self) -> None:
        self.panel.display = not self.panel.display
        if self.panel.display:
            self.panel.refresh_metrics()
            self._watch_stats()
        elif self.focused is None or self.focused is self.panel:
            self.composer.editor.focus()
        self.status_changed()

    def action_palette(self) -> None:
        self.app.action_command_palette()

    def action_open_settings(self) -> None:
        self.commands.open_settings()

    def action_open_history(self) -> None:
        self.commands.open_history()

    def action_offer(self, number: int) -> None:
        welcome = self.query_one(Welcome)
        if self.transcript.take_offer(number):
            return
        if welcome.display:
            welcome.choose(number)
        else:
            self.hint("there is no such offer")

    # ------------------------------------------------------------------ the marked block

    def action_mark(self, step: int) -> None:
        self.transcript.focus_block(step)

    def action_open(self) -> None:
        marked = self.transcript.focused_id
        if marked is not None:
            self.transcript.toggle(marked)

    def action_write(self) -> None:
        self.transcript.unfocus_block()
        if self.panel.display and self.focused is self.transcript:
            self.panel.focus()
        else:
            self.composer.editor.focus()

    def action_copy_marked(self) -> None:
        marked = self.transcript.focused_id
        block = self.transcript.block(marked) if marked is not None else None
        if block is not None:
            self.copy(_text_of(block), "message")

    def action_edit_marked(self) -> None:
        question = self._marked_question()
        self.edit(question.id if question else None)

    def action_regenerate_marked(self) -> None:
        if self.session.busy:
            self.hint("an answer is under way; Esc stops it")
            return
        question = self._marked_question()
        self.start_work(self.session.regenerate(question.id if question else None))

    def _marked_question(self) -> Node | None:
        """The question that is marked, or whose answer is; None where none is."""
        nodes = self.session.conversation.nodes
        marked = self.transcript.focused_id
        node = nodes.get(node_of(marked)) if marked else None
        while node is not None and node.message.role != "user":
            node = nodes.get(node.parent or "")
        return node

    def edit(self, id_: str | None) -> None:
        """Put a sent message into the composer; the last question where none is named."""
        node = self.session.conversation.nodes.get(id_) if id_ else self.session.last_question()
        if node is None:
            self.hint("there is no question to change")
            return
        if self._editing is None:
            self._saved_draft = self.composer.written
        self._editing = node.id
        self._restore_banner()
        self.composer.write(*contract(node.message.content, node.inclusions))

    def leave_editing(self) -> bool:
        """Stop changing a sent message: what was written before stands in the composer again. False where none
        was being changed."""
        if self._editing is None:
            return False
        self._editing, aside, self._saved_draft = None, self._saved_draft, ComposerText()
        self._restore_banner()
        self.composer.write(*aside)
        return True


def _text_of(block: Block) -> str:
    return block.arguments if isinstance(block, ToolCallBlock) else block.text
