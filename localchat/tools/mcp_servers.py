"""MCP servers of a chat session, or those that a server's operator offers to clients.

A server starts at its first use, and again at the next one after it has ended. All users share its connection.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from localchat.config.mcp_servers import McpServer
from localchat.errors import LocalchatError
from localchat.tools.tool import ToolError

if TYPE_CHECKING:
    from localchat.tools.mcp_client import McpConnection

_RETRY_S: Final = 10.0
"""Shortest pause before a failed start is repeated. Until then, users get its error."""
_RETRY_FACTOR: Final = 10.0
"""Shortest pause relative to the failed start: a server that times out must not delay every question."""
_STOPPED: Final = "MCP server {}: was stopped"


class McpServers:
    """Servers by name, with their connections. Use it on one event loop."""

    def __init__(
        self, servers: Iterable[McpServer], environ: Mapping[str, str], folder: Path
    ) -> None:
        """environ: servers get a part of it. folder: their working folder."""
        self._servers = {server.name: server for server in servers}
        self._environ = environ
        self._folder = folder
        self._connections: dict[str, McpConnection] = {}
        self._failures: dict[str, tuple[float, str]] = {}
        """Earliest next start of a failed server, and its error."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._closed = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the servers, which requests call labels."""
        return tuple(self._servers)

    async def start(self) -> tuple[list["McpConnection"], list[str]]:
        """Start all servers that do not run. Return their connections, and sentences about problems."""
        results = await asyncio.gather(*map(self.connection, self._servers), return_exceptions=True)
        connections: list[McpConnection] = []
        problems: list[str] = []
        for result in results:
            if isinstance(result, LocalchatError):
                problems.append(str(result))
            elif isinstance(result, BaseException):
                raise result
            else:
                connections.append(result)
                problems += result.problems
        return connections, problems

    async def connection(self, name: str) -> "McpConnection":
        """Return the connection to a server, which starts if it does not run. Raises ToolError."""
        from localchat.tools.mcp_client import McpConnection

        async with self._locks[name]:
            # Another task may call `close` at any time, also while this one waits for the lock.
            if self._closed:
                raise ToolError(_STOPPED.format(name))
            connection = self._connections.get(name)
            if connection is not None and connection.alive:
                return connection
            retry_s, sentence = self._failures.get(name, (0.0, ""))
            begun_s = time.monotonic()
            if begun_s < retry_s:
                raise ToolError(sentence)
            if connection is not None:
                await self._connections.pop(name).close()
            connection = McpConnection(self._servers[name], self._environ, self._folder)
            self._connections[name] = connection
            try:
                await connection.open()
            except BaseException as problem:
                failed_s = time.monotonic()
                # After a failed or cancelled start, the process may still run.
                self._connections.pop(name, None)
                await connection.close()
                if not isinstance(problem, LocalchatError):
                    raise
                if self._closed:
                    raise ToolError(_STOPPED.format(name)) from problem
                reason = "; ".join(str(problem).removeprefix(f"{name} ").splitlines())
                sentence = f"MCP server {name}: {reason}"
                pause_s = max(_RETRY_S, _RETRY_FACTOR * (failed_s - begun_s))
                self._failures[name] = failed_s + pause_s, sentence
                raise ToolError(sentence) from problem
            self._failures.pop(name, None)
            return connection

    async def close(self) -> None:
        """Stop all servers, also those that are starting, for good. Idempotent."""
        self._closed = True
        connections = list(self._connections.values())
        self._connections.clear()
        await asyncio.gather(*(connection.close() for connection in connections))
