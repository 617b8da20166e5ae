"""Command `localchat serve`: serve models to editors and programs over HTTP."""

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localchat.cli.options import UserPath, complete_model, load_flags
from localchat.errors import LocalchatError, UsageError
from localchat.sanitize import sanitize_line
from localchat.units import size

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Sequence

    from localchat.cli.resolve import Setup
    from localchat.config.mcp_servers import McpServer
    from localchat.config.paths import Paths
    from localchat.engine.interface import EngineInfo
    from localchat.pool.entry import ModelStatus
    from localchat.server.config import ServerConfig


_SLOTS = 16
_PORT = 8114
"""Default port. It differs from 11434, which web pages may attack."""

_EDITOR_S = 2 * 3600
"""Keep-alive of a model that completes code for an editor: longer than most breaks."""


@click.command("serve")
@click.argument("model_word", metavar="[MODEL]", required=False, shell_complete=complete_model)
@click.option(
    "--host",
    default="127.0.0.1",
    metavar="HOST",
    help="Address to listen on. Default: 127.0.0.1, this machine only.",
)
@click.option(
    "--port",
    default=_PORT,
    type=click.IntRange(0, 65535),
    metavar="N",
    help=f"Port to listen on. 0 picks a free one. Default: {_PORT}.",
)
@click.option(
    "--api-key-file",
    type=UserPath(path_type=Path),
    metavar="FILE",
    help="File of API keys, one per line. LOCALCHAT_API_KEY adds one. Default: no key is needed.",
)
@click.option(
    "--allow-host",
    multiple=True,
    metavar="NAME",
    help="Host name that clients may use for this server. Repeatable.",
)
@click.option(
    "--allow-origin",
    multiple=True,
    metavar="ORIGIN",
    help="Origin of web pages that may send requests. Repeatable.",
)
@click.option("--insecure-no-auth", is_flag=True, help="Serve a network without an API key.")
@click.option("--strict-models", is_flag=True, help="Reject unknown model names.")
@click.option(
    "--allow-fetch",
    is_flag=True,
    help="Fetch pictures that requests name by a public URL. Private addresses are never fetched.",
)
@click.option("--no-loop-guard", is_flag=True, help="Do not stop answers that repeat themselves.")
@click.option(
    "--mcp",
    "mcp_names",
    multiple=True,
    metavar="NAME",
    help=(
        "Offer an MCP server of `config mcp list` to clients of the Responses API, which may call "
        "its tools. Repeatable."
    ),
)
@click.option(
    "--longest",
    type=click.IntRange(1, 1_000_000_000),  # the engine accepts no more
    metavar="TOKENS",
    help=(
        "Longest answer in tokens. Default: 32768, and a quarter of the context (at most 8192) "
        "for requests without a limit."
    ),
)
@click.option(
    "--parallel",
    type=click.IntRange(1, 255),
    metavar="N",
    help="Requests computed at once. Default: 16, with CUDA up to 128.",
)
@click.option(
    "--keep-alive",
    "keep_alive",
    metavar="SECONDS",
    help=(
        "Unload a model after this many idle seconds; 0 at once, -1 never. Default: 300, "
        "longer for editors."
    ),
)
@load_flags
@click.option(
    "-q", "--quiet/--no-quiet", "quiet", default=None, help="Do not log requests. Default: off."
)
@click.option(
    "--private",
    is_flag=True,
    help=(
        "For use by another program: hide the server from other commands, and exit when "
        "stdin closes."
    ),
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model_word: str | None,
    host: str,
    port: int,
    api_key_file: Path | None,
    allow_host: tuple[str, ...],
    allow_origin: tuple[str, ...],
    insecure_no_auth: bool,
    strict_models: bool,
    allow_fetch: bool,
    no_loop_guard: bool,
    mcp_names: tuple[str, ...],
    longest: int | None,
    parallel: int | None,
    private: bool,
    **_: object,
) -> None:
    """Serve models over the OpenAI, Anthropic and Ollama APIs.

    Clients connect to http://127.0.0.1:8114/v1 as to OpenAI's API. MODEL is a name or the path of a GGUF file.
    The default is the model that answers prompts. Ctrl+C ends the server.
    """
    from dataclasses import replace

    from localchat.cli.resolve import resolve_setup
    from localchat.server.config import ServerConfig, ServerLimits
    from localchat.server.middleware.security import checked_names, checked_origins, read_keys

    setup = resolve_setup(ctx, model_word)
    names = checked_names(allow_host)
    origins = checked_origins(allow_origin)
    keys = read_keys(api_key_file, setup.app.environ)
    sockets = _bound(setup, host, port)
    addresses = [str(socket.getsockname()[0]) for socket in sockets]
    limits = ServerLimits(tool_rounds=setup.settings.tool_rounds)
    if longest:
        limits = replace(limits, answer_tokens=longest)
    config = ServerConfig(
        hosts=frozenset((*names, *_names(host, addresses))),
        any_address="0.0.0.0" in addresses or "::" in addresses,  # noqa: S104 - the user requested it
        origins=origins,
        api_keys=keys,
        one_owner=private,  # the program that starts it may choose a new key each time
        alias=not strict_models,
        loop_guard=not no_loop_guard,
        allow_fetch=allow_fetch,
        mcp_servers=_mcp_servers(setup, mcp_names),
        environ=setup.app.environ,
        limits=limits,
    )
    try:
        _check_open(addresses, config, insecure_no_auth, setup)
        _serve(setup, config, sockets, parallel, private=private)
    finally:
        for socket in sockets:
            socket.close()


def _mcp_servers(setup: "Setup", names: "Sequence[str]") -> "tuple[McpServer, ...]":
    """Return the configured MCP servers of these names. Raises UsageError for one that does not exist."""
    from localchat.config.settings_file import read_settings

    if not names:
        return ()
    servers = read_settings(setup.paths.settings_file).mcp_servers
    for name in names:
        if name not in servers:
            hint = "add it with localchat config mcp add"
            if servers:
                hint = f"the settings have {', '.join(servers)}"
            raise UsageError(f"--mcp {name}: the settings have no MCP server {name}", hint=hint)
    return tuple(servers[name] for name in dict.fromkeys(names))


def _bound(setup: "Setup", host: str, port: int) -> "list[socket.socket]":
    """Bind the sockets, and list the servers that run on other ports.

    Raises LocalchatError for a port in use. The error names the running server that uses it.
    """
    from localchat.server.uvicorn_server import bind_sockets

    try:
        sockets = bind_sockets(host, port)
    except LocalchatError as problem:
        if problem.details.get("port_in_use"):
            _refuse_second_server(setup.paths, port)
        raise
    for sentence in running_server_notices(setup.paths):
        setup.terminal.notify(sentence)
    return sockets


def _refuse_second_server(paths: "Paths", port: int) -> None:
    """Raise LocalchatError if a running server of this user listens on the port."""
    from localchat.cli.attach import running_servers

    for server, models in running_servers(paths):
        url = server.url
        if url.endswith(f":{port}"):
            raise LocalchatError(
                f"a server already runs at {url} and has loaded {_names_and_sizes(models)}",
                hint=f"clients can use any model of `localchat list` at {url}/v1; `localchat stop` ends "
                f"it; --port {port + 1} starts a second one, which loads its own models",
            )


def _names(host: str, addresses: "Sequence[str]") -> list[str]:
    """Return the host names that the server listens on, without wildcards."""
    return [name for name in (host, *addresses) if name not in ("0.0.0.0", "::")]  # noqa: S104


def _check_open(
    addresses: "Sequence[str]", config: "ServerConfig", insecure: bool, setup: "Setup"
) -> None:
    """Raise UsageError for a server on a network without API keys, unless `insecure`. Warn then."""
    import ipaddress

    if config.api_keys or all(ipaddress.ip_address(address).is_loopback for address in addresses):
        return
    if not insecure:
        raise UsageError(
            f"{addresses[0]} is open to a network, and no API key is required",
            hint="--api-key-file FILE requires one (one key per line, chmod 600); --insecure-no-auth serves "
            "everyone who can reach it",
        )
    setup.terminal.print_line(
        f"localchat: WARNING: everyone who can reach {addresses[0]} can use this server without a key"
    )


def _serve(
    setup: "Setup",
    config: "ServerConfig",
    sockets: "Sequence[socket.socket]",
    parallel: int | None,
    *,
    private: bool,
) -> None:
    """Start the server, print its address, and answer until a signal arrives."""
    from contextlib import nullcontext

    from localchat.server.app import create_app
    from localchat.server.bootstrap import ServerSpec, open_server_context, startup_task
    from localchat.server.uvicorn_server import serve

    spec = ServerSpec(
        own=setup.model,
        settings_for=setup.settings_for,
        paths=setup.paths,
        environ=setup.app.environ,
        open_engine=setup.app.open_engine,
        notify=setup.terminal.notify,
        keep_alive_s=setup.settings.keep_alive,
        # A keep-alive that the user set applies to every model.
        editor_keep_alive_s=_EDITOR_S if setup.origins["keep_alive"] == "default" else 0,
        max_slots=parallel or _SLOTS,
        more_slots=parallel is None,
        queue=config.limits.waiting,
    )
    with open_server_context(spec) as context:
        # The first lease starts the load, so that the model is ready for the first request.
        with context.engines.pool.lease("", "start") as lease:
            info = lease.engine.info()
        app = create_app(context.engines, config, context.private)
        _log_requests(setup)
        announce = partial(_announce, setup, config, sockets, info)
        on_stop = _stop_at_end_of_input if private else context.on_stop
        with nullcontext() if private else context.registered(_local_url(sockets[0])):
            serve(
                app,
                sockets,
                background=startup_task(app, announce, setup.terminal.notify, on_stop),
            )


def _stop_at_end_of_input(stop: "Callable[[], None]") -> None:
    """Call `stop` on the running event loop once stdin is closed."""
    import asyncio
    import os
    import threading

    loop = asyncio.get_running_loop()

    def wait() -> None:
        # Read without the buffer of sys.stdin, whose lock would block the end of the interpreter.
        while os.read(0, 4096):
            pass
        with suppress(RuntimeError):  # the loop has already ended
            loop.call_soon_threadsafe(stop)

    threading.Thread(target=wait, name="end-of-input", daemon=True).start()


def _local_url(listening: "socket.socket") -> str:
    """Return the URL for programs on this machine."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    if ":" in host:
        return f"http://[{host}]:{port}"
    return f"http://{host}:{port}"


def _log_requests(setup: "Setup") -> None:
    """Log requests to stderr unless the run is quiet. Always log errors."""
    import logging

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    for name in ("localchat.server", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(logging.WARNING)
        logger.propagate = False
    if not setup.settings.quiet:
        logging.getLogger("localchat.server").setLevel(logging.INFO)


def _announce(
    setup: "Setup",
    config: "ServerConfig",
    sockets: "Sequence[socket.socket]",
    info: "EngineInfo",
) -> None:
    """Print the address to stdout for programs, and notices to stderr."""
    from localchat.cli.chat.json_report import context_line
    from localchat.fit.report import room

    host, port = sockets[0].getsockname()[:2]
    if ":" in host:
        host = f"[{host}]"
    base = f"http://{host}:{port}/v1"
    notify = setup.terminal.notify
    notify(context_line(info))
    if conversations := room(info.kv_tokens, info.context_tokens):
        notify(conversations)
    if config.mcp_servers:
        names = ", ".join(server.name for server in config.mcp_servers)
        notify(f"clients of /v1/responses may call the tools of the MCP servers {names}")
    notify(f"serving on {base}; Ctrl+C ends it. Try it:")
    key = " -H 'authorization: Bearer KEY'" if config.api_keys else ""
    route = "chat/completions"
    body = '{"messages":[{"role":"user","content":"Hello"}]}'
    if info.only_embeds:
        route = "embeddings"
        body = '{"input":"Hello"}'
    setup.terminal.print_command(
        f"curl {base}/{route} -H 'content-type: application/json'{key} -d '{body}'"
    )
    terminal = setup.terminal
    is_shown = terminal.stdout_is_terminal and terminal.stderr_is_terminal
    if not is_shown and not terminal.stdout_is_closed:  # it is closed for a daemon
        setup.terminal.answer(base)
        setup.terminal.end_answer(empty=False)


def running_server_notices(paths: "Paths") -> "Iterator[str]":
    """Yield a sentence for each running server of this user. Each loads its own models."""
    from localchat.cli.attach import running_servers

    for server, models in running_servers(paths):
        yield (
            f"another server runs at {server.url} and has loaded {_names_and_sizes(models)}; one server is "
            "enough for all clients and models, and `localchat stop` ends it"
        )


def _names_and_sizes(models: "Sequence[ModelStatus]") -> str:
    """List loaded models with their memory, as a message shows them."""
    return ", ".join(map(_name_and_size, models)) or "no model"


def _name_and_size(model: "ModelStatus") -> str:
    name = sanitize_line(model.name)
    return f"{name} ({size(model.memory_bytes)})" if model.memory_bytes else name
