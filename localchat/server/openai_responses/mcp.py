"""MCP tools of the Responses API: which servers a request uses, and with which tools.

A request names servers of the operator by their label. It cannot name an address, which would let the client
reach the operator's network. Calls run without the client's approval, so a request must set `require_approval`
to `never`.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from localchat.engine.request import Messages
from localchat.errors import LocalchatError
from localchat.server.errors import ApiError, bad_request, missing_field
from localchat.server.formatters import new_id
from localchat.server.generation import ServerTools
from localchat.server.openai_responses.protocol import ResponsesTool

if TYPE_CHECKING:
    from localchat.tools.mcp_client import McpConnection
    from localchat.tools.mcp_servers import McpServers
    from localchat.tools.tool import Tool

_FOREIGN: Final = ("server_url", "connector_id", "tunnel_id", "authorization", "headers")
"""Fields that name a server of the client, or a key for one."""


class McpName(NamedTuple):
    """A tool of an MCP server as the client names it."""

    label: str
    name: str


@dataclass(frozen=True, slots=True)
class McpRequest:
    """Fields of a request about MCP."""

    tools: tuple[ResponsesTool, ...] = ()
    """Entries of `tools` with the type `mcp`."""
    listed: frozenset[str] = frozenset()
    """Labels of the servers whose tools the client already has from an earlier response."""
    required: bool = False
    """Whether the first answer must call a tool."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServerTools(ServerTools):
    """The tools of the servers that a request uses."""

    names: Mapping[str, McpName]
    """The client's names, by the names that the model sees."""
    listings: Sequence[McpListing]
    """Servers whose tools the client does not have yet."""


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
        if tool.require_approval != "never":
            raise bad_request(
                "This server runs calls of MCP tools without the client's approval: send "
                "'require_approval': 'never'.",
                param="tools.require_approval",
            )
    labels = [tool.server_label for tool in request.tools]
    for label in labels:
        if labels.count(label) > 1:
            raise bad_request(f"'tools' has the MCP server {label!r} twice.", param="tools")


def _offer(offered: Sequence[str]) -> str:
    if not offered:
        return "This server was started without any; its operator offers one with: localchat serve --mcp NAME."
    return f"As 'server_label', use one of: {', '.join(offered)}."


async def server_tools(
    request: McpRequest,
    servers: "McpServers",
    prompt: Messages,
    max_rounds: int,
    context_tokens: int,
) -> tuple[McpServerTools, Messages]:
    """Connect to the servers of a request. Return its tools, and the prompt that offers them.

    A server that cannot be used gets a listing with an error. Raises ApiError.
    """
    from localchat.tools.consent import EFFECTS, Approvals
    from localchat.tools.loop import ToolTurn

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
        tools |= {tool.name: tool for tool in chosen}
        names |= {tool.name: McpName(label, connection.own_names[tool.name]) for tool in chosen}
        if label not in request.listed:
            listed = [_listed(tool, names[tool.name].name) for tool in chosen]
            listings.append(McpListing(label, listed))
    for function in (offered["function"]["name"] for offered in prompt.tools):
        if function in tools:
            raise bad_request(
                f"The name of the function {function!r} is taken by a tool of an MCP server.",
                param="tools",
            )
    approvals = Approvals(None, frozenset(EFFECTS))
    turn = ToolTurn(tools, approvals, max_rounds=max_rounds, context_tokens=context_tokens)
    prompt = turn.offer(prompt)
    if request.required:
        if not prompt.tools:
            raise ApiError(
                503,
                "mcp_server_unavailable",
                "A tool call is required, but no MCP server of the request can be used.",
                param="tool_choice",
            )
        prompt = msgspec.structs.replace(prompt, tool_choice="required")
    return McpServerTools(turn=turn, names=names, listings=listings), prompt


def _chosen(entry: ResponsesTool, connection: "McpConnection") -> "list[Tool]":
    """Return the tools that `allowed_tools` leaves. Raises ApiError."""
    own = connection.own_names
    tools = [tool for tool in connection.tools if tool.name in own]
    allowed = entry.allowed_tools
    if allowed is None:
        return tools
    if not isinstance(allowed, list):
        allowed = allowed.tool_names
    missing = set(allowed) - set(own.values())
    if missing:
        raise bad_request(
            f"The MCP server {entry.server_label!r} has no tool {min(missing)[:50]!r}.",
            param="tools.allowed_tools",
        )
    return [tool for tool in tools if own[tool.name] in allowed]


def _listed(tool: "Tool", name: str) -> dict[str, Any]:
    return {"name": name, "description": tool.description, "input_schema": tool.parameters}


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
