"""MCP tools of the Responses API: which servers a request uses, with which tools and approvals.

A request names servers of the operator by their label. It cannot bring a server of its own, because an address
from a client would let it reach the operator's network.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from localchat.engine.request import CalledTool, Message, Messages
from localchat.errors import LocalchatError
from localchat.server.errors import ApiError, bad_request, missing_field
from localchat.server.formatters import new_id
from localchat.server.generation import ServerTools
from localchat.server.mcp_servers import OfferedMcpServers
from localchat.server.openai_responses.protocol import (
    McpToolFilter,
    ResponsesTool,
    ResponsesToolChoice,
)
from localchat.server.tool_rounds import approved_call

if TYPE_CHECKING:
    from localchat.tools.mcp_client import McpConnection, ServerTool
    from localchat.tools.tool import Tool

PENDING: Final = "[This call waits for its result.]"
_FOREIGN: Final = ("server_url", "connector_id", "tunnel_id", "authorization", "headers")
"""Fields that name a server of the client, or a key for one."""


class McpName(NamedTuple):
    """A tool of an MCP server as the client names it."""

    label: str
    name: str
    needs_approval: bool


class ApprovedCall(NamedTuple):
    """A call that the client has approved. Its result is still missing in the conversation."""

    request_id: str
    """Id of the approval request, and of the call in the conversation."""
    label: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class McpRequest:
    """Fields of a request about MCP."""

    tools: tuple[ResponsesTool, ...] = ()
    """Entries of `tools` with the type `mcp`."""
    approved: tuple[ApprovedCall, ...] = ()
    listed: frozenset[str] = frozenset()
    """Labels of the servers whose tools the client already has from an earlier response."""
    choice: ResponsesToolChoice | str | None = None
    """A choice that may mean tools of MCP servers: `required`, or one of the type `mcp`."""
    max_calls: int | None = None


@dataclass(frozen=True, slots=True)
class McpListing:
    """Tools of a server for one request, or the error of its start."""

    label: str
    tools: Sequence[Mapping[str, Any]] = ()
    error: str | None = None
    id: str = field(default_factory=lambda: new_id("mcpl_"))

    def item(self) -> dict[str, Any]:
        """Return the output item."""
        return {
            "id": self.id,
            "type": "mcp_list_tools",
            "server_label": self.label,
            "tools": self.tools,
            "error": self.error,
        }


@dataclass(frozen=True, slots=True)
class McpTools:
    """Tools of a request, and facts for the formatter of its response."""

    tools: "Mapping[str, Tool]" = field(default_factory=dict)
    names: Mapping[str, McpName] = field(default_factory=dict)
    """Client's names of the tools, by the names that the model sees."""
    listings: Sequence[McpListing] = ()
    """Servers whose tools the client does not have yet."""
    approved_ids: frozenset[str] = frozenset()
    """Ids of the approval requests whose calls run now. They are the ids of these calls too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServerTools(ServerTools):
    """ServerTools, with what the formatter needs."""

    mcp: McpTools


def check_mcp_tools(request: McpRequest, offered: Sequence[str]) -> None:
    """Check that a request uses only servers of the operator. Raises ApiError."""
    for tool in request.tools:
        for name in _FOREIGN:
            if getattr(tool, name):
                raise bad_request(
                    f"This server does not connect to MCP servers that a request names: leave out {name!r}. "
                    + _offer(offered),
                    param=f"tools.{name}",
                )
        if not tool.server_label:
            raise missing_field("tools.server_label")
        if tool.server_label not in offered:
            raise bad_request(
                f"There is no MCP server {tool.server_label[:50]!r} here. {_offer(offered)}",
                param="tools.server_label",
            )
        if isinstance(tool.require_approval, str) and tool.require_approval not in (
            "always",
            "never",
        ):
            raise bad_request(
                f"'require_approval' is {tool.require_approval[:50]!r}; it must be always, never, or a filter.",
                param="tools.require_approval",
            )
    labels = [tool.server_label for tool in request.tools]
    for label in labels:
        if labels.count(label) > 1:
            raise bad_request(f"'tools' has the MCP server {label!r} twice.", param="tools")
    for call in request.approved:
        if call.label not in labels:
            raise bad_request(
                f"The approved call is one of the MCP server {call.label[:50]!r}, which is not among 'tools'.",
                param="input",
            )


def _offer(offered: Sequence[str]) -> str:
    if not offered:
        return "This server was started without any; its operator offers one with: localchat serve --mcp NAME."
    return f"As 'server_label', use one of: {', '.join(offered)}."


async def open_tools(request: McpRequest, servers: OfferedMcpServers) -> McpTools:
    """Connect to the servers of a request, and return their tools. Raises ApiError.

    A server that cannot be used gets a listing with an error.
    """
    tools: dict[str, Tool] = {}
    names: dict[str, McpName] = {}
    listings = []
    connections = await asyncio.gather(
        *(servers.connection(tool.server_label or "") for tool in request.tools),
        return_exceptions=True,
    )
    for entry, connection in zip(request.tools, connections, strict=True):
        label = entry.server_label or ""
        if isinstance(connection, LocalchatError):
            listings.append(McpListing(label, error=str(connection)))
            continue
        if isinstance(connection, BaseException):
            raise connection
        chosen = _chosen(entry, connection)
        for tool, described in chosen:
            tools[tool.name] = tool
            asks = _needs_approval(entry, described)
            names[tool.name] = McpName(label, described.name, asks)
        if label not in request.listed:
            listed = [_listed(tool, described) for tool, described in chosen]
            listings.append(McpListing(label, listed))
    approved_ids = frozenset(call.request_id for call in request.approved)
    return McpTools(tools, names, listings, approved_ids)


def _chosen(entry: ResponsesTool, connection: "McpConnection") -> "list[tuple[Tool, ServerTool]]":
    """Return the tools that `allowed_tools` leaves."""
    allowed = entry.allowed_tools
    if isinstance(allowed, list):
        allowed = McpToolFilter(tool_names=allowed)
    described = connection.described
    own = [(tool, described[tool.name]) for tool in connection.tools if tool.name in described]
    if allowed is None:
        return own
    missing = set(allowed.tool_names or ()) - {tool.name for tool in described.values()}
    if missing:
        raise bad_request(
            f"The MCP server {entry.server_label!r} has no tool {min(missing)[:50]!r}.",
            param="tools.allowed_tools",
        )
    return [(tool, server_tool) for tool, server_tool in own if _matches(allowed, server_tool)]


def _matches(filter_: McpToolFilter, tool: "ServerTool") -> bool:
    if filter_.tool_names is not None and tool.name not in filter_.tool_names:
        return False
    return filter_.read_only is None or filter_.read_only == tool.reads


def _needs_approval(entry: ResponsesTool, tool: "ServerTool") -> bool:
    """Return True if the client has to approve the calls of a tool."""
    rule = entry.require_approval
    if rule is None or isinstance(rule, str):
        return rule != "never"
    if rule.always is not None and _matches(rule.always, tool):
        return True
    return rule.never is None or not _matches(rule.never, tool)


def _listed(tool: "Tool", described: "ServerTool") -> dict[str, Any]:
    return {
        "name": described.name,
        "description": tool.description,
        "input_schema": tool.parameters,
        "annotations": {"read_only": described.reads},
    }


async def server_tools(
    request: McpRequest,
    mcp: McpTools,
    prompt: Messages,
    max_rounds: int,
    context_tokens: int,
    variants: Callable[[Messages], Awaitable[list[Messages]]],
) -> tuple[McpServerTools, Messages]:
    """Run the approved calls. Return the tools of the response, and the prompt of its first answer.

    Raises ApiError.
    """
    from localchat.tools.consent import EFFECTS, Approvals
    from localchat.tools.loop import ToolTurn

    for tool in prompt.tools:
        if tool["function"]["name"] in mcp.tools:
            raise bad_request(
                f"The name of the function {tool['function']['name']!r} is taken by a tool of an MCP server.",
                param="tools",
            )
    # The client is the one who approves. Calls that need its approval never reach this loop.
    approvals = Approvals(None, frozenset(EFFECTS))
    turn = ToolTurn(mcp.tools, approvals, max_rounds=max_rounds, context_tokens=context_tokens)
    earlier = []
    messages = prompt.messages
    if request.approved:
        calls = [_called(call, mcp) for call in request.approved]
        results = await asyncio.ensure_future(turn.run(calls, lambda report: None))
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        for number, (call, result) in enumerate(zip(calls, results, strict=True)):
            earlier += approved_call(-1 - number, call, result)
            messages = _with_result(messages, result.message)
    prompt = turn.offer(msgspec.structs.replace(prompt, messages=messages))
    if not turn.exhausted:
        prompt = _with_choice(prompt, request.choice, mcp.names)
    needs_approval = {name: tool.needs_approval for name, tool in mcp.names.items()}
    tools = McpServerTools(
        turn=turn,
        needs_approval=needs_approval,
        variants=variants,
        earlier=earlier,
        max_calls=request.max_calls,
        mcp=mcp,
    )
    return tools, prompt


async def with_mcp_tools(
    request: McpRequest, servers: OfferedMcpServers, prompt: Messages
) -> Messages:
    """Return a prompt with the tools of MCP servers, for counting its tokens. No call runs."""
    if not request.tools:
        return prompt
    from localchat.tools.consent import Approvals
    from localchat.tools.loop import ToolTurn

    mcp = await open_tools(request, servers)
    turn = ToolTurn(mcp.tools, Approvals(None), max_rounds=1, context_tokens=0)
    return turn.offer(prompt)


def _called(call: ApprovedCall, mcp: McpTools) -> CalledTool:
    for listing in mcp.listings:
        if listing.label == call.label and listing.error:
            raise ApiError(503, "mcp_server_unavailable", listing.error, param="input")
    for model_name, name in mcp.names.items():
        if (name.label, name.name) == (call.label, call.name):
            return CalledTool(model_name, call.arguments, call.request_id)
    raise bad_request(
        f"The approved call of {call.name[:50]!r} is not one of the tools that the request allows.",
        param="input",
    )


def _with_result(messages: Sequence[Message], result: Message) -> tuple[Message, ...]:
    """Put a result into the message that waits for it."""
    return tuple(
        msgspec.structs.replace(message, content=result.content, name=result.name)
        if message.role == "tool"
        and message.tool_call_id == result.tool_call_id
        and message.content == PENDING
        else message
        for message in messages
    )


def _with_choice(
    prompt: Messages, choice: ResponsesToolChoice | str | None, names: Mapping[str, McpName]
) -> Messages:
    """Apply a choice that forces a tool of a server, which is known only now. Raises ApiError."""
    if choice is None:
        return prompt
    if isinstance(choice, str):
        if not prompt.tools:
            raise ApiError(
                503,
                "mcp_server_unavailable",
                "A tool call is required, but no MCP server of the request can be used.",
                param="tool_choice",
            )
        return msgspec.structs.replace(prompt, tool_choice=choice)
    fitting = [
        model_name
        for model_name, name in names.items()
        if name.label == choice.server_label and choice.name in (None, name.name)
    ]
    if not fitting:
        raise bad_request(
            f"No tool {choice.name or ''!r} of the MCP server {choice.server_label or ''!r} is among 'tools'.",
            param="tool_choice",
        )
    if choice.name is not None:
        return msgspec.structs.replace(prompt, tool_choice=fitting[0])
    tools = tuple(tool for tool in prompt.tools if tool["function"]["name"] in fitting)
    return msgspec.structs.replace(prompt, tools=tools, tool_choice="required")


def error_text(error: object) -> str:
    """Return the text of an earlier call's error."""
    if isinstance(error, Mapping):
        content = error.get("content") or error.get("message") or ""
        if isinstance(content, list):
            texts = [part.get("text") for part in content if isinstance(part, Mapping)]
            return "\n".join(text for text in texts if isinstance(text, str))
        return str(content)
    return str(error)


def error_json(text: str) -> dict[str, Any]:
    """Return the error of a call as its item has it."""
    return {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": text}]}
