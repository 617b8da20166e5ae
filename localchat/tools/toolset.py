"""The tools of a session: chosen by their groups, opened together and closed together."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from localchat.config.mcp_servers import McpServer
from localchat.errors import UsageError
from localchat.suggestions import did_you_mean
from localchat.tools.journal import Journal
from localchat.tools.mcp_servers import McpServers
from localchat.tools.root import Root
from localchat.tools.tool import Tool

if TYPE_CHECKING:
    from localchat.documents.library import DocumentLibrary
    from localchat.engine.interface import Engine

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
    library: "DocumentLibrary"
    engine: "Engine"
    environ: Mapping[str, str]
    servers: Mapping[str, McpServer]
    offline: bool = False


class Toolset:
    """The open tools of a session. Open and close it on one event loop."""

    def __init__(self, groups: Sequence[str], services: ToolServices) -> None:
        """Open the tools of these groups, without the servers. Raises UsageError."""
        self.journal = services.journal
        self.tools: dict[str, Tool] = {}
        self.notes: list[str] = []
        """Sentences for the user about these tools."""
        self._server_problems: list[str] = []
        self._services = services
        chosen = (services.servers[name] for name in groups if name in services.servers)
        self._servers = McpServers(chosen, services.environ, services.root)
        self._root: Root | None = None
        if not {"read", "edit", "run"}.isdisjoint(groups):
            self._root = Root(services.root, services.protected)
            self._add_folder_tools(self._root, groups)
        if "fetch" in groups:
            from localchat.tools.sources import page_tool

            self._add(page_tool(offline=services.offline))
        if "docs" in groups:
            from localchat.tools.sources import documents_tool

            self._add(documents_tool(services.library, services.engine))
        self._own_tools = dict(self.tools)
        """Tools that need no server."""

    def _add_folder_tools(self, root: Root, groups: Sequence[str]) -> None:
        from localchat.tools.command import command_tool
        from localchat.tools.files import editing_tool, reading_tools

        if "read" in groups or "edit" in groups:
            self._add(*reading_tools(root))
        if "edit" in groups:
            self._add(editing_tool(root, self.journal))
        if "run" in groups:
            self._add(command_tool(root, self._services.environ))

    def _add(self, *tools: Tool) -> None:
        for tool in tools:
            self.tools[tool.name] = tool

    async def connect(self) -> list[str]:
        """Start the chosen servers that do not run, and offer all their tools.

        Returns sentences about new problems. `problems` has all of them.
        """
        connections, problems = await self._servers.start()
        self.tools = dict(self._own_tools)
        for connection in connections:
            for tool in connection.tools:
                self.tools.setdefault(tool.name, tool)
        new_problems = [problem for problem in problems if problem not in self._server_problems]
        self._server_problems = problems
        return new_problems

    @property
    def problems(self) -> list[str]:
        """The notes, and sentences about servers that cannot be used."""
        return [*self.notes, *self._server_problems]

    async def close(self) -> None:
        """Stop the servers and close the folder. Idempotent."""
        await self._servers.close()
        if self._root is not None:
            self._root.close()
