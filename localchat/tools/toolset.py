"""The tools of a session: chosen by their groups, opened together and closed together."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from localchat.config.mcp_servers import McpServer
from localchat.documents.library import DocumentLibrary
from localchat.engine.interface import Engine
from localchat.errors import UsageError
from localchat.suggestions import did_you_mean
from localchat.tools.command import command_tool
from localchat.tools.files import editing_tool, reading_tools
from localchat.tools.journal import Journal
from localchat.tools.mcp_servers import McpServers
from localchat.tools.root import Root
from localchat.tools.sources import documents_tool, page_tool
from localchat.tools.tool import ServerPrompt, Tool

GROUPS: Final[Mapping[str, str]] = {
    "read": "read, list and search the files of the folder",
    "edit": "change and create files, besides reading",
    "run": "run commands",
    "fetch": "read public web pages",
    "docs": "find passages in learned documents",
}
ALL_SERVERS: Final = "mcp"
"""Name that chooses every configured MCP server."""


def parse_groups(text: str, servers: Mapping[str, McpServer]) -> tuple[str, ...]:
    """Return the groups and servers that a setting names. `off` and an empty text choose none.

    Raises UsageError.
    """
    chosen: dict[str, None] = {}
    for name in text.replace(",", " ").split():
        if name == "off":
            continue
        if name == ALL_SERVERS:
            if not servers:
                raise UsageError(
                    "there are no MCP servers", hint="localchat config mcp add NAME COMMAND"
                )
            chosen |= dict.fromkeys(servers)
        elif name in GROUPS or name in servers:
            chosen[name] = None
        else:
            valid = (*GROUPS, *servers)
            raise UsageError(f"there are no tools {name!r}", hint=did_you_mean(name, valid))
    return tuple(chosen)


class ToolServices(NamedTuple):
    """Services that the tools of a session use."""

    root: Path
    protected: tuple[Path, ...]
    """Files and folders of the program, which no tool writes."""
    journal: Journal
    library: DocumentLibrary
    engine: Engine
    environ: Mapping[str, str]
    servers: Mapping[str, McpServer]
    offline: bool = False


class Toolset:
    """The open tools of a session. Open and close it on one event loop."""

    def __init__(self, groups: Sequence[str], services: ToolServices) -> None:
        """Open the tools of these groups, without the servers. Raises UsageError."""
        self.problems: list[str] = []
        """Sentences about servers that cannot be used, or only in part."""
        self._root: Root | None = None
        own_tools: list[Tool] = []
        if not {"read", "edit", "run"}.isdisjoint(groups):
            self._root = root = Root(services.root, services.protected)
            if "read" in groups or "edit" in groups:
                own_tools += reading_tools(root)
            if "edit" in groups:
                own_tools.append(editing_tool(root, services.journal))
            if "run" in groups:
                own_tools.append(command_tool(root, services.environ))
        if "fetch" in groups:
            own_tools.append(page_tool(offline=services.offline))
        if "docs" in groups:
            own_tools.append(documents_tool(services.library, services.engine))
        self._own_tools = {tool.name: tool for tool in own_tools}
        """Tools that need no server."""
        self.tools: Mapping[str, Tool] = self._own_tools
        self.prompts: Mapping[str, ServerPrompt] = {}
        """Prompts of the servers by their slash commands."""
        chosen = (services.servers[name] for name in groups if name in services.servers)
        self._servers = McpServers(chosen, services.environ, services.root)

    async def connect(self) -> None:
        """Start the chosen servers that do not run, and offer all their tools."""
        connections, self.problems = await self._servers.start()
        tools = dict(self._own_tools)
        prompts: dict[str, ServerPrompt] = {}
        for connection in connections:
            prompts |= connection.prompts
            for tool in connection.tools:
                tools.setdefault(tool.name, tool)
        self.tools = tools
        self.prompts = prompts

    async def close(self) -> None:
        """Stop the servers and close the folder. Idempotent."""
        await self._servers.close()
        if self._root is not None:
            self._root.close()
