"""MCP servers: the `[mcp]` section of the settings file.

    [mcp.files]
    command = "npx"
    args = ["-y", "@modelcontextprotocol/server-filesystem", "/home/me/notes"]
    env = ["GITHUB_TOKEN"]          # names of variables that the server gets
    trusted = true                  # run its read-only tools like our own

    [mcp.wiki]
    url = "https://wiki.example/mcp"
    key_env = "WIKI_KEY"            # sent as a bearer token

Only the servers that `--tools` names are started.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from localchat.errors import UsageError
from localchat.suggestions import did_you_mean

PROMPT_PREFIX: Final = "mcp__"
"""Start of the slash commands of prompts, as in other clients."""
_NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,19}")
_RESERVED: Final = ("read", "edit", "run", "fetch", "docs", "mcp", "off", "all")
_OWN_TOOLS: Final = ("list_folder", "search_files", "ask_documents")
"""Tools of localchat that a server could seem to have named after itself."""
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_-]")
_MAX_TOOL_NAME: Final = 40
_Text = Annotated[str, Meta(min_length=1)]


class McpServer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A server, started by a command or reached by a URL."""

    name: str = ""
    command: str = ""
    args: tuple[str, ...] = ()
    env: tuple[_Text, ...] = ()
    """Names of environment variables that the server gets. Values are never stored."""
    url: str = ""
    key_env: str = ""
    """Environment variable with the bearer token of a URL."""
    trusted: bool = False
    """Whether tools that the server declares read-only need no more consent than our own."""
    timeout_s: Annotated[int, Meta(ge=1, le=3600)] = 60
    values: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Variables with their values, from a client of `localchat acp`. Never in a file."""
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Headers for a URL, from a client of `localchat acp`. Never in a file."""


_FIELDS: Final = ("command", "args", "env", "url", "key_env", "trusted", "timeout_s")
"""Fields of a server in a file."""


def check_server_name(name: str) -> None:
    """Raise UsageError for a name that `--tools` could not choose."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be the name of an MCP server",
            hint="a name has up to 20 small letters, digits and -, and begins with a letter",
        )
    if name in _RESERVED:
        raise UsageError(
            f"{name!r} cannot be the name of an MCP server, because --tools {name} already has a meaning",
            hint=f"choose another name, such as {name}-server",
        )


def read_mcp_servers(path: Path, section: object) -> dict[str, McpServer]:
    """Check the `[mcp]` table of a settings file. Raises UsageError."""
    if not isinstance(section, dict):
        raise UsageError(f"{path}: mcp is not a section", hint="as in [mcp.files]")
    return {name: _server(f"{path} [mcp.{name}]", name, table) for name, table in section.items()}


def _server(where: str, name: str, table: object) -> McpServer:
    check_server_name(name)
    if isinstance(table, dict) and (unknown := sorted(table.keys() - set(_FIELDS))):
        raise UsageError(
            f"{where}: there is no {unknown[0]!r}", hint=did_you_mean(unknown[0], _FIELDS)
        )
    try:
        server = msgspec.convert(table, McpServer)
    except msgspec.ValidationError as problem:
        raise UsageError(f"{where}: {problem}") from problem
    if bool(server.command) == bool(server.url):
        raise UsageError(f"{where} needs a command or a url", hint='as command = "npx"')
    if server.url and not server.url.startswith(("http://", "https://")):
        raise UsageError(f"{where}: {server.url!r} is not the address of a server")
    return msgspec.structs.replace(server, name=name)


def tool_name(server: str, tool: str) -> str:
    """Return the name by which a model knows a server's tool.

    A tool that is named after its server keeps its name, such as `git_status` of the server `git`.
    """
    name = _UNSAFE.sub("_", tool)[:_MAX_TOOL_NAME]
    if name.startswith(f"{server}_") and name not in _OWN_TOOLS:
        return name
    return f"{server}_{name}"


def prompt_command(server: str, prompt: str) -> str:
    """Return the slash command of a server's prompt, without its slash."""
    return f"{PROMPT_PREFIX}{server}__{_UNSAFE.sub('_', prompt)[:_MAX_TOOL_NAME]}"


def as_table(server: McpServer) -> Mapping[str, Any]:
    """Return a server as its section of the settings file."""
    table: dict[str, Any] = msgspec.to_builtins(server)
    table.pop("name", None)
    return table
