"""MCP servers that the operator offers to clients. A request chooses among them, and never names another one.

All clients share one connection to each server. A server that has ended is started again by the next request
that uses it.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from localchat.config.mcp_servers import McpServer
from localchat.errors import LocalchatError

if TYPE_CHECKING:
    from localchat.tools.mcp_client import McpConnection

_RETRY_S: Final = 10.0
"""Time after a failed start in which requests get its error, instead of another start."""


class OfferedMcpServers:
    """The MCP servers of `localchat serve --mcp`. Use it on one event loop."""

    def __init__(self, servers: Sequence[McpServer], environ: Mapping[str, str]) -> None:
        self._servers = {server.name: server for server in servers}
        self._environ = environ
        self._connections: dict[str, McpConnection] = {}
        self._failures: dict[str, tuple[float, str]] = {}
        """Time and sentence of the last failed start, by name of the server."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the servers, which requests call labels."""
        return tuple(self._servers)

    async def start(self) -> list[str]:
        """Start all servers. Return sentences about those that cannot be used completely."""
        results = await asyncio.gather(*map(self.connection, self._servers), return_exceptions=True)
        problems: list[str] = []
        for result in results:
            if isinstance(result, LocalchatError):
                problems.append(str(result))
            elif isinstance(result, BaseException):
                raise result
            else:
                problems += result.problems
        return problems

    async def connection(self, name: str) -> "McpConnection":
        """Return the connection to a server, which starts if it does not run. Raises ToolError."""
        from localchat.tools.mcp_client import connect
        from localchat.tools.tool import ToolError

        async with self._locks[name]:
            connection = self._connections.get(name)
            if connection is not None and connection.alive:
                return connection
            failed_s, sentence = self._failures.get(name, (0.0, ""))
            if sentence and time.monotonic() - failed_s < _RETRY_S:
                raise ToolError(sentence)
            if connection is not None:
                await self._connections.pop(name).close()
            (outcome,) = await connect([self._servers[name]], self._environ, Path.cwd())
            if outcome.connection is None:
                (sentence,) = outcome.problems
                self._failures[name] = time.monotonic(), sentence
                raise ToolError(sentence)
            self._failures.pop(name, None)
            self._connections[name] = outcome.connection
            return outcome.connection

    async def close(self) -> None:
        """Stop all servers. Idempotent."""
        connections = list(self._connections.values())
        self._connections.clear()
        await asyncio.gather(*(connection.close() for connection in connections))
