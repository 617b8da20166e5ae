"""The application: themes, the keys that hold everywhere, and the way in and out."""

import asyncio
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual import events
from textual.app import App, SystemCommand
from textual.binding import BindingType
from textual.screen import Screen
from textual.widgets import Input, TextArea

from localchat import gc_control
from localchat.chat.conversation import Conversation
from localchat.errors import LocalchatError
from localchat.models.resolve import GUIDE
from localchat.session.commands import COMMANDS
from localchat.session.context import ModelSetup, SessionContext
from localchat.session.engine_holder import EngineHolder
from localchat.session.recorder import ConversationRecorder
from localchat.session.session import ChatSession
from localchat.tui import clipboard
from localchat.tui.keymap import KEYS, bindings, validate_keymap
from localchat.tui.launch import EXIT_SIGNALS
from localchat.tui.screens.chat import ChatScreen
from localchat.tui.textual_internals.driver import is_invisible_character
from localchat.tui.themes import NAMES, THEMES, textual_name
from localchat.tui.widgets.welcome import first_greeting, greeting

if TYPE_CHECKING:
    from localchat.history.store import History

_DOUBLE_PRESS_S = 2.0
_QUIT_WAIT_S = 2.0


class ChatApp(App[int]):
    """One chat, in a conversation that is new or goes on."""

    TITLE = "localchat"
    CSS_PATH: ClassVar = [
        "app.tcss",
        "screens/chat.tcss",
    ]  # Textual loads none for a default screen
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("app")]
    COMMAND_PALETTE_BINDING = "f24"  # ours is in the registry; this one is on no keyboard

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
        self._first_frame_shown = self._leave_requested = False
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = textual_name(setup.settings.theme)
        self._css_variables = self.get_css_variables()
        self.stylesheet.set_variables(self._css_variables)
        if setup.settings.reduced_motion:
            self.animation_level = "none"
        self.chat = ChatScreen()
        self.recorder = ConversationRecorder()
        self.session = ChatSession(
            context, engines, setup, self.chat.view, self.recorder, conversation
        )
        self.chat.session = self.session
        self.trouble: LocalchatError | None = None
        try:
            self.set_keymap(validate_keymap(context.keys))
        except LocalchatError as problem:
            self.trouble = problem

    def refresh_css(self, animate: bool = True) -> None:
        """Read the sheets again where the colours are other ones. Textual does so at its start for the theme
        that they were read with already, a tenth of the way to the first frame."""
        variables = self.get_css_variables()
        if variables != self._css_variables:
            self._css_variables = variables
            super().refresh_css(animate)

    def get_default_screen(self) -> Screen[None]:
        return self.chat

    async def on_event(self, event: events.Event) -> None:
        """A letter that no widget would take as a key is pasted."""
        if isinstance(event, events.Key) and is_invisible_character(event.character):
            event = events.Paste(event.character or "")
        await super().on_event(event)

    def on_mount(self) -> None:
        loop = asyncio.get_running_loop()
        for number in EXIT_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self.leave)
        self.chat.call_after_refresh(self._after_first_frame)

    async def _after_first_frame(self) -> None:
        """What the first frame did not wait for."""
        self._first_frame_shown = True
        if self._leave_requested:
            self.leave()
            return
        loop = asyncio.get_running_loop()
        session, chat = self.session, self.chat
        if session.setup.settings.reduced_motion:
            chat.composer.editor.cursor_blink = False
        self._engines.listen(lambda text: _call_soon(loop, session.notice, text))
        self._engines.open(session.setup.open_engine)  # its process would compete for the cores
        self.run_worker(session.wait_until_ready(), group="session")
        chat.composer.count_tokens = self._count_tokens
        if self.trouble is not None:
            session.show_error(self.trouble)
        if session.conversation.nodes:
            chat.commands.resume(session.conversation)
        await self._open_history()
        await asyncio.to_thread(_load_markdown)
        gc_control.resume_gc()
        await self._greet()
        await asyncio.to_thread(_load_highlighter)

    async def _greet(self) -> None:
        from localchat.tui.widgets.welcome import Welcome

        welcome = self.chat.query_one(Welcome)
        welcome.set_greeting(*greeting(self.session.setup))
        if self.session.setup.model.word != GUIDE or self.session.conversation.nodes:
            return
        try:
            found = await asyncio.to_thread(self._session_context.first_run)
        except LocalchatError as problem:
            self.session.show_error(problem)
            return
        if found is not None:
            welcome.set_greeting(*first_greeting(found))

    async def _open_history(self) -> None:
        try:
            history = await asyncio.to_thread(_read_history, self._session_context.history_file)
            if history.notice:
                self.session.notice(history.notice, "warning")
            self.recorder.attach(history)
            draft = self.recorder.kept_draft()
            if draft and not self.chat.composer.text:
                self.chat.composer.write(draft)
        except LocalchatError as problem:
            self.session.show_error(problem)

    async def _count_tokens(self, text: str) -> int:
        engine = await self.session.engine()
        return len(await asyncio.to_thread(engine.tokenize, text))

    # ------------------------------------------------------------------ themes and settings

    def action_theme(self) -> None:
        """The next theme."""
        ours = [textual_name(name) for name in NAMES]
        at = ours.index(self.theme) if self.theme in ours else -1
        self.theme = ours[(at + 1) % len(ours)]
        self.chat.hint(f"theme: {NAMES[(at + 1) % len(ours)]} (F2 keeps it)")

    def settings_changed(self, changed: Mapping[str, str | None]) -> None:
        """The settings file was written: what it says holds from now on, also where a key is gone."""
        if theme := changed.get("theme"):
            self.theme = textual_name(theme)
        self.chat.commands.change(None, {})

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """What the palette offers: the commands, and what only keys do."""
        for command in COMMANDS:
            if not command.needs:
                yield SystemCommand(
                    f"/{command.name}",
                    command.about,
                    lambda line=f"/{command.name}": self.chat.commands.run(line),
                )
        for key in KEYS:
            if key.scope in ("chat", "app") and not key.id.startswith(("offer.", "view.", "chat.")):
                yield SystemCommand(
                    key.about,
                    key.id,
                    lambda action=key.action: self.chat.call_later(self.chat.run_action, action),
                )

    # ------------------------------------------------------------------ copying and leaving

    async def action_interrupt(self) -> None:
        """Ctrl+C: copy what is selected, else stop the answer, else leave when it comes twice."""
        text = self._selected()
        if text:
            self.chat.copy(text, "selection")
            self.screen.clear_selection()
            return
        now = time.monotonic()
        twice, self._last_interrupt_s = now - self._last_interrupt_s < _DOUBLE_PRESS_S, now
        if twice:
            await self.action_quit()
        elif self.session.stop():
            self.chat.hint("stopped; Ctrl+C again leaves")
        else:
            self.chat.hint("Ctrl+C again leaves; everything is kept")

    def _selected(self) -> str:
        focused = self.screen.focused
        if isinstance(focused, Input | TextArea) and focused.selected_text:
            return focused.selected_text
        return self.screen.get_selected_text() or ""

    def copy_to_clipboard(self, text: str) -> None:
        """Text that a widget of Textual copies goes the same way as ours."""
        driver = self._driver
        if driver is not None:
            clipboard.send(text, driver.write, self._session_context.environ)

    async def action_quit(self) -> None:
        """Leave: what is under way is stopped and kept."""
        end = time.monotonic() + _QUIT_WAIT_S
        self.session.stop()
        while self.session.busy and time.monotonic() < end:
            await asyncio.sleep(0.01)
        self.exit(0)

    def leave(self) -> None:
        """What a signal does that ends the program: leave, once the screen stands."""
        self._leave_requested = True
        if self._first_frame_shown:
            self.run_worker(self.action_quit(), group="leave", exclusive=True)


def _load_markdown() -> None:
    # markdown-it, which the first frame does not wait for.
    from localchat.tui.transcript.markdown import parser

    parser.load()


def _load_highlighter() -> None:
    from localchat.tui.transcript.markdown import code

    code.load()


def _read_history(path: Path | None) -> "History":
    from localchat.history.store import History  # sqlite3, which the first frame does not wait for

    return History.open(path)


def _call_soon(loop: asyncio.AbstractEventLoop, say: Callable[[str], object], text: str) -> None:
    """From a thread of the engine to the event loop, unless the program ends."""
    with suppress(RuntimeError):  # the loop is closed: nobody reads any more
        loop.call_soon_threadsafe(say, text)
