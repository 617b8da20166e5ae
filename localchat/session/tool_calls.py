"""Tools of a session: opened when an answer may use them, run between two answers, and undone."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from localchat.chat.conversation import Node, ToolRun
from localchat.config.paths import expand_home
from localchat.engine.interface import Engine
from localchat.engine.request import CalledTool
from localchat.errors import EngineClosed, LocalchatError, UsageError, os_errors_as
from localchat.session.blocks import ToolCallBlock
from localchat.session.commands import Command
from localchat.session.engine_status import State
from localchat.session.interface import Session
from localchat.session.view import call_id

# Imported late: without tools, nothing of this is needed.
if TYPE_CHECKING:
    from localchat.tools.consent import Consent
    from localchat.tools.journal import Journal
    from localchat.tools.loop import ToolTurn
    from localchat.tools.tool import Effect
    from localchat.tools.toolset import Toolset

_NO_CONSENT: Final = (
    "Tool calls are refused, because this front end cannot ask for consent; localchat -i can"
)
_STATES: Final[Mapping[str, State]] = {"asking": "asking", "running": "calling"}
"""State of the status by the state of a call."""


class SessionTools:
    """Runs the tool calls of one session."""

    def __init__(self, session: Session) -> None:
        self.consent: Consent | None = None
        """Asks the user. A front end sets it before the first answer."""
        self.allowed: frozenset[Effect] = frozenset()
        """Effects that need no question."""
        self._session = session
        self._toolset: Toolset | None = None
        self._opened_with: tuple[object, ...] = ()
        self._journal: Journal | None = None
        self._running: asyncio.Task[object] | None = None

    def groups(self) -> tuple[str, ...]:
        """Return the groups and servers that the settings choose. Raises UsageError."""
        text = self._session.setup.settings.tools
        if text in ("", "off"):
            return ()
        from localchat.tools.toolset import parse_groups

        return parse_groups(text, self._session.context.mcp_servers)

    async def begin(self) -> "ToolTurn | None":
        """Open the chosen tools for the answers to one question. None without tools. Raises LocalchatError."""
        if not (groups := self.groups()):
            await self.close()
            return None
        from localchat.tools.consent import Approvals
        from localchat.tools.loop import ToolTurn

        session = self._session
        settings = session.setup.settings
        servers = session.context.mcp_servers
        engine = await session.engine()
        info = await asyncio.to_thread(engine.info)
        if info.model == "guide":
            raise UsageError(
                "the built-in guide cannot call tools",
                hint="choose another model with -m MODEL, or turn them off: --tools off",
            )
        # The engine belongs to it, because a tool searches documents with its tokenizer.
        opened_with = (groups, self.root, settings.offline, id(engine))
        if self._toolset is None or opened_with != self._opened_with:
            await self.close()
            self._toolset = self._open(groups, engine)
            self._opened_with = opened_with
            self._approvals = Approvals(self.consent, self.allowed)
            if self.consent is None and not self.allowed:
                session.remark(_NO_CONSENT, "warning")
        await self._connect(self._toolset, [name for name in groups if name in servers])
        for problem in self._toolset.problems:
            session.remark(problem, "warning")
        return ToolTurn(
            self._toolset.tools,
            self._approvals,
            max_rounds=settings.tool_rounds,
            context_tokens=info.context_tokens,
            # Servers of others may not continue an answer.
            forces_calls=info.backend != "remote",
        )

    async def _connect(self, toolset: "Toolset", servers: Sequence[str]) -> None:
        """Start the servers, and show their names meanwhile. Raises EngineClosed after `stop`."""
        session = self._session
        if servers:
            session.status.task = f"starting {', '.join(servers)}"
            session.view.status_changed()
        self._running = asyncio.create_task(toolset.connect())
        try:
            await self._running
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise EngineClosed("stopped") from None
        finally:
            self._running = None
            session.status.task = ""

    @property
    def root(self) -> Path:
        """The folder that the tools may use. Raises UsageError if the current one was deleted."""
        root = self._session.setup.settings.root
        if root:
            return expand_home(root)
        with os_errors_as(UsageError, "the current folder cannot be used"):
            return Path.cwd()

    def _open(self, groups: tuple[str, ...], engine: Engine) -> "Toolset":
        from localchat.tools.toolset import ToolServices, Toolset

        context = self._session.context
        services = ToolServices(
            self.root,
            (context.paths.data_dir, context.paths.settings_file),
            self.journal(),
            context.library,
            engine,
            context.environ,
            context.mcp_servers,
            self._session.setup.settings.offline,
        )
        return Toolset(groups, services)

    def journal(self) -> "Journal":
        """Return the journal of the writes of this session's conversations."""
        from localchat.tools.journal import Journal

        if self._journal is None:
            context = self._session.context
            folder = context.paths.writes_dir if context.history_file is not None else None
            self._journal = Journal(folder)
        return self._journal

    async def run(self, turn: "ToolTurn", answer: Node) -> Node | None:
        """Run the calls of an answer, and return the node of the last result. None without calls."""
        session = self._session
        conversation = session.conversation
        message = turn.recorded(answer.message)
        if message.content != answer.message.content:
            session.view.remove(answer.id)
        answer = msgspec.structs.replace(answer, message=message)
        calls = answer.message.tool_calls
        if turn.exhausted or not calls:
            return None
        conversation.put(answer)
        session.recorder.changed(answer)
        numbers = {call.id: number for number, call in enumerate(calls)}

        def show(call: CalledTool, run: ToolRun, text: str) -> None:
            if run.state in _STATES:
                session.status.state = _STATES[run.state]
                session.view.status_changed()
            id_ = call_id(answer.id, numbers[call.id])
            session.view.put(ToolCallBlock(id_, call.name, call.arguments, run=run, result=text))

        self.journal().begin(conversation.id, answer.id)
        self._running = asyncio.create_task(turn.run(calls, show))
        try:
            results = await self._running
        finally:
            self._running = None
        last = answer
        for result in results:
            last = conversation.add(result.message, parent=last.id)
            last = msgspec.structs.replace(last, run=result.run)
            conversation.put(last)
            session.recorder.changed(last)
        return last

    def stop(self) -> None:
        """Stop the calls that run."""
        if self._running is not None:
            self._running.cancel()

    def undo(self, question: Node) -> str:
        """Take back the writes after a question and after its other versions. Blocks.

        Returns a sentence about the files, or an empty string.
        """
        session = self._session
        conversation = session.conversation
        if (
            self._journal is None
            and not (session.context.paths.writes_dir / conversation.id).is_dir()
        ):
            return ""
        versions = [node.id for node in conversation.siblings(question.id)]
        journal = self.journal()
        journal.begin(conversation.id)
        return journal.undo(conversation.below(versions)).sentence(self.root.resolve())

    async def prompt(self, command: str, arguments: str) -> str:
        """Return the text of an MCP server's prompt by its slash command. Raises LocalchatError."""
        await self.begin()
        prompt = None
        if self._toolset is not None:
            prompt = self._toolset.prompts.get(command)
        if prompt is None:
            raise UsageError(
                f"no server in use has the prompt /{command}",
                hint="/tools NAME uses a server, and /tools lists its prompts",
            )
        text = await prompt.render(prompt.bound(arguments))
        if not text.strip():
            raise UsageError(f"/{command} returned no text")
        return text

    def prompt_commands(self) -> list[Command]:
        """Return the slash commands of the prompts of MCP servers that run."""
        if self._toolset is None:
            return []
        return [
            Command(name, prompt.usage, prompt.about)
            for name, prompt in self._toolset.prompts.items()
        ]

    async def describe(self) -> str:
        """Return the tools with their effects, and the folder. Raises LocalchatError."""
        from localchat.tools.consent import EFFECTS
        from localchat.tools.toolset import GROUPS

        if not self.groups():
            rows = [f"{name:<6} {about}" for name, about in GROUPS.items()]
            rows += [f"{name:<6} MCP server" for name in self._session.context.mcp_servers]
            return "\n".join(("Tools are off. /tools NAME[,NAME] turns them on:", *rows))
        await self.begin()
        assert self._toolset is not None
        rows = [
            f"{tool.name:<20} may {EFFECTS[tool.effect].partition('; ')[0]}"
            for tool in self._toolset.tools.values()
        ]
        rows += [
            f"/{row.name} {row.arguments}  {row.about}".rstrip() for row in self.prompt_commands()
        ]
        return "\n".join((f"Folder: {self.root}", *rows, *self._toolset.problems))

    async def close(self) -> None:
        """Stop the servers. Idempotent."""
        toolset = self._toolset
        self._toolset = None
        if toolset is not None:
            try:
                await toolset.close()
            except LocalchatError as problem:
                self._session.remark(problem.message, "warning")
