"""The chat: what is done where a widget posts something or a key is pressed. It calls the session; what stands
on the screen is the frame's (chat_frame.py)."""

import asyncio
from collections.abc import Coroutine
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from textual.binding import BindingType

from localchat.chat.conversation import Node
from localchat.errors import EngineClosed, LocalchatError
from localchat.tui import clipboard
from localchat.tui.blocks import Block, ToolCallBlock
from localchat.tui.chips import Written, contract, expand
from localchat.tui.keys import bindings
from localchat.tui.outgrown import PREFIX as OVERFLOW
from localchat.tui.page import node_of
from localchat.tui.screens.chat_frame import ChatFrame
from localchat.tui.session import RETRY
from localchat.tui.transcript import Transcript
from localchat.tui.widgets.composer import Composer
from localchat.tui.widgets.editor import Editor
from localchat.tui.widgets.finder import Finder
from localchat.tui.widgets.welcome import Welcome

if TYPE_CHECKING:
    from localchat.tui.commanding import Commander


class ChatScreen(ChatFrame):
    """See the module. The app hands in the session, whose page this screen has."""

    BINDINGS: ClassVar[list[BindingType]] = [*bindings("chat")]

    @cached_property
    def commander(self) -> "Commander":
        from localchat.tui.commanding import Commander  # the first frame does without commands

        return Commander(self)

    # ------------------------------------------------------------------ doing

    def go(self, work: Coroutine[Any, Any, None]) -> None:
        """Let the session do something; what goes wrong becomes a notice."""
        self.run_worker(self._guarded(work), group="session", exit_on_error=True)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except EngineClosed:
            pass  # stopped on purpose; the state line says so
        except LocalchatError as problem:
            self.session.complain(problem)

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
            asyncio.to_thread(clipboard.send, text, write, self.session.workplace.environ)
        )
        self.hint(f"{what}: sent to the terminal's clipboard")

    # ------------------------------------------------------------------ messages of widgets

    def on_composer_sent(self, event: Composer.Sent) -> None:
        session = self.session
        self.session.keeper.draft("")
        self.transcript.unfocus_block()
        self.transcript.to_end()
        editing = self._editing
        self.leave_editing()
        if editing is not None:
            self.go(session.edit(editing, event.text, event.inclusions))
        else:
            self.go(session.ask(event.text, event.inclusions))

    def on_composer_held(self, event: Composer.Held) -> None:
        self.hint("an answer is under way; Esc stops it")

    def on_composer_commanded(self, event: Composer.Commanded) -> None:
        self.session.keeper.draft("")
        self.commander.run(event.line)

    def on_composer_refused(self, event: Composer.Refused) -> None:
        self.session.complain(event.problem)

    def on_composer_changed(self, event: Composer.Changed) -> None:
        text, _ = expand(*(self._aside if self._editing else self.composer.written))
        self.session.keeper.draft(text)

    def on_composer_left(self, event: Composer.Left) -> None:
        if self.transcript.blocks and not self.is_covered:
            self.transcript.focus()
            if self.transcript.focused_id is None:
                self.action_mark(0)
        elif self.panel.display:
            self.panel.focus()

    def on_composer_editor_wanted(self, event: Composer.EditorWanted) -> None:
        self.run_worker(self.commander.write_in_editor(), group="editor", exclusive=True)

    def on_editor_opened(self, event: Editor.Opened) -> None:
        from localchat.tui.screens.reading import ReadingScreen

        self.app.push_screen(ReadingScreen(event.chip.label, event.chip.text))

    def on_transcript_offer_taken(self, event: Transcript.OfferTaken) -> None:
        self.take(event.action)

    def on_transcript_link_clicked(self, event: Transcript.LinkClicked) -> None:
        self.app.open_url(event.url)

    def on_transcript_copy_wanted(self, event: Transcript.CopyWanted) -> None:
        self.copy(event.text, "selection")

    def on_finder_closed(self, event: Finder.Closed) -> None:
        self.composer.editor.focus()

    def on_welcome_taken(self, event: Welcome.Taken) -> None:
        self.take(event.action)

    def take(self, action: str) -> None:
        """Do what a notice offers."""
        if action == RETRY:
            self.go(self.session.retry())
        elif action.startswith(OVERFLOW):
            self.go(self.session.outgrown.take(action))
        else:
            self.commander.run(f"/{action}")

    # ------------------------------------------------------------------ actions of keys

    def action_command(self, line: str) -> None:
        self.commander.run(line)

    def action_stop(self) -> None:
        if self.composer.close_completions():
            return
        if self.query_one(Finder).display:
            self.query_one(Finder).close()
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
            self.go(self.session.go_on())

    def action_think(self) -> None:
        order = ("auto", "on", "off")
        now = order.index(self.session.settled.settings.think)
        self.commander.run(f"/think {order[(now + 1) % 3]}")

    def action_copy_answer(self) -> None:
        if self.transcript.focused_id is not None:
            self.action_copy_marked()
        else:
            self.commander.run("/copy")

    def action_branch(self, step: int) -> None:
        if self.session.busy:
            self.hint("an answer is under way; Esc stops it")
            return
        marked = self.transcript.focused_id
        node = self.session.conversation.nodes.get(node_of(marked)) if marked else None
        candidates = [node] if node else [self.session.last_answer(), self.session.last_question()]
        for candidate in candidates:
            if candidate is not None and self.session.walk(candidate.id, step) is not None:
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
            self.panel.changed()
            self._watch_stats()
        elif self.focused is None or self.focused is self.panel:
            self.composer.editor.focus()
        self.figures_changed()

    def action_palette(self) -> None:
        self.app.action_command_palette()

    def action_open_settings(self) -> None:
        self.commander.open_settings()

    def action_open_history(self) -> None:
        self.commander.open_history()

    def action_offer(self, number: int) -> None:
        welcome = self.query_one(Welcome)
        if self.transcript.take_offer(number):
            return
        if welcome.display:
            welcome.take(number)
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
        self.go(self.session.regenerate(question.id if question else None))

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
            self._aside = self.composer.written
        self._editing = node.id
        self._restore_banner()
        self.composer.write(*contract(node.message.content, node.inclusions))

    def leave_editing(self) -> bool:
        """Stop changing a sent message: what was written before stands in the composer again. False where none
        was being changed."""
        if self._editing is None:
            return False
        self._editing, aside, self._aside = None, self._aside, Written()
        self._restore_banner()
        self.composer.write(*aside)
        return True


def _text_of(block: Block) -> str:
    return block.arguments if isinstance(block, ToolCallBlock) else block.text
