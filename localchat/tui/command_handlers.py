"""Handlers of the slash commands of the chat screen."""

import asyncio
import os
import shlex
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from localchat.atomic import write_text
from localchat.chat.conversation import Conversation
from localchat.config.paths import expand_home
from localchat.config.settings import KEYS, find_key
from localchat.config.settings_file import write_setting
from localchat.engine.stats_line import stats_line
from localchat.errors import LocalchatError, ModelMissing, UsageError
from localchat.session.answer_end import take_way_on
from localchat.session.blocks import (
    END_PREFIX,
    OVERFLOW_PREFIX,
    RETRY,
    AnswerBlock,
    Offer,
    UserBlock,
)
from localchat.session.commands import parse
from localchat.session.outcome import AnswerUnderWay
from localchat.tui.attachments import contract, expand
from localchat.tui.background_pull import BackgroundPull
from localchat.tui.guide_answers import ASK_PREFIX
from localchat.tui.widgets.welcome import FETCH_PREFIX
from localchat.units import counted

if TYPE_CHECKING:
    from textual.screen import Screen

    from localchat.fit.memory_plan import MemoryPlan
    from localchat.session.session import ChatSession
    from localchat.tui.transcript.widget import Transcript
    from localchat.tui.widgets.composer import Composer

THINKING: Final = ("auto", "on", "off")

Result = TypeVar("Result")


class ChatActions(Protocol):
    """The part of the chat screen that command handlers use.

    It keeps the handlers free of the screen class, which imports them. Called on the event loop only, apart
    from `call_from_any_thread`.
    """

    session: "ChatSession"

    @property
    def composer(self) -> "Composer": ...

    @property
    def transcript(self) -> "Transcript": ...

    def start_work(self, work: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine of the session; an error becomes a notice."""
        ...

    async def stop_and_wait(self) -> None:
        """Stop the answer under way and wait until it has ended."""
        ...

    def hint(self, text: str) -> None:
        """Show a text above the composer for some seconds."""
        ...

    def copy(self, text: str, what: str) -> None:
        """Copy text to the clipboard; `what` names it in the hint."""
        ...

    def edit(self, id_: str | None) -> None:
        """Put a sent message into the composer; the last question if `id_` is None."""
        ...

    def leave_editing(self) -> bool:
        """Stop changing a sent message. False where none was being changed."""
        ...

    def find(self, text: str) -> None:
        """Open the find bar."""
        ...

    def show_panel(self) -> None:
        """Show the metrics panel."""
        ...

    def status_changed(self) -> None:
        """Update status bar, panel and heading."""
        ...

    def open_dialog(
        self, dialog: "Screen[Result]", closed: Callable[[Result | None], None] | None = None
    ) -> None:
        """Show a screen above the chat; `closed` gets its result."""
        ...

    def use_theme(self, name: str) -> None:
        """Switch to a theme, by its name in the settings."""
        ...

    def terminal_released(self) -> AbstractContextManager[None]:
        """Leave the terminal to another program inside the block, which must not raise."""
        ...

    def reveal_end(self) -> None:
        """Show the end of the conversation, where the result of a command appears."""
        ...

    def reply(self, text: str, offers: Sequence[Offer] = ()) -> None:
        """Show the result of a command where it is seen."""
        ...

    def call_from_any_thread(self, callback: Callable[..., object], *arguments: object) -> None:
        """Call a function on the event loop, unless the program has ended."""
        ...

    def run_action(self, action: str) -> object:
        """Run an action of the screen or the app, as its key does."""
        ...

    def quit(self) -> None:
        """Leave the program."""
        ...


class CommandHandlers:
    """Runs slash commands. A command that is refused becomes a notice."""

    def __init__(self, screen: ChatActions) -> None:
        self._screen = screen
        later = screen.call_from_any_thread
        self._pulls = BackgroundPull(
            screen.session.context,
            lambda text: later(self._show_pull_progress, text),
            lambda name: later(self._pull_finished, name),
            lambda name, problem: later(self._pull_failed, name, problem),
        )

    def run(self, line: str) -> None:
        """Run a line that begins with a slash."""
        try:
            call = parse(line)
            getattr(self, f"_do_{call.command.name}")(call.argument)
        except LocalchatError as problem:
            self.refuse(problem)

    def refuse(self, problem: LocalchatError) -> None:
        """Show an error where it is seen; what only must wait, for some seconds."""
        if isinstance(problem, AnswerUnderWay):
            self._screen.hint(f"{problem.message}; {problem.hint}")
            return
        self._screen.reveal_end()
        self._screen.session.show_error(problem)

    def take_offer(self, action: str) -> None:
        """Do what a notice or the welcome offers."""
        screen = self._screen
        if action == RETRY:
            screen.start_work(screen.session.retry())
        elif action.startswith(END_PREFIX):
            screen.start_work(take_way_on(screen.session, action))
        elif action.startswith(OVERFLOW_PREFIX):
            screen.start_work(screen.session.take_offer(action))
        elif action.startswith(ASK_PREFIX):
            screen.composer.ask(action.removeprefix(ASK_PREFIX))
        elif action.startswith(FETCH_PREFIX):
            name, _, about = action.removeprefix(FETCH_PREFIX).partition(" ")
            self.confirm_pull(name, about)
        else:
            self.run(f"/{action}")

    def run_entry(self, entry: str | None) -> None:
        """Do what an entry of the palette means: see `PaletteEntry.action`."""
        kind, _, rest = (entry or "").partition(" ")
        match kind:
            case "command":
                self.run(rest)
            case "write":
                self._screen.composer.write(rest)
            case "open":
                self.open_conversation(rest)
            case "action":
                self._screen.call_from_any_thread(self._screen.run_action, rest)
            case _:
                pass

    def _refuse_while_busy(self) -> None:
        if self._screen.session.busy:
            raise AnswerUnderWay

    # ------------------------------------------------------------------ models and parameters

    def _do_model(self, name: str) -> None:
        from localchat.tui.screens.models import ModelChoice, ModelScreen
        from localchat.tui.screens.used_models import used_models

        if name:
            self.change(name, {})
            return

        def chosen(choice: ModelChoice | None) -> None:
            if choice is not None and choice.pull:
                self.confirm_pull(choice.name, choice.about)
            elif choice is not None:
                self.change(choice.name, {})

        session = self._screen.session
        read_used = partial(used_models, session.setup.model, session.recorder.history)
        self._screen.open_dialog(ModelScreen(session.context, read_used), chosen)

    def change(self, word: str | None, changes: dict[str, str], done: str = "") -> None:
        """Use another model or other parameters for the next answer. Stops the answer under way if the model
        must be loaded again. `done`: the hint once they are taken."""
        screen = self._screen

        async def change() -> None:
            before = screen.session.setup
            new_setup = screen.session.prepare_change(word, changes)
            if new_setup.reload:
                await screen.stop_and_wait()
            new_setup.apply()
            if done:
                screen.hint(done)
            after = screen.session.setup
            if after.settings.theme != before.settings.theme:
                screen.use_theme(after.settings.theme)
            if after.options != before.options:
                screen.composer.recount()
                if word and after.model != before.model:
                    screen.hint(f"Switched to {after.model.name}")
                await screen.session.wait_until_ready()

        screen.start_work(change())

    def _do_set(self, words: str) -> None:
        from localchat.tui.screens.parameters import ParameterScreen

        if words:
            key, _, value = words.partition(" ")
            key = find_key(key, "/set")
            if not value.strip():
                raise UsageError(f"/set {key} needs a value", hint=f"it takes {KEYS[key].valid}")
            if key in ("model", "remote"):
                self._do_model(f"{'remote:' if key == 'remote' else ''}{value.strip()}")
                return
            self.change(None, {key: value.strip()}, f"{key} = {value.strip()}")
            return

        def chosen(changes: dict[str, str] | None) -> None:
            if changes:
                self.change(None, changes)

        self._screen.open_dialog(ParameterScreen(self._screen.session), chosen)

    def save_setting(self, key: str, value: str) -> None:
        """Write a setting to the file, and use it at once."""
        self.change(None, {key: value})
        try:
            write_setting(self._screen.session.context.paths.settings_file, key, value)
        except LocalchatError as problem:
            self.refuse(problem)

    def _do_think(self, choice: str) -> None:
        choice = choice.lower() or "on"
        if choice not in THINKING:
            raise UsageError(f"/think {choice}: it takes on, off or auto")
        self.change(None, {"think": choice})
        self._screen.hint(f"reasoning: {choice}")

    def _do_tries(self, words: str) -> None:
        from localchat.session.tries import describe, parse_tries

        wanted = self._screen.session.tries.next = parse_tries(words)
        self._screen.hint(describe(wanted))

    def _do_system(self, text: str) -> None:
        session = self._screen.session
        if text:
            session.set_instructions(text)
            self._screen.hint("the instructions are set")
        else:
            self._screen.reply(session.conversation.system or "There are no instructions.")

    def _do_fit(self, word: str) -> None:
        session = self._screen.session

        async def fit() -> None:
            from localchat.fit.report import verdict

            name, plan = await asyncio.to_thread(_planned, session, word)
            self._screen.reply(f"{name}\n" + "\n".join(verdict(plan)))

        self._screen.start_work(fit())

    def _do_pull(self, name: str) -> None:
        self._screen.reveal_end()  # where it will say how it ended
        self._pulls.begin(name, offline=self._screen.session.setup.settings.offline)

    def confirm_pull(self, name: str, about: str) -> None:
        """Ask before a download begins. `about`: its size and what the model is good for."""
        from localchat.tui.screens.confirm import ConfirmScreen

        def closed(confirmed: bool | None) -> None:
            if confirmed:
                self.run(f"/pull {name}")

        text = f"{about}\n\nIt downloads in the background; the chat goes on meanwhile."
        dialog = ConfirmScreen(f"Download {name}?", text.strip(), "Download")
        self._screen.open_dialog(dialog, closed)

    def _show_pull_progress(self, words: str) -> None:
        self._screen.session.status.pulling = words
        self._screen.status_changed()

    def _pull_finished(self, name: str) -> None:
        self._screen.session.notice(
            f"{name} is here.", "info", (Offer(f"chat with {name}", f"model {name}"),)
        )

    def _pull_failed(self, name: str, problem: LocalchatError) -> None:
        hopeless = isinstance(problem, ModelMissing | UsageError)  # the name itself is wrong
        again = () if hopeless else (Offer("resume download", f"pull {name}"),)
        self._screen.session.show_error(problem, again)

    # ------------------------------------------------------------------ the conversation

    def _do_new(self, _: str) -> None:
        self._begin(None)

    def _do_clear(self, _: str) -> None:
        self._begin(self._screen.session.conversation.system)

    def _begin(self, system: str | None) -> None:
        screen = self._screen

        async def begin() -> None:
            await screen.stop_and_wait()
            screen.leave_editing()
            screen.session.start_new(system=system)
            screen.composer.editor.focus()

        screen.start_work(begin())

    def _do_regen(self, _: str) -> None:
        self._refuse_while_busy()
        self._screen.start_work(self._screen.session.regenerate())

    def _do_edit(self, _: str) -> None:
        self._refuse_while_busy()
        self._screen.edit(None)

    def _do_undo(self, _: str) -> None:
        self._refuse_while_busy()
        node = self._screen.session.undo()
        if not self._screen.composer.text:
            self._screen.composer.write(*contract(node.message.content, node.inclusions))

    def _do_compact(self, _: str) -> None:
        self._refuse_while_busy()
        self._screen.start_work(self._screen.session.compact())

    def _do_everything(self, _: str) -> None:
        self._refuse_while_busy()
        self._screen.session.send_everything()
        self._screen.reply("All messages are sent again.")

    def _do_search(self, text: str) -> None:
        self._screen.find(text)

    def _do_copy(self, what: str) -> None:
        transcript = self._screen.transcript
        messages = [each for each in transcript.blocks if isinstance(each, AnswerBlock | UserBlock)]
        answers = [each for each in messages if isinstance(each, AnswerBlock)]
        if what.partition(" ")[0] == "code":
            coded = (transcript.code_blocks(each.id) for each in reversed(answers))
            self._copy_code(next(filter(None, coded), []), what.partition(" ")[2].strip())
        elif not what:
            self._screen.copy(answers[-1].text if answers else "", "last answer")
        elif what.isdecimal() and int(what):
            texts = [each.text for each in messages[-int(what) :]]
            self._screen.copy("\n\n".join(texts), f"last {counted(len(texts), 'message')}")
        else:
            raise UsageError(f"/copy {what}: it takes a number of messages, code, or code N")

    def _copy_code(self, blocks: list[str], number: str) -> None:
        """Copy a code block by the number above it; the last one without a number."""
        if not blocks:
            raise UsageError("/copy code: no answer has a code block yet")
        if number and not (number.isdecimal() and 1 <= int(number) <= len(blocks)):
            raise UsageError(
                f"/copy code {number}: the last answer with code has blocks 1 to {len(blocks)}",
                hint="the number stands above each block",
            )
        at = int(number) if number else len(blocks)
        self._screen.copy(blocks[at - 1], f"code {at} of {len(blocks)}")

    def _do_export(self, name: str) -> None:
        from localchat.chat.export import as_json_text, as_markdown, file_name

        conversation = self._screen.session.conversation
        if not conversation.nodes:
            raise UsageError("there is nothing to export: the conversation is empty")
        path = expand_home(name or file_name(conversation)).absolute()
        text = as_json_text(conversation) if path.suffix == ".json" else as_markdown(conversation)
        try:
            if path.exists():
                raise UsageError(f"{path} exists already", hint="give another name: /export NAME")
            write_text(path, text)
        except OSError as problem:
            raise LocalchatError(f"{path} cannot be written: {problem.strerror}") from problem
        self._screen.reply(f"Written to {path}.")

    def _do_stats(self, _: str) -> None:
        node = self._screen.session.last_answer()
        if node is None or node.metrics is None or node.metrics.done is None:
            self._screen.reply("There are no metrics of an answer yet.")
        else:
            self._screen.reply(stats_line(node.metrics.done))
        self._screen.show_panel()

    # ------------------------------------------------------------------ screens

    def _do_help(self, _: str) -> None:
        from localchat.tui.screens.help import HelpScreen

        self._screen.open_dialog(HelpScreen(self._screen.session.context.keys))

    def _do_history(self, _: str) -> None:
        self.open_history()

    def _do_quit(self, _: str) -> None:
        self._screen.quit()

    def open_settings(self) -> None:
        """Show the settings file as a screen, and apply what was changed there."""
        from localchat.tui.screens.settings import SettingsScreen

        def closed(changed: dict[str, str | None] | None) -> None:
            if not changed:
                return
            if theme := changed.get("theme"):
                self._screen.use_theme(theme)
            for key in changed:  # what /set said before
                self._screen.session.changes.pop(key, None)
            self.change(None, {})  # everything else is resolved anew, also where a key is gone

        self._screen.open_dialog(SettingsScreen(self._screen.session), closed)

    def open_history(self) -> None:
        """List all conversations, and resume the chosen one."""
        from localchat.tui.screens.history import HistoryScreen

        recorder = self._screen.session.recorder
        if recorder.history is None:
            self._screen.hint("the history is not open yet")
            return

        def chosen(id_: str | None) -> None:
            if id_ is not None:
                self.open_conversation(id_)

        self._screen.open_dialog(HistoryScreen(recorder.history, recorder.flush), chosen)

    def open_conversation(self, id_: str) -> None:
        """Resume a conversation of the history."""
        self._screen.start_work(self._resume(id_))

    async def _resume(self, id_: str) -> None:
        session = self._screen.session
        assert session.recorder.history is not None
        if id_ == session.conversation.id:  # its last words may be on their way to the disk
            await self._screen.stop_and_wait()
            await asyncio.to_thread(session.recorder.flush)
        conversation = await asyncio.to_thread(session.recorder.history.load, id_)
        await self._screen.stop_and_wait()
        self.resume(conversation)

    def resume(self, conversation: Conversation) -> None:
        """Show a conversation and continue it with the current model."""
        screen = self._screen
        screen.session.resume(conversation)
        screen.leave_editing()
        screen.composer.sent = [
            contract(node.message.content, node.inclusions)
            for node in conversation.path()
            if node.message.role == "user"
        ]
        screen.composer.editor.focus()

    # ------------------------------------------------------------------ external editor

    async def write_in_editor(self) -> None:
        """Edit the message in $VISUAL or $EDITOR. The answer under way goes on meanwhile."""
        screen = self._screen
        environ = screen.session.context.environ
        command = environ.get("VISUAL") or environ.get("EDITOR") or "vi"
        text, _ = expand(screen.composer.text, screen.composer.attachments)
        handle, name = tempfile.mkstemp(suffix=".md", prefix="localchat-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            words = shlex.split(command)
            with screen.terminal_released():
                status = await _run_program([*words, name])
            if isinstance(status, OSError):
                raise status
            written = Path(name).read_text(encoding="utf-8", errors="replace").rstrip("\n")
        except (OSError, ValueError) as problem:
            why = (isinstance(problem, OSError) and problem.strerror) or problem
            message = f"the editor {command} cannot be started: {why}"
            self.refuse(UsageError(message, hint="set EDITOR"))
            return
        finally:
            Path(name).unlink(missing_ok=True)
        if status == 0:
            screen.composer.replace_text(written)
        else:
            screen.hint(f"{command} ended with {status}; the message is as it was")


def _planned(session: "ChatSession", word: str) -> "tuple[str, MemoryPlan]":
    """Name and memory plan of a model that is here or in the catalogue; of the one in use without a word.

    Raises LocalchatError.
    """
    context = session.context
    try:
        setup = context.resolve(word or session.setup.model.word, session.changes)
    except ModelMissing as missing:
        try:
            estimate = context.estimate(word)
        except LocalchatError:
            estimate = None
        if estimate is None:
            raise missing from None
        return word, estimate.plan
    return setup.model.name, context.plan(setup, setup.options.load)


async def _run_program(words: Sequence[str]) -> int | OSError:
    """Run a program and return its exit status. An error is returned, not raised: see `terminal_released`."""
    try:
        process = await asyncio.create_subprocess_exec(*words)
    except OSError as problem:
        return problem
    return await process.wait()
