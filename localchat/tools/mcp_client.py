"""Tools of MCP servers, by the official SDK. Imported only when a server is chosen.

A server is not trusted. Its texts, lists and messages are bounded, its time is limited, and a server that dies
or floods fails its own calls only. Each connection lives in a task of its own, as the SDK requires.
"""

import asyncio
import json
import logging
import os
import shutil
import signal
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar

import httpx2
import msgspec

from localchat.config.mcp_servers import McpServer, prompt_command, tool_name
from localchat.errors import LocalchatError, UsageError, innermost, reason
from localchat.sanitize import sanitize, sanitize_line
from localchat.tools.tool import Effect, Plan, ServerPrompt, Tool, ToolError, bounded

if TYPE_CHECKING:
    from mcp import Client

_START_S: Final = 60.0
"""Time for the start of a server and its lists. A first start may download it."""
_MAX_MESSAGE: Final = 16 << 20
_MAX_UNASKED: Final = 10_000
"""Notifications, requests and other lines that a server may send between two answers."""
_MAX_BODY: Final = 64 << 20
_MAX_TOOLS: Final = 64
_MAX_PAGES: Final = 16
_MAX_DESCRIPTION: Final = 1000
_MAX_SCHEMA: Final = 16_000
_MAX_RESULT: Final = 1 << 20
_MAX_CONCURRENT: Final = 8
"""Calls that a server gets at once. Clients of `localchat serve` share a connection."""
_MAX_RESOURCES: Final = 30
_INHERITED: Final = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TMPDIR", "XDG_CACHE_HOME")
_T = TypeVar("_T")
_Call: TypeAlias = "Callable[[Client, dict[str, Any]], Awaitable[str]]"
"""Sends a call with these arguments, and returns the text of its result."""


class McpConnection:
    """A connection to one server."""

    def __init__(self, server: McpServer, environ: Mapping[str, str], folder: Path) -> None:
        """environ: the server gets a part of it. folder: its working folder."""
        self.server = server
        self.tools: list[Tool] = []
        self.own_names: dict[str, str] = {}
        """The server's names of its tools, by the names in `tools`. The tool that reads resources has none."""
        self.prompts: dict[str, ServerPrompt] = {}
        """The server's prompts by their slash commands."""
        self.problems: list[str] = []
        self._environ = environ
        self._folder = folder
        self._client: Client | None = None
        self._failure: Exception | None = None
        """Why the server was not connected, or why the connection ended."""
        self._started = asyncio.Event()
        """Set once the server is connected or has failed."""
        self._closing = asyncio.Event()
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)
        self._task: asyncio.Task[None] | None = None
        self._ended = False
        """Whether the server's process has closed its output."""
        self._errors: deque[str] = deque(maxlen=3)
        """Last lines that the server wrote to stderr."""

    async def open(self) -> None:
        """Start the server and read its lists. Raises LocalchatError."""
        try:
            import mcp  # noqa: F401 - checks that it is installed
        except ImportError as problem:
            raise UsageError(
                "MCP servers need the package mcp, which is not installed",
                hint="install it: pip install 'localchat-app[mcp]'",
            ) from problem
        # The SDK logs tracebacks about servers that send nonsense.
        logging.getLogger("mcp").setLevel(logging.CRITICAL)
        logging.getLogger("client").setLevel(logging.CRITICAL)
        self._task = asyncio.create_task(self._own())
        await self._guarded(self._wait_for_start(), _START_S)
        await self._guarded(self._read_lists(), _START_S)

    async def _wait_for_start(self) -> None:
        await self._started.wait()
        if self._failure is not None:
            raise self._failure

    async def _own(self) -> None:
        """Hold the connection open until `close`."""
        from mcp import MCPError

        try:
            if self.server.url:
                await self._hold(self._http(), "auto")
                return
            # The SDK first sends a request of the newest protocol. Many servers ignore it, and each start
            # would wait ten seconds for the answer.
            for mode in ("legacy", "auto"):
                self._ended = False
                try:
                    await self._hold(self._stdio(), mode)
                except Exception as problem:
                    is_refusal = isinstance(innermost(problem), MCPError)
                    if mode == "auto" or self._started.is_set() or not is_refusal:
                        raise
                else:
                    return
        except Exception as problem:  # noqa: BLE001 - whatever a server causes in the SDK
            self._failure = problem
        finally:
            self._client = None
            self._started.set()

    async def _hold(self, transport: Any, mode: str) -> None:  # noqa: ANN401
        """Connect, and wait for `close`. mode: handshake, as the SDK names it."""
        from mcp import Client

        async with Client(transport, mode=mode) as client:
            self._client = client
            self._started.set()
            await self._closing.wait()

    async def close(self) -> None:
        """Stop the server. Idempotent."""
        self._closing.set()
        if self._task is not None:
            if not self._started.is_set():
                self._task.cancel()  # it waits for a server that never answered
            with suppress(TimeoutError, asyncio.CancelledError):
                await asyncio.wait_for(self._task, 5.0)

    async def _guarded(self, awaitable: Awaitable[_T], timeout_s: float) -> _T:
        """Await an answer of the server. Raises ToolError for every failure of it."""
        name = self.server.name
        try:
            async with asyncio.timeout(timeout_s):
                return await awaitable
        except TimeoutError as problem:
            raise ToolError(f"{name} did not answer within {timeout_s:g} s") from problem
        except LocalchatError:
            raise
        except Exception as problem:
            raise ToolError(f"{name} failed: {self._cause(problem)}") from problem

    def _cause(self, problem: BaseException) -> str:
        import pydantic

        problem = innermost(problem)
        if isinstance(problem, pydantic.ValidationError):
            text = f"it sent an invalid {problem.title}"
        elif isinstance(problem, OSError):
            text = reason(problem)
        else:
            text = str(problem) or type(problem).__name__
        if self._errors and not self.alive:
            text = f"{text}: {' '.join(self._errors)}"
        return sanitize_line(" ".join(text[:500].split()))

    @property
    def alive(self) -> bool:
        """Whether calls can be sent."""
        return self._client is not None and not self._ended

    @property
    def _session(self) -> "Client":
        if self._client is None or self._ended:
            raise ToolError(f"the server {self.server.name} has ended")
        return self._client

    async def _read_lists(self) -> None:
        client = self._session
        capabilities = client.server_capabilities
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            listed = await client.list_tools(cursor=cursor)
            for tool in listed.tools:
                self._add(tool)
            cursor = listed.next_cursor
            if not cursor or len(self.tools) >= _MAX_TOOLS:
                break
        else:
            self.problems.append(f"MCP server {self.server.name}: its list of tools does not end")
        if capabilities.resources is not None:
            resources = (await client.list_resources()).resources[:_MAX_RESOURCES]
            if resources:
                self._add_resources([str(item.uri) for item in resources])
        if capabilities.prompts is not None:
            for prompt in (await client.list_prompts()).prompts[:_MAX_RESOURCES]:
                self._add_prompt(prompt)

    def _add(self, tool: Any) -> None:  # noqa: ANN401 - a model of the SDK
        name = tool_name(self.server.name, tool.name)
        if len(self.tools) >= _MAX_TOOLS or any(other.name == name for other in self.tools):
            self.problems.append(
                f"MCP server {self.server.name}: the tool {sanitize_line(tool.name[:40])} is left out"
            )
            return

        async def call(client: "Client", arguments: dict[str, Any]) -> str:
            result = await client.call_tool(tool.name, arguments)
            text = _text(result.content)
            if result.is_error:
                raise ToolError(text or f"{name} failed")
            return text

        annotations = tool.annotations
        is_reading = annotations is not None and bool(annotations.read_only_hint)
        description = sanitize((tool.description or "")[:_MAX_DESCRIPTION])
        self._offer(name, description, _safe_schema(tool.input_schema), call, reads=is_reading)
        self.own_names[name] = tool.name

    def _add_resources(self, uris: Sequence[str]) -> None:
        """Add the tool that reads resources."""

        async def call(client: "Client", arguments: dict[str, Any]) -> str:
            return _text((await client.read_resource(str(arguments["uri"]))).contents)

        listed = sanitize_line(", ".join(uris)[:_MAX_DESCRIPTION])
        schema = {
            "type": "object",
            "properties": {"uri": {"type": "string"}},
            "required": ["uri"],
        }
        name = f"{self.server.name}_read_resource"
        self._offer(name, f"Read a resource: {listed}", schema, call, reads=True)

    def _add_prompt(self, prompt: Any) -> None:  # noqa: ANN401 - a model of the SDK
        async def render(arguments: Mapping[str, str]) -> str:
            async with self._slots:
                answer = self._session.get_prompt(prompt.name, dict(arguments))
                result = await self._guarded(answer, self.server.timeout_s)
            return _text([message.content for message in result.messages])

        arguments = sorted(prompt.arguments or (), key=lambda argument: not argument.required)
        self.prompts[prompt_command(self.server.name, prompt.name)] = ServerPrompt(
            tuple(argument.name for argument in arguments),
            sum(bool(argument.required) for argument in arguments),
            sanitize_line((prompt.description or "")[:_MAX_DESCRIPTION]),
            render,
        )

    def _offer(
        self, name: str, description: str, schema: Mapping[str, Any], call: _Call, *, reads: bool
    ) -> None:
        """Add a tool. `reads`: whether the server declares it read-only."""

        async def plan(arguments: Mapping[str, Any]) -> Plan:
            missing = [key for key in schema.get("required", ()) if key not in arguments]
            if missing:
                raise ToolError(f"{name} needs {', '.join(map(str, missing))}")
            title = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            preview = json.dumps(arguments, ensure_ascii=False, indent=2)

            async def run() -> str:
                async with self._slots:
                    answer = call(self._session, dict(arguments))
                    return await self._guarded(answer, self.server.timeout_s)

            return Plan(run, title, f"mcp {name}", f"all calls of {name}", preview)

        effect: Effect = "run"
        if self.server.trusted and reads:
            effect = "read"
        self.tools.append(Tool(name, description, schema, effect, plan))

    @asynccontextmanager
    async def _stdio(self) -> AsyncIterator[Any]:
        """Run the server, and yield the streams of its messages.

        The SDK's own transport has no limit for a message, and shows the server's stderr on the terminal.
        """
        import anyio
        from mcp.shared.message import SessionMessage
        from mcp.types import JSONRPCError, JSONRPCResponse, jsonrpc_message_adapter

        server = self.server
        environment = _environment(server, self._environ)
        program = shutil.which(server.command, path=environment.get("PATH"))
        if program is None:
            raise UsageError(f"there is no program {server.command}")
        process = await asyncio.create_subprocess_exec(
            *(program, *server.args),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            cwd=self._folder,
            limit=_MAX_MESSAGE,
            start_new_session=True,
        )
        assert process.stdin and process.stdout and process.stderr
        to_client, from_server = anyio.create_memory_object_stream[Any](0)
        to_server, from_client = anyio.create_memory_object_stream[Any](0)
        stdin = process.stdin
        stdout = process.stdout
        stderr = process.stderr

        async def read() -> None:
            async with to_client:
                # A message above the limit raises ValueError, which ends the connection.
                with suppress(ValueError, ConnectionError, anyio.BrokenResourceError):
                    unasked = 0
                    while (line := await stdout.readline()) and unasked < _MAX_UNASKED:
                        unasked += 1
                        try:
                            message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                        except ValueError:
                            continue  # a line of a log, for example
                        if isinstance(message, JSONRPCResponse | JSONRPCError):
                            unasked = 0
                        await to_client.send(SessionMessage(message))
                self._ended = True  # before the calls that wait for an answer fail
            if process.returncode is None:
                _kill(process.pid)

        async def write() -> None:
            with suppress(ConnectionError):
                async for item in from_client:
                    text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
                    stdin.write(text.encode() + b"\n")
                    await stdin.drain()

        async def read_errors() -> None:
            while piece := await stderr.read(4096):
                lines = piece.decode("utf-8", "replace").splitlines()
                # A traceback marks the place in a line by carets.
                texts = [line for line in lines if line.strip("^~ \t")]
                self._errors.extend(text[:200] for text in texts[-3:])

        tasks = [asyncio.create_task(work()) for work in (read, write, read_errors)]
        try:
            yield from_server, to_server
        finally:
            stdin.close()
            try:
                # Closing stdin asks the server to end.
                with suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), 1.0)
            finally:
                # Also after a cancellation: no server outlives its connection.
                _kill(process.pid)
                for task in tasks:
                    task.cancel()
                for stream in (to_client, from_server, to_server, from_client):
                    stream.close()
            await asyncio.gather(*tasks, return_exceptions=True)
            await process.wait()

    @asynccontextmanager
    async def _http(self) -> AsyncIterator[Any]:
        """Connect by streamable HTTP, and yield the streams of the server's messages."""
        from mcp.client.streamable_http import streamable_http_client

        server = self.server
        headers = dict(server.headers)
        if server.key_env:
            if not (key := self._environ.get(server.key_env, "")):
                raise UsageError(f"the variable {server.key_env} is not set")
            headers["Authorization"] = f"Bearer {key}"

        async def bound(response: httpx2.Response) -> None:
            response.stream = _BoundedBody(response.stream)

        timeout = httpx2.Timeout(server.timeout_s)
        async with (
            httpx2.AsyncClient(
                headers=headers, timeout=timeout, event_hooks={"response": [bound]}
            ) as client,
            streamable_http_client(
                server.url, http_client=client, max_sse_event_size=_MAX_MESSAGE
            ) as streams,
        ):
            yield streams


def _text(parts: Sequence[Any]) -> str:
    """Return the text of a result. Other parts are named only."""
    texts = []
    for part in parts:
        text = getattr(part, "text", None) or getattr(getattr(part, "resource", None), "text", None)
        if text is None:
            kind = getattr(part, "type", type(part).__name__)
            texts.append(f"[{kind} {getattr(part, 'uri', '')} is left out]")
        else:
            texts.append(text)
    return bounded("\n".join(texts), _MAX_RESULT)


class _ObjectSchema(msgspec.Struct):
    """The keywords of a schema that chat templates read too."""

    type: Literal["object"]
    properties: dict[str, dict[str, Any] | bool] = {}
    required: list[str] = []


def _safe_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a server's schema, or that of any object if it is unusable."""
    try:
        msgspec.convert(schema, _ObjectSchema)
        is_usable = len(json.dumps(schema)) <= _MAX_SCHEMA
    except (ValueError, RecursionError, msgspec.ValidationError):
        is_usable = False
    if not is_usable:
        return {"type": "object", "properties": {}}
    return dict(schema)


def _environment(server: McpServer, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a server: what programs need, and the variables that it names."""
    missing = [name for name in server.env if name not in environ]
    if missing:
        raise UsageError(f"the variable {missing[0]} is not set", hint=f"export {missing[0]}=…")
    names = (*_INHERITED, *server.env)
    return {name: environ[name] for name in names if name in environ} | dict(server.values)


def _kill(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


class _BoundedBody(httpx2.AsyncByteStream):
    """Body of a response that ends the connection above a limit."""

    def __init__(self, stream: Any) -> None:  # noqa: ANN401 - a stream of the library
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for piece in self._stream:
            size += len(piece)
            if size > _MAX_BODY:
                raise httpx2.ReadError("the answer of the server is too long")
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()
