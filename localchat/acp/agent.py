"""The agent: sessions of a client, each a chat session with tools on the folder of the client's project.

All sessions use one model. Each has a conversation of the history, whose id is the id of the session.
"""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from acp import (
    PROTOCOL_VERSION,
    InitializeResponse,
    LoadSessionResponse,
    NewSessionResponse,
    PromptResponse,
    RequestError,
    SetSessionModeResponse,
)
from acp.helpers import update_available_commands
from acp.interfaces import Client
from acp.schema import (
    AgentCapabilities,
    AvailableCommand,
    Implementation,
    McpCapabilities,
    PromptCapabilities,
    StopReason,
    UsageUpdate,
)

from localchat import __version__
from localchat.acp.content import PassedServer, PromptBlock, passed_servers, question_of
from localchat.acp.modes import mode_state, modes_of
from localchat.acp.view import ClientView
from localchat.chat.conversation import Conversation
from localchat.errors import LocalchatError, UsageError
from localchat.history.store import History
from localchat.session.commands import COMMANDS
from localchat.session.context import ModelSetup, SessionContext
from localchat.session.engine_holder import EngineHolder
from localchat.session.outcome import Outcome
from localchat.session.recorder import ConversationRecorder
from localchat.session.session import ChatSession
from localchat.session.view import transcript_blocks
from localchat.tools.tool import Effect

_COMMANDS: Final = tuple(row for row in COMMANDS if row.name in ("undo", "compact"))
"""Slash commands that clients offer. For the others they have means of their own."""
_INVALID_PARAMS: Final = -32602
_INTERNAL_ERROR: Final = -32603
"""Error codes of JSON-RPC."""


@dataclass(slots=True)
class OpenSession:
    """A session of the client."""

    session: ChatSession
    view: ClientView
    cwd: str
    mode: str = ""

    async def close(self) -> None:
        """Save the conversation, and stop its tools."""
        self.view.close()
        await self.session.stop_and_wait()
        await self.session.tools.close()
        self.session.recorder.close()


class LocalchatAgent:
    """Answers the requests of one client. `acp.run_agent` calls the methods, whose names are the protocol's."""

    def __init__(
        self,
        context: SessionContext,
        setup: ModelSetup,
        engines: EngineHolder,
        open_history: Callable[[], History],
        *,
        allowed: frozenset[Effect] = frozenset(),
    ) -> None:
        """`open_history` is called for each session. `allowed`: effects that need no consent."""
        self._context = context
        self._setup = setup
        self._engines = engines
        self._open_history = open_history
        self._allowed = allowed
        self._sessions: dict[str, OpenSession] = {}
        self._client: Client | None = None
        self._modes = modes_of(setup.model.word, setup.settings.tools)

    def on_connect(self, conn: Client) -> None:
        """Use this client for updates and questions."""
        self._client = conn

    async def initialize(self, protocol_version: int, **_: Any) -> InitializeResponse:
        """Return what the model reads and what sessions can do."""
        media: tuple[str, ...] = ()
        try:
            engine = await self._engines.engine()
            media = (await asyncio.to_thread(engine.info)).media
        except LocalchatError:
            pass  # the first prompt reports why the model cannot be loaded
        return InitializeResponse(
            protocol_version=min(protocol_version, PROTOCOL_VERSION),
            agent_info=Implementation(name="localchat", title="localchat", version=__version__),
            agent_capabilities=AgentCapabilities(
                load_session=True,
                prompt_capabilities=PromptCapabilities(
                    image="image" in media, audio="audio" in media, embedded_context=True
                ),
                mcp_capabilities=McpCapabilities(http=True),
            ),
            auth_methods=[],
        )

    async def new_session(
        self,
        cwd: str,
        mcp_servers: list[PassedServer] | None = None,
        **_: Any,
    ) -> NewSessionResponse:
        """Begin a conversation in a folder."""
        system = self._setup.settings.system or ""
        conversation = Conversation(model=self._setup.model.word, system=system)
        opened = self._open(conversation, cwd, mcp_servers or [])
        return NewSessionResponse(
            session_id=conversation.id, modes=mode_state(self._modes, opened.mode)
        )

    async def load_session(
        self,
        cwd: str,
        session_id: str,
        mcp_servers: list[PassedServer] | None = None,
        **_: Any,
    ) -> LoadSessionResponse:
        """Continue a conversation of the history, after sending it to the client."""
        if (before := self._sessions.pop(session_id, None)) is not None:
            await before.close()
        with self._open_history() as history:
            try:
                conversation = await asyncio.to_thread(history.load, session_id)
            except LocalchatError as problem:
                raise _failed(problem) from problem
        opened = self._open(conversation, cwd, mcp_servers or [])
        opened.view.replay(transcript_blocks(conversation))
        await opened.view.flush()
        return LoadSessionResponse(modes=mode_state(self._modes, opened.mode))

    def _open(
        self, conversation: Conversation, cwd: str, servers: list[PassedServer]
    ) -> OpenSession:
        assert self._client is not None
        if not os.path.isabs(cwd) or not os.path.isdir(cwd):  # noqa: PTH112, PTH117 - cwd may have a NUL
            raise _failed(UsageError(f"cwd must be the absolute path of a folder, not {cwd!r}"))
        try:
            passed = passed_servers(servers, self._context.mcp_servers)
            context = msgspec.structs.replace(self._context, mcp_servers=passed)
        except LocalchatError as problem:
            raise _failed(problem) from problem
        view = ClientView(self._client, conversation.id, Path(cwd))
        recorder = ConversationRecorder()
        recorder.attach(self._open_history())
        session = ChatSession(
            context, self._engines, self._setup, view, recorder, conversation, keep_unanswered=False
        )
        session.tools.consent = view
        session.tools.allowed = self._allowed
        opened = OpenSession(session, view, cwd)
        self._sessions[conversation.id] = opened
        self._set_mode(opened, next(iter(self._modes)))
        commands = [
            AvailableCommand(name=command.name, description=command.about) for command in _COMMANDS
        ]
        view.send(update_available_commands(commands))
        return opened

    def _set_mode(self, opened: OpenSession, mode: str) -> None:
        """Turn on the tools of a mode, and the servers that the client passed. Raises RequestError."""
        if mode not in self._modes:
            raise _failed(UsageError(f"there is no mode {mode}"))
        own = self._context.mcp_servers
        passed = (name for name in opened.session.context.mcp_servers if name not in own)
        tools = self._modes[mode].tools
        if tools != "off":
            tools = ",".join((tools, *passed))
        changes = {"tools": tools, "root": opened.cwd}
        try:
            opened.session.prepare_change(None, changes).apply()
        except LocalchatError as problem:
            raise _failed(problem) from problem
        opened.mode = mode

    async def set_session_mode(
        self,
        session_id: str,
        mode_id: str,
        **_: Any,
    ) -> SetSessionModeResponse:
        """Choose the tools of the next answers."""
        self._set_mode(self._opened(session_id), mode_id)
        return SetSessionModeResponse()

    async def prompt(
        self,
        session_id: str,
        prompt: list[PromptBlock],
        **_: Any,
    ) -> PromptResponse:
        """Answer a prompt, with the tool calls of the answer. Failures are errors of the request."""
        opened = self._opened(session_id)
        try:
            question = await asyncio.to_thread(question_of, prompt)
            if not question.text.strip() and not question.attachments:
                raise UsageError("the prompt is empty")
            if question.text.strip() in [f"/{command.name}" for command in _COMMANDS]:
                await self._run_command(opened, question.text.strip())
                return PromptResponse(stop_reason="end_turn")
            outcome = await opened.session.ask(question)
        except LocalchatError as problem:
            raise _failed(problem) from problem
        finally:
            await opened.view.flush()
        _send_usage(opened, outcome)
        await opened.view.flush()
        return PromptResponse(stop_reason=_stop_reason(outcome))

    async def _run_command(self, opened: OpenSession, line: str) -> None:
        """Run a slash command, and show what it did. Raises LocalchatError."""
        session = opened.session
        if line == "/compact":
            summary = await session.compact()
            opened.view.say(f"This summary replaces {summary.messages} messages:\n\n{summary.text}")
        else:
            session.undo()
            opened.view.say(session.restored or "The last question is undone.")

    async def cancel(self, session_id: str, **_: Any) -> None:
        """Stop the answer of a session, if there is one."""
        if (opened := self._sessions.get(session_id)) is not None:
            opened.session.stop()

    async def close(self) -> None:
        """Save and close all sessions."""
        for opened in self._sessions.values():
            await opened.close()
        self._sessions.clear()

    def _opened(self, session_id: str) -> OpenSession:
        opened = self._sessions.get(session_id)
        if opened is None:
            raise _failed(UsageError(f"there is no session {session_id}"))
        return opened


def _send_usage(opened: OpenSession, outcome: Outcome) -> None:
    """Tell the client how full the context is."""
    node = outcome.node
    info = opened.session.status.info
    if info is None or node is None or node.metrics is None or node.metrics.done is None:
        return
    usage = node.metrics.done.usage
    used = usage.prompt_tokens + usage.completion_tokens
    update = UsageUpdate(session_update="usage_update", used=used, size=info.context_tokens)
    opened.view.send(update)


def _stop_reason(outcome: Outcome) -> StopReason:
    """Return why an answer ended. Raises RequestError for a failure."""
    if outcome.end == "stopped":
        return "cancelled"
    if outcome.end == "too_long" and outcome.overflow is not None:
        hint = "/compact makes room, and so does a new conversation"
        raise _failed(UsageError(outcome.overflow.sentence, hint=hint))
    if outcome.error is not None:
        raise _failed(outcome.error)
    if outcome.node is not None and outcome.node.state == "length":
        return "max_tokens"
    return "end_turn"


def _failed(problem: LocalchatError) -> RequestError:
    """Return the error of a request. Clients show its message or its details."""
    code = _INTERNAL_ERROR
    if isinstance(problem, UsageError):
        code = _INVALID_PARAMS
    return RequestError(code, str(problem), {"details": str(problem)})
