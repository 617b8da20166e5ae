"""Runs the slash commands of a chat, once for the screen and the line mode.

A command returns a reply, which each front end shows in its own way.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from localchat.atomic import write_text
from localchat.config.mcp_servers import PROMPT_PREFIX
from localchat.config.parameters import AT_START, PARAMETERS
from localchat.config.paths import expand_home
from localchat.config.settings import Given, convert, find_key
from localchat.engine.stats_line import stats_line
from localchat.errors import LocalchatError, ModelMissing, UsageError, os_errors_as
from localchat.session.commands import FrontEnd, parse
from localchat.session.outcome import STOPPED, AnswerUnderWay
from localchat.units import counted

if TYPE_CHECKING:
    from localchat.chat.conversation import Node
    from localchat.fit.memory_plan import MemoryPlan
    from localchat.session.context import ModelSetup
    from localchat.session.session import ChatSession

_THINKING: Final = ("auto", "on", "off")

Part: TypeAlias = Literal[
    "models", "parameters", "history", "help", "metrics", "copy", "pull", "edit"
]
"""A dialog or a part of the chat that a front end opens."""


class Output(NamedTuple):
    """Text that the user asked for."""

    text: str


class Hint(NamedTuple):
    """A short confirmation."""

    text: str
    detail: str = ""
    """More text. The screen shows it in the conversation already."""


class AskQuestion(NamedTuple):
    """A question to send. Without text, the last question is answered again."""

    text: str = ""


class QuestionUndone(NamedTuple):
    """The last question was removed from the path. A screen puts it back into its input."""

    question: "Node"
    hint: str


class LeaveConversation(NamedTuple):
    """An empty conversation is about to replace the current one."""


class NewConversation(NamedTuple):
    """An empty conversation replaced the current one."""

    hint: str


class SetupChanged(NamedTuple):
    """The session uses another model or other parameters."""

    before: "ModelSetup"
    hint: str


class OpenPart(NamedTuple):
    """A part of the front end to open."""

    part: Part
    argument: str = ""


class LongCommand(NamedTuple):
    """A command that takes a while. Its replies arrive one by one."""

    replies: "AsyncIterator[Reply]"


class Quit(NamedTuple):
    """Leave the program."""


Reply: TypeAlias = (
    Output
    | Hint
    | AskQuestion
    | QuestionUndone
    | LeaveConversation
    | NewConversation
    | SetupChanged
    | OpenPart
    | LongCommand
    | Quit
)


class CommandRunner:
    """Runs commands on a session. Each `do_NAME` method runs the command of this name."""

    def __init__(self, session: "ChatSession", front_end: FrontEnd) -> None:
        self._session = session
        self._front_end = front_end
        self.unsent = ""
        """A question that did not reach the engine, for `/send`."""

    def run(self, line: str) -> Reply:
        """Run a line that begins with a slash. Raises LocalchatError."""
        if line.startswith(f"/{PROMPT_PREFIX}"):
            self._refuse_while_busy()
            return LongCommand(self._server_prompt(line))
        call = parse(line, self._front_end)
        reply: Reply = getattr(self, f"do_{call.command.name}")(call.argument)
        return reply

    async def _server_prompt(self, line: str) -> AsyncIterator[Reply]:
        """Ask a prompt of an MCP server."""
        command, *arguments = line[1:].split(maxsplit=1)
        yield AskQuestion(await self._session.tools.prompt(command, "".join(arguments)))

    def _refuse_while_busy(self) -> None:
        if self._session.busy:
            raise AnswerUnderWay

    def do_model(self, name: str) -> Reply:
        if not name:
            return OpenPart("models")
        return LongCommand(self.change(name, {}))

    def do_set(self, words: str) -> Reply:
        if not words:
            return OpenPart("parameters")
        # Also as in the settings file (`temperature = 0.2`) and in Ollama (`parameter temperature 0.2`).
        words = words.removeprefix("parameter ").lstrip()
        key, value = re.split(r"\s*=\s*|\s+", f"{words} ", maxsplit=1)
        key = find_key(key, "/set")
        value = value.strip()
        if not value:
            raise UsageError(f"/set {key} needs a value", hint=f"it takes {PARAMETERS[key].valid}")
        convert(key, Given(value, f"/set {key}"))  # raises here, under the name of the command
        if key == "model":
            return self.do_model(value)
        if key == "remote":
            return self.do_model(f"remote:{value}")
        if key == "system":
            return self.do_system(value)
        if key in AT_START:
            raise UsageError(
                f"/set {key}: this setting cannot change in a conversation",
                hint=f"F2 changes it for the next start, or in the shell: localchat config set {key} {value}",
            )
        return LongCommand(self.change(None, {key: value}, f"{key} = {value}"))

    def do_think(self, choice: str) -> Reply:
        choice = choice.lower() or "on"
        if choice not in _THINKING:
            raise UsageError(f"/think {choice}: expected on, off or auto")
        return LongCommand(self.change(None, {"think": choice}, f"reasoning: {choice}"))

    def do_tools(self, names: str) -> Reply:
        self._refuse_while_busy()
        return LongCommand(self._tools(names))

    async def _tools(self, names: str) -> AsyncIterator[Reply]:
        session = self._session
        if names:
            from localchat.tools.toolset import parse_groups

            groups = parse_groups(names, session.context.mcp_servers)
            async for reply in self.change(
                None, {"tools": ",".join(groups) or "off"}, "tools changed"
            ):
                yield reply
        yield Output(await session.tools.describe())

    async def change(
        self, model_name: str | None, changes: Mapping[str, str], hint: str = ""
    ) -> AsyncIterator[Reply]:
        """Use another model or other parameters for the next answer. Raises LocalchatError.

        Stops the answer under way if the model must be loaded again, and waits for the load.
        """
        session = self._session
        before = session.setup
        change = session.prepare_change(model_name, changes)
        was_stopped = change.reload and await session.stop_and_wait()
        change.apply()
        if model_name and session.setup.model != before.model:
            hint = f"Switched to {session.setup.model.name}"
        if was_stopped:
            hint = ". ".join(filter(None, (STOPPED, hint)))
        yield SetupChanged(before, hint)
        if session.setup.options != before.options:
            await session.wait_until_ready()

    def do_fit(self, model_name: str) -> Reply:
        return LongCommand(self._fit(model_name))

    async def _fit(self, model_name: str) -> AsyncIterator[Reply]:
        from localchat.fit.report import verdict

        name, plan = await asyncio.to_thread(self._plan_of, model_name)
        yield Output("\n".join((name, *verdict(plan))))

    def _plan_of(self, model_name: str) -> "tuple[str, MemoryPlan]":
        """Return the name and memory plan of a model, by default the current one.

        The model is local or published. Blocks. Raises LocalchatError.
        """
        context = self._session.context
        try:
            setup = context.resolve(
                model_name or self._session.setup.model.word, self._session.changes
            )
        except ModelMissing as missing:
            try:
                estimate = context.estimate(model_name)
            except LocalchatError:
                estimate = None
            if estimate is None:
                raise missing from None
            return model_name, estimate.plan
        return setup.model.name, context.plan(setup, setup.options.load)

    def do_pull(self, name: str) -> Reply:
        return OpenPart("pull", name)

    def do_new(self, _: str) -> Reply:
        return LongCommand(self._start_conversation(None))

    def do_clear(self, _: str) -> Reply:
        return LongCommand(self._start_conversation(self._session.conversation.system))

    async def _start_conversation(self, system: str | None) -> AsyncIterator[Reply]:
        yield LeaveConversation()
        was_stopped = await self._session.stop_and_wait()
        self._session.start_new(system=system)
        self.unsent = ""
        yield NewConversation("the conversation is empty")
        if was_stopped:
            yield Hint(STOPPED)

    def do_system(self, text: str) -> Reply:
        if text.lower() == "off":
            self._session.set_instructions("")
            return Hint("the instructions are removed")
        if text:
            self._session.set_instructions(text)
            return Hint("the instructions are set")
        return Output(self._session.conversation.system or "There are no instructions.")

    def do_send(self, _: str) -> Reply:
        if not self.unsent:
            raise UsageError("there is no unsent question")
        return AskQuestion(self.unsent)

    def do_regen(self, _: str) -> Reply:
        self._refuse_while_busy()
        return AskQuestion()

    def do_edit(self, _: str) -> Reply:
        self._refuse_while_busy()
        return OpenPart("edit")

    def do_undo(self, _: str) -> Reply:
        self._refuse_while_busy()
        question = self._session.undo()
        left = counted(len(self._session.conversation.path()), "message")
        return QuestionUndone(question, f"back before the last question; {left} left")

    def do_compact(self, _: str) -> Reply:
        self._refuse_while_busy()
        return LongCommand(self._compact())

    async def _compact(self) -> AsyncIterator[Reply]:
        summary = await self._session.compact()
        messages = counted(summary.messages, "message")
        hint = f"this summary is sent instead of {messages}; /everything undoes it"
        yield Hint(hint, summary.text)

    def do_everything(self, _: str) -> Reply:
        self._refuse_while_busy()
        self._session.send_everything()
        return Output("All messages are sent again.")

    def do_copy(self, what: str) -> Reply:
        return OpenPart("copy", what)

    def do_export(self, name: str) -> Reply:
        from localchat.chat.export import as_json_text, as_markdown, file_name

        conversation = self._session.conversation
        if not conversation.nodes:
            raise UsageError("there is nothing to export: the conversation is empty")
        path = expand_home(name or file_name(conversation))
        if path.suffix == ".json":
            text = as_json_text(conversation)
        else:
            text = as_markdown(conversation, embed=True)
        with os_errors_as(LocalchatError, f"cannot write {path}"):
            path = path.absolute()
            if path.exists():
                raise UsageError(f"{path} already exists", hint="use another name: /export NAME")
            write_text(path, text)
        return Output(f"Written to {path}.")

    def do_stats(self, _: str) -> Reply:
        answer = self._session.last_answer()
        if answer is None or answer.metrics is None or answer.metrics.done is None:
            return OpenPart("metrics", "There are no metrics of an answer yet.")
        return OpenPart("metrics", stats_line(answer.metrics.done))

    def do_history(self, _: str) -> Reply:
        return OpenPart("history")

    def do_help(self, _: str) -> Reply:
        return OpenPart("help")

    def do_quit(self, _: str) -> Reply:
        return Quit()
