"""The Textual application: themes, global keys, start and exit."""

import asyncio
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from textual import events
from textual.app import App
from textual.binding import BindingType
from textual.screen import Screen
from textual.widgets import Input, TextArea
from textual.worker import Worker

from localchat import gc_control
from localchat.chat.conversation import Conversation
from localchat.errors import ExitCode, LocalchatError
from localchat.models.resolve import GUIDE
from localchat.session.context import ModelSetup, SessionContext
from localchat.session.engine_holder import EngineHolder
from localchat.session.recorder import ConversationRecorder
from localchat.session.session import ChatSession
from localchat.tui import clipboard
from localchat.tui.attachments import ComposerText, clean
from localchat.tui.consent import ScreenConsent
from localchat.tui.early_keys import EarlyKeys
from localchat.tui.keymap import bindings, key_names, validate_keymap
from localchat.tui.pictures.painter import PicturePainter
from localchat.tui.pictures.protocol import cell_size, picture_protocol
from localchat.tui.screens.chat import ChatScreen
from localchat.tui.textual_internals.driver import (
    can_suspend,
    is_invisible_character,
    terminal_writer,
)
from localchat.tui.themes import AUTO, NAMES, THEMES, is_light_terminal, textual_name
from localchat.tui.widgets.welcome import first_greeting

if TYPE_CHECKING:
    from rich.console import RenderableType

    from localchat.history.store import History
    from localchat.tui.textual_internals.background import Background

EXIT_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)
_DOUBLE_PRESS_S = 2.0
_QUIT_WAIT_S = 2.0
_SEARCH_SHOWN_AFTER_S = 0.4
_OFFLINE: Final = "Offline: the list of models shows what fits this computer."


class ChatApp(App[int]):
    """Chat app with a new or resumed conversation."""

    TITLE = "localchat"
    # Textual does not load the style sheet of the default screen.
    CSS_PATH: ClassVar = ["app.tcss", "screens/chat.tcss"]
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("app")]
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (60, "-middle")]  # noqa: RUF012 - textual's own form; for dialogs
    VERTICAL_BREAKPOINTS = [(0, "-flat"), (16, "-high")]  # noqa: RUF012 - the same
    ENABLE_COMMAND_PALETTE = False

    def __init__(
        self,
        context: SessionContext,
        setup: ModelSetup,
        engines: EngineHolder,
        conversation: Conversation,
    ) -> None:
        super().__init__()
        self._session_context = context
        self._engines = engines
        self._last_interrupt_s = float("-inf")
        self._last_key = ""
        self._first_frame_shown = self._leave_requested = self._is_leaving = False
        self._early_keys = EarlyKeys(self, self._forward)
        for theme in THEMES:
            self.register_theme(theme)
        self._is_light_terminal = is_light_terminal(context.environ)
        self._has_automatic_theme = False
        self.action_use_theme(setup.settings.theme)
        self._css_variables = self.get_css_variables()
        self.stylesheet.set_variables(self._css_variables)
        if setup.settings.reduced_motion:
            self.animation_level = "none"
        self.recorder = ConversationRecorder()
        self.chat = ChatScreen(
            lambda view: ChatSession(context, engines, setup, view, self.recorder, conversation)
        )
        self.session = self.chat.session
        self.session.tools.consent = ScreenConsent(self)
        self._keymap_error: LocalchatError | None = None
        try:
            self.set_keymap(validate_keymap(context.keys))
        except LocalchatError as problem:
            self._keymap_error = problem

    def refresh_css(self, animate: bool = True) -> None:
        """Parse the sheets again only if the colours changed. Textual also does so at its start, for the
        theme they were parsed with: a tenth of the time to the first frame."""
        variables = self.get_css_variables()
        if variables != self._css_variables:
            self._css_variables = variables
            super().refresh_css(animate)

    def get_default_screen(self) -> Screen[None]:
        return self.chat

    async def on_event(self, event: events.Event) -> None:
        """Paste characters that widgets reject as keys, and buffer keys until a screen is ready."""
        if isinstance(event, events.Key) and is_invisible_character(event.character):
            event = events.Paste(event.character or "")
        if isinstance(event, events.Key | events.Paste) and not event.is_forwarded:
            self._disarm_quit(event)
            if not self._early_keys.hold(event):
                await self._forward(event)
        else:
            await super().on_event(event)

    def _disarm_quit(self, event: events.Key | events.Paste) -> None:
        """Forget the first Ctrl+C if another key or a paste follows."""
        key = ""
        if isinstance(event, events.Key):
            key = event.key
        if key != self._last_key:
            self._last_interrupt_s = float("-inf")
        self._last_key = key

    async def _forward(self, event: events.Event) -> None:
        """Handle a key or a paste. No control character of a paste reaches a field, and no line end."""
        if isinstance(event, events.Paste):
            text = clean(event.text)
            if "\n" in text and isinstance(self.screen.focused, Input):
                text = " ".join(filter(None, map(str.strip, text.split("\n"))))
            event = events.Paste(text)
        await super().on_event(event)

    def panic(self, *renderables: "RenderableType") -> None:
        """Exit after an unhandled error, with an exit code that reports it."""
        self.exit(ExitCode.ERROR, return_code=ExitCode.ERROR)
        super().panic(*renderables)

    def exit(
        self,
        result: int | None = None,
        return_code: int = 0,
        message: "RenderableType | None" = None,
    ) -> None:
        """Exit. The code of an earlier error stays."""
        super().exit(result, return_code or self.return_code or 0, message)

    def on_mount(self) -> None:
        loop = asyncio.get_running_loop()
        for number in EXIT_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self.leave)
        self.app_resume_signal.subscribe(self, lambda _: self.refresh(layout=True))
        self.chat.call_after_refresh(self._after_first_frame)

    def _after_first_frame(self) -> None:
        self._first_frame_shown = True
        if self._leave_requested:
            self.leave()
        else:
            # A worker, because quitting waits for the screen's own messages and cancels workers.
            self.run_worker(self._complete_start(), group="start")

    async def _complete_start(self) -> None:
        """Do everything that the first frame does not need."""
        from localchat.tui.daemon_threads import DaemonThreads

        loop = asyncio.get_running_loop()
        loop.set_default_executor(DaemonThreads())
        session = self.session
        chat = self.chat
        if session.setup.settings.reduced_motion:
            chat.composer.editor.cursor_blink = False
        remark = partial(session.remark, passing=True)
        self._engines.listen(lambda text: _call_soon(loop, remark, text))
        self._engines.open(
            session.setup.open_engine
        )  # not earlier: its process competes for the cores
        self.run_worker(session.wait_until_ready(), group="start")
        chat.talk.make_painter = self._picture_painter
        chat.composer.count_tokens = self._count_tokens
        chat.composer.documents = session.context.library.names
        chat.composer.prompt_commands = session.tools.prompt_commands
        if self._keymap_error is not None:
            session.show_error(self._keymap_error)
        for notice in session.context.notices:
            session.notice(notice, "warning")
        if session.conversation.nodes:
            chat.resume(session.conversation)
        await self._open_history()
        await asyncio.to_thread(_load_transcript)
        _ = chat.transcript  # so that no answer waits for it
        gc_control.resume_gc()
        await self._greet()
        await asyncio.to_thread(_load_highlighter)

    async def _greet(self) -> None:
        from localchat.tui.widgets.welcome import Welcome

        welcome = next(iter(self.chat.query(Welcome)), None)
        if welcome is None:  # the screen is closed already
            return
        if self.session.setup.model.word != GUIDE or self.session.conversation.nodes:
            return
        plain = welcome.greeting
        first_run = None
        search = asyncio.create_task(asyncio.to_thread(self._session_context.first_run))
        done, _ = await asyncio.wait((search,), timeout=_SEARCH_SHOWN_AFTER_S)
        if not done:
            welcome.set_greeting(plain._replace(searching=True))
        try:
            first_run = await search
        except LocalchatError as problem:
            self.session.show_error(problem)
        if first_run is not None:
            welcome.set_greeting(first_greeting(first_run))
        elif self.session.setup.settings.offline:
            welcome.set_greeting(plain._replace(lines=(*plain.lines, _OFFLINE)))
        else:
            welcome.set_greeting(plain)

    async def _open_history(self) -> None:
        try:
            history = await asyncio.to_thread(
                _read_history,
                self._session_context.history_file,
                self._session_context.paths.kv_dir,
            )
            if history.notice:
                self.session.notice(history.notice, "warning")
            self.recorder.attach(history)
            draft = self.recorder.kept_draft()
            if draft and not self.chat.composer.text:
                self.chat.composer.write(draft)
            elif draft:  # typed before the history was open
                self.chat.composer.sent.append(ComposerText(draft))  # the up key brings it back
        except LocalchatError as problem:
            self.recorder.fail(problem)
            self.session.show_error(problem)

    async def action_open_history(self) -> None:
        """Open the history again, such as after the user has made room on the disk."""
        await self._open_history()
        if self.recorder.history is not None:
            self.chat.action_history()

    def _picture_painter(self) -> PicturePainter:
        settings = self.session.setup.settings
        environ = self._session_context.environ
        protocol = picture_protocol(settings.pictures, environ, color=settings.color)
        # Textual draws on stderr.
        return PicturePainter(protocol, cell_size(2), terminal_writer(self))

    async def _count_tokens(self, text: str) -> int:
        engine = await self.session.engine()
        return len(await asyncio.to_thread(engine.tokenize, text))

    # ------------------------------------------------------------------ themes and settings

    def action_use_theme(self, name: str) -> None:
        """Switch to a theme, by its name in the settings."""
        self._has_automatic_theme = name == AUTO
        self.theme = textual_name(name, is_light=self._is_light_terminal)

    def terminal_background(self, background: "Background") -> None:
        """Follow the terminal's background if no theme is chosen. May be called from any thread."""
        self.call_later(self._follow_background, background.is_light)

    def _follow_background(self, is_light: bool) -> None:
        self._is_light_terminal = is_light
        if self._has_automatic_theme:
            self.action_use_theme(AUTO)

    def action_theme(self) -> None:
        """Switch to the next theme."""
        self._has_automatic_theme = False
        ours = [textual_name(name) for name in NAMES]
        index = 0
        if self.theme in ours:
            index = (ours.index(self.theme) + 1) % len(ours)
        self.theme = ours[index]
        self.chat.hint(f"Theme: {NAMES[index]}, F2 to save")

    # ------------------------------------------------------------------ copying and leaving

    async def action_interrupt(self) -> None:
        """Copy the selection, close a dialog, stop the answer, clear the draft, or quit.

        The first action that applies is taken. Only a second press quits.
        """
        if text := self._selected():
            self.chat.copy(text, "selection")
            self.screen.clear_selection()
            return
        if self.screen is not self.chat:
            self.simulate_key("escape")
            return
        now = time.monotonic()
        is_second = now - self._last_interrupt_s < _DOUBLE_PRESS_S
        self._last_interrupt_s = now
        if is_second and not self.chat.has_draft:
            await self.action_quit()
        elif not is_second and self.session.stop():
            action = "quits"
            if self.chat.has_draft:
                action = "clears the message"
            self.chat.hint(f"Stopped; Ctrl+C again {action}")
        elif self.chat.clear_draft():
            self._last_interrupt_s = float("-inf")
            undo = key_names("composer.undo", self._session_context.keys).partition(", ")[0]
            self.chat.hint(f"Cleared; Up or {undo} brings it back")
        elif self.recorder.trouble is not None or self._session_context.history_file is None:
            self.chat.hint("Ctrl+C again to quit; this conversation is not saved")
        else:
            self.chat.hint("Ctrl+C again to quit; everything is saved")

    def action_suspend(self) -> None:
        """Go back to the shell, whose `fg` shows the screen again."""
        if can_suspend(self):
            self.action_suspend_process()
        else:
            self.chat.hint("There is no shell to go back to; Ctrl+Q quits")

    def _selected(self) -> str:
        focused = self.screen.focused
        if isinstance(focused, Input | TextArea) and focused.selected_text:
            return focused.selected_text
        return self.screen.get_selected_text() or ""

    def copy_to_clipboard(self, text: str) -> None:
        """Copy text of Textual's own widgets in the same way as ours."""
        clipboard.send(text, terminal_writer(self), self._session_context.environ)

    async def action_quit(self) -> None:
        """Stop and save the answer under way, and exit."""
        self.leave()

    def leave(self) -> None:
        """Quit; before the first frame, once it is shown."""
        self._leave_requested = True
        if self._first_frame_shown and not self._is_leaving:
            self._is_leaving = True
            self.run_worker(self._leave(), group="leave")

    async def _leave(self) -> None:
        """Stop the answer, and exit once nothing works for the screen any more: what ended later would find
        widgets that are closed."""
        self.chat.is_leaving = True
        self.session.stop()
        others = [worker for worker in self.workers if worker.group != "leave"]
        await asyncio.sleep(0)  # lets the last of them begin: Python warns of what never ran
        await _ended(worker for worker in others if worker.group == "session")
        for worker in others:
            worker.cancel()
        await _ended(others)
        self.exit(0)


async def _ended(workers: Iterable[Worker[object]]) -> None:
    """Wait until workers have ended, however they do, for two seconds at most."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_QUIT_WAIT_S):
            await asyncio.gather(*(worker.wait() for worker in workers), return_exceptions=True)


def _load_transcript() -> None:
    # Imports what the first question needs, and the first frame does not.
    from localchat.session import answer_builder, documents  # noqa: F401
    from localchat.tui.transcript import widget  # noqa: F401
    from localchat.tui.transcript.markdown import parser

    parser.load()


def _load_highlighter() -> None:
    from localchat.tui.transcript.markdown import code

    code.load()


def _read_history(path: Path | None, kv_folder: Path) -> "History":
    from localchat.history.store import (
        History,  # imports sqlite3, which the first frame does not need
    )

    return History.open(path, kv_folder)


def _call_soon(
    loop: asyncio.AbstractEventLoop, callback: Callable[[str], object], text: str
) -> None:
    """Call a function on the event loop from a thread of the engine."""
    with suppress(RuntimeError):  # the loop is closed: the program ends
        loop.call_soon_threadsafe(callback, text)
