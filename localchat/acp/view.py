"""Shows a session to the client: its blocks as updates, and questions about tool calls."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from acp import (
    start_tool_call,
    text_block,
    tool_content,
    tool_diff_content,
    update_agent_message_text,
    update_agent_thought_text,
    update_tool_call,
    update_user_message_text,
)
from acp.helpers import ToolCallContentVariant
from acp.interfaces import Client
from acp.schema import (
    AllowedOutcome,
    PermissionOption,
    PermissionOptionKind,
    ToolCallLocation,
    ToolCallStatus,
    ToolCallUpdate,
    ToolKind,
)

from localchat.engine.attachments import described_content
from localchat.engine.local.protocol import sendable
from localchat.engine.request import Message
from localchat.session.blocks import (
    AnswerBlock,
    Block,
    NoticeBlock,
    ReasoningBlock,
    SummaryBlock,
    ToolCallBlock,
    UserBlock,
)
from localchat.tools.consent import Decision
from localchat.tools.tool import Plan, Tool, ToolError, bounded, parsed_arguments

_KINDS: Final[dict[str, ToolKind]] = {
    "read_file": "read",
    "list_folder": "read",
    "search_files": "search",
    "edit_file": "edit",
    "run_command": "execute",
    "fetch_page": "fetch",
    "ask_documents": "search",
}
_STATUSES: Final[dict[str, ToolCallStatus]] = {
    "asking": "pending",
    "running": "in_progress",
    "done": "completed",
    "failed": "failed",
    "refused": "failed",
}
_SHOWN_RESULT: Final = 20_000
"""Longest result that a client gets, in characters."""
_OPTIONS: Final[dict[Decision, tuple[str, PermissionOptionKind]]] = {
    "once": ("Allow", "allow_once"),
    "session": ("Allow {scope}", "allow_always"),
    "no": ("Reject", "reject_once"),
    "never": ("Always reject", "reject_always"),
}


class ClientView:
    """The view of one session. Updates reach the client in order."""

    def __init__(self, client: Client, session_id: str, root: Path) -> None:
        """`root`: folder of the tools, which their paths are relative to."""
        self._client = client
        self._session_id = session_id
        self._root = root
        self._thoughts: set[str] = set()
        self._calls: set[str] = set()
        """Ids of the calls that the client knows."""
        self._asking: ToolCallBlock | None = None
        """Call whose consent the user is deciding on."""
        self._updates: asyncio.Queue[Any] = asyncio.Queue()
        self._sender = asyncio.create_task(self._send())

    async def _send(self) -> None:
        while True:
            update = await self._updates.get()
            try:
                # The client is gone, or a text of the model cannot be sent. The next update may work.
                with suppress(ConnectionError, ValueError):
                    await self._client.session_update(self._session_id, update)
            finally:
                self._updates.task_done()

    async def flush(self) -> None:
        """Wait until the client has all updates."""
        await self._updates.join()

    def close(self) -> None:
        """Send nothing more."""
        self._sender.cancel()

    def send(self, update: Any) -> None:
        """Send an update after those before it."""
        self._updates.put_nowait(update)

    def say(self, text: str) -> None:
        """Show a text as a message of the agent."""
        self.send(update_agent_message_text(sendable(text)))

    def replay(self, blocks: Sequence[Block]) -> None:
        """Show the blocks of an earlier conversation."""
        for block in blocks:
            match block:
                case UserBlock():
                    content = described_content(
                        Message("user", block.text, attachments=block.attachments)
                    )
                    self.send(update_user_message_text(content))
                case ReasoningBlock():
                    self.send(update_agent_thought_text(block.text))
                case AnswerBlock() | SummaryBlock():
                    self.say(block.text)
                case _:
                    self.put(block)

    def show(self, blocks: Sequence[Block]) -> None:
        """Do nothing, because a client keeps what it was sent."""

    def put(self, block: Block) -> None:
        match block:
            case ReasoningBlock():
                self._thoughts.add(block.id)
            case ToolCallBlock():
                self._put_call(block)
            case NoticeBlock(kind="warning", offers=()):
                self.send(update_agent_thought_text(f"{block.text}\n"))
            case _:
                pass  # the client shows questions itself, and the end of a prompt reports errors

    def append_text(self, id_: str, text: str) -> None:
        if id_ in self._thoughts:
            self.send(update_agent_thought_text(sendable(text)))
        else:
            self.say(text)

    def finish(self, block: Block) -> None:
        """Do nothing, because the client has the text already."""

    def remove(self, id_: str) -> None:
        """Do nothing, because a client keeps what it was sent."""

    def status_changed(self) -> None:
        """Do nothing. The protocol has no status of a model."""

    def _put_call(self, block: ToolCallBlock) -> None:
        id_ = block.id
        kind = _KINDS.get(block.name, "other")
        if id_ not in self._calls:
            self._calls.add(id_)
            self.send(start_tool_call(id_, sendable(block.name), kind=kind, status="pending"))
        if block.run is None:
            return  # its arguments are still being written
        status = _STATUSES[block.run.state]
        content: list[ToolCallContentVariant] | None = None
        arguments = _arguments(block)
        if block.run.state == "asking":
            self._asking = block
            content = self._preview(block, "")
        elif status in ("completed", "failed") and (kind != "edit" or status == "failed"):
            content = [tool_content(text_block(bounded(sendable(block.result), _SHOWN_RESULT)))]
        self.send(
            update_tool_call(
                id_,
                title=_title(block),
                status=status,
                content=content,
                locations=self._locations(arguments),
                raw_input=arguments,
            )
        )

    def _locations(self, arguments: dict[str, Any]) -> list[ToolCallLocation] | None:
        """Return the file of a call, so that the client can follow."""
        path = arguments.get("path")
        if not isinstance(path, str):
            return None
        line = arguments.get("start_line")
        if not isinstance(line, int) or line < 0:
            line = None
        return [ToolCallLocation(path=str(self._root / path), line=line)]

    def _preview(self, block: ToolCallBlock, text: str) -> list[ToolCallContentVariant] | None:
        """Return what consent covers: the difference of an edit, or else the text."""
        arguments = _arguments(block)
        path = arguments.get("path")
        new_text = arguments.get("new_text")
        if block.name == "edit_file" and isinstance(path, str) and isinstance(new_text, str):
            old_text = str(arguments.get("old_text") or "") or None
            return [tool_diff_content(str(self._root / path), new_text, old_text)]
        if text:
            return [tool_content(text_block(sendable(text)))]
        return None

    async def ask(self, tool: Tool, plan: Plan) -> Decision:
        """Ask the user whether a call may run, by the client. See Consent."""
        block = self._asking
        assert block is not None  # the session reports a call before it asks
        await self.flush()
        options = [
            PermissionOption(option_id=decision, name=name.format(scope=plan.scope_text), kind=kind)
            for decision, (name, kind) in _OPTIONS.items()
        ]
        call = ToolCallUpdate(
            tool_call_id=block.id,
            title=_title(block),
            kind=_KINDS.get(block.name, "other"),
            status="pending",
            content=self._preview(block, plan.preview),
            raw_input=_arguments(block),
        )
        try:
            response = await self._client.request_permission(self._session_id, call, options)
        except ConnectionError:
            return "no"
        outcome = response.outcome
        chosen = ""
        if isinstance(outcome, AllowedOutcome):
            chosen = outcome.option_id
        return next((decision for decision in _OPTIONS if decision == chosen), "no")


def _title(block: ToolCallBlock) -> str:
    if block.run is None or not block.run.title:
        return sendable(block.name)
    return sendable(f"{block.name} {block.run.title}")


def _arguments(block: ToolCallBlock) -> dict[str, Any]:
    """Return the arguments of a call. Empty if they are invalid, which its result says."""
    with suppress(ToolError, UnicodeEncodeError):
        arguments = parsed_arguments(block.arguments)
        # An escape such as "\\ud800" is valid JSON, but not valid text.
        json.dumps(arguments, ensure_ascii=False).encode()
        return arguments
    return {}
