"""What each slash command does on the chat screen."""

import asyncio
import os
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from localchat.atomic import write_text
from localchat.chat.conversation import Conversation
from localchat.config.settings import KEYS, check_key
from localchat.engine.stats_line import stats_line
from localchat.errors import LocalchatError, ModelMissing, UsageError
from localchat.session.blocks import AnswerBlock, UserBlock
from localchat.session.commands import parse
from localchat.tui.attachments import contract, expand
from localchat.tui.background_pull import BackgroundPull
from localchat.tui.textual_internals.driver import interrupts_ignored
from localchat.tui.themes import textual_name

if TYPE_CHECKING:
    from localchat.tui.screens.chat import ChatScreen

THINKING = ("auto", "on", "off")


class CommandHandlers:
    """Runs commands of one screen. What is wrong with one becomes a notice."""

    def __init__(self, screen: "ChatScreen") -> None:
        self._screen = screen
        self._pulls = BackgroundPull(
            screen.session.context,
            lambda words: self._call_from_thread(self._show_pull_progress, words),
            lambda name: self._call_from_thread(self._pull_finished, name),
            lambda name, problem: self._call_from_thread(self._pull_failed, name, problem),
        )

    def run(self, line: str) -> None:
        """Do what a line that begins with a slash says."""
        try:
            call = parse(line)
            getattr(self, f"_do_{call.command.name}")(call.argument)
        except LocalchatError as problem:
            self._screen.session.show_error(problem)

    def _refuse_while_busy(self) -> None:
        if self._screen.session.busy:
            raise UsageError("an answer is under way", hint="Esc stops it")

    # ------------------------------------------------------------------ models and parameters

    def _do_model(self, name: str) -> None:
        from localchat.tui.screens.models import ModelChoice, ModelScreen

        if name:
            self.change(name, {})
            return

        def picked(pick: ModelChoice | None) -> None:
            if pick is not None and pick.pull:
                self.run(f"/pull {pick.name}")
            elif pick is not None:
                self.change(pick.name, {})

        self._screen.app.push_screen(ModelScreen(self._screen.session.context), picked)

    def change(self, word: str | None, changes: dict[str, str]) -> None:
        """Another model or other parameters, from the next answer on; an answer under way is stopped."""
        screen = self._screen

        async def change() -> None:
            before = screen.session.setup
            wanted = screen.session.prepare_change(word, changes)
            if wanted.reload:
                await screen.settle_down()
            wanted.apply()
            after = screen.session.setup
            if after.settings.theme != before.settings.theme:
                screen.app.theme = textual_name(after.settings.theme)
            if after.options != before.options:
                screen.composer.recount()
                if after.model != before.model:
                    screen.hint(f"{after.model.name} answers from now on")
                await screen.session.wait_until_ready()

        screen.start_work(change())

    def _do_set(self, words: str) -> None:
        from localchat.tui.screens.parameters import ParameterScreen

        if words:
            key, _, value = words.partition(" ")
            key = key.replace("-", "_")
            check_key(key, "/set")
            if not value.strip():
                raise UsageError(f"/set {key} needs a value", hint=f"it takes {KEYS[key].valid}")
            if key in ("model", "remote"):
                self._do_model(f"{'remote:' if key == 'remote' else ''}{value.strip()}")
                return
            self.change(None, {key: value.strip()})
            self._screen.hint(f"{key} = {value.strip()}")
            return

        def chosen(changes: dict[str, str] | None) -> None:
            if changes:
                self.change(None, changes)

        self._screen.app.push_screen(ParameterScreen(self._screen.session), chosen)

    def _do_think(self, choice: str) -> None:
        choice = choice.lower() or "on"
        if choice not in THINKING:
            raise UsageError(f"/think {choice}: it takes on, off or auto")
        self.change(None, {"think": choice})
        self._screen.hint(f"reasoning: {choice}")

    def _do_system(self, text: str) -> None:
        session = self._screen.session
        if text:
            session.set_instructions(text)
            self._screen.hint("the instructions are set")
        else:
            session.notice(session.conversation.system or "There are no instructions.")

    def _do_fit(self, word: str) -> None:
        session = self._screen.session

        async def fit() -> None:
            from localchat.fit.report import verdict

            setup = session.context.resolve(word or session.setup.model.word, session.changes)
            plan = await asyncio.to_thread(session.context.plan, setup, setup.options.load)
            session.notice(f"{setup.model.name}\n" + "\n".join(verdict(plan)))

        self._screen.start_work(fit())

    def _do_pull(self, name: str) -> None:
        self._pulls.begin(name, offline=self._screen.session.setup.settings.offline)

    def _show_pull_progress(self, words: str) -> None:
        self._screen.session.status.pulling = words
        self._screen.status_changed()

    def _pull_finished(self, name: str) -> None:
        from localchat.session.blocks import Offer

        self._screen.session.notice(
            f"{name} is here.", "info", (Offer(f"chat with {name}", f"model {name}"),)
        )

    def _pull_failed(self, name: str, problem: LocalchatError) -> None:
        from localchat.session.blocks import Offer

        hopeless = isinstance(problem, ModelMissing | UsageError)  # the name itself is wrong
        again = () if hopeless else (Offer("go on with it", f"pull {name}"),)
        self._screen.session.show_error(problem, again)

    def _call_from_thread(self, what: object, *arguments: object) -> None:
        """From a thread to the screen; a program that has ended meanwhile hears nothing."""
        app = self._screen.app
        if app.is_running:
            app.call_later(what, *arguments)  # type: ignore[arg-type]

    # ------------------------------------------------------------------ the conversation

    def _do_new(self, _: str) -> None:
        self._begin(None)

    def _do_clear(self, _: str) -> None:
        self._begin(self._screen.session.conversation.system)

    def _begin(self, system: str | None) -> None:
        screen = self._screen

        async def begin() -> None:
            await screen.settle_down()
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

    def _do_search(self, text: str) -> None:
        from localchat.tui.widgets.find_bar import FindBar

        screen = self._screen
        finder = screen.query_one(FindBar)
        finder.search, finder.step = screen.transcript.mark, screen.transcript.next_mark
        finder.open(text)

    def _do_copy(self, what: str) -> None:
        transcript = self._screen.transcript
        said = [each for each in transcript.blocks if isinstance(each, AnswerBlock | UserBlock)]
        answers = [each for each in said if isinstance(each, AnswerBlock)]
        if what == "code":
            code = [one for each in answers for one in transcript.code_blocks(each.id)]
            self._screen.copy(code[-1] if code else "", "code")
        elif not what:
            self._screen.copy(answers[-1].text if answers else "", "last answer")
        elif what.isdigit() and int(what):
            texts = [each.text for each in said[-int(what) :]]
            self._screen.copy("\n\n".join(texts), f"last {len(texts)} messages")
        else:
            raise UsageError(f"/copy {what}: it takes a number of messages, or code")

    def _do_export(self, name: str) -> None:
        from localchat.chat.export import as_json_text, as_markdown

        conversation = self._screen.session.conversation
        if not conversation.nodes:
            raise UsageError("there is nothing to export: nothing was said yet")
        path = Path(name or f"{conversation.id[:12]}.md").expanduser().absolute()
        if path.exists():
            raise UsageError(f"{path} exists already", hint="give another name: /export NAME")
        text = as_json_text(conversation) if path.suffix == ".json" else as_markdown(conversation)
        try:
            write_text(path, text)
        except OSError as problem:
            raise LocalchatError(f"{path} cannot be written: {problem.strerror}") from problem
        self._screen.session.notice(f"Written to {path}.")

    def _do_stats(self, _: str) -> None:
        node = self._screen.session.last_answer()
        done = node.figures.done if node is not None and node.figures is not None else None
        self._screen.session.notice(stats_line(done) if done else "There are no figures yet.")
        if not self._screen.panel.display:
            self._screen.action_panel()

    # ------------------------------------------------------------------ screens

    def _do_help(self, _: str) -> None:
        from localchat.tui.screens.help import HelpScreen

        self._screen.app.push_screen(HelpScreen(self._screen.session.context.keys))

    def _do_quit(self, _: str) -> None:
        self._screen.run_worker(self._screen.app.run_action("quit"))

    def open_settings(self) -> None:
        """The settings file as a screen; what was changed there holds at once where that is possible."""
        from localchat.tui.screens.settings import SettingsScreen

        def closed(changed: dict[str, str | None] | None) -> None:
            if changed:
                self._screen.app.settings_changed(changed)  # type: ignore[attr-defined]

        self._screen.app.push_screen(SettingsScreen(self._screen.session), closed)

    def open_history(self) -> None:
        """All conversations; the chosen one goes on."""
        from localchat.tui.screens.history import HistoryScreen

        history = self._screen.session.recorder.history
        if history is None:
            self._screen.hint("the history is not open yet")
            return

        def chosen(id_: str | None) -> None:
            if id_ is not None:
                self._screen.start_work(self._resume(id_))

        self._screen.app.push_screen(HistoryScreen(history), chosen)

    async def _resume(self, id_: str) -> None:
        history = self._screen.session.recorder.history
        assert history is not None
        conversation = await asyncio.to_thread(history.load, id_)
        await self._screen.settle_down()
        self.resume(conversation)

    def resume(self, conversation: Conversation) -> None:
        """Show a conversation and go on with it, by the model that answers now."""
        screen = self._screen
        screen.session.resume(conversation)
        screen.leave_editing()
        screen.composer.sent = [
            contract(node.message.content, node.inclusions)
            for node in conversation.path()
            if node.message.role == "user"
        ]
        screen.composer.editor.focus()

    # ------------------------------------------------------------------ the person's own editor

    async def write_in_editor(self) -> None:
        """Write the message in $VISUAL or $EDITOR. The answer under way goes on meanwhile."""
        screen = self._screen
        environ = screen.session.context.environ
        command = environ.get("VISUAL") or environ.get("EDITOR") or "vi"
        text, _ = expand(screen.composer.text, screen.composer.attachments)
        handle, name = tempfile.mkstemp(suffix=".md", prefix="localchat-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            words = shlex.split(command)
            # Without batch_update the program hangs after thirty writes to a screen nobody reads.
            with screen.app.suspend(), screen.app.batch_update(), interrupts_ignored():
                status = await _run_program([*words, name])
            if isinstance(status, OSError):
                raise status
            written = Path(name).read_text(encoding="utf-8", errors="replace").rstrip("\n")
        except (OSError, ValueError) as problem:
            why = (isinstance(problem, OSError) and problem.strerror) or problem
            screen.session.show_error(
                UsageError(f"the editor {command} cannot be started: {why}", hint="set EDITOR")
            )
            return
        finally:
            Path(name).unlink(missing_ok=True)
        screen.app.refresh(layout=True)
        if status == 0:
            screen.composer.replace_text(written)
        else:
            screen.hint(f"{command} ended with {status}; the message is as it was")


async def _run_program(words: Sequence[str]) -> int | OSError:
    """Run a program to its end. An error is returned: one that is raised within Textual's `suspend` leaves the
    screen given away for ever."""
    try:
        process = await asyncio.create_subprocess_exec(*words)
    except OSError as problem:
        return problem
    return await process.wait()
