"""Command `localchat config mcp`: add, list, remove and test MCP servers."""

import asyncio
import shutil
from pathlib import Path
from typing import Final

import click
import msgspec

from localchat.cli.context import AppContext
from localchat.cli.group import DefaultGroup
from localchat.cli.output import print_json, print_lines, table
from localchat.cli.streams import tell
from localchat.config.mcp_servers import McpServer, as_table
from localchat.config.paths import find_paths
from localchat.errors import ExitCode, UsageError
from localchat.sanitize import sanitize, sanitize_line
from localchat.suggestions import did_you_mean

_MAX_ABOUT: Final = 100
"""Characters of a tool's description that `test` shows."""


@click.group("mcp", cls=DefaultGroup, invoke_without_command=True)
def command() -> None:
    """Add, list, remove and test MCP servers, whose tools a model may call.

    \b
    localchat config mcp add files npx -y @modelcontextprotocol/server-filesystem ~/notes
    localchat config mcp add --env GITHUB_TOKEN github docker run -i --rm ghcr.io/github/github-mcp-server
    localchat "what is new in my notes?" --tools files

    Each call needs your consent.
    """


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def list_servers(app: AppContext, as_json: bool) -> None:
    """List the servers."""
    servers = _servers(app)
    if as_json:
        print_json(app.environ, {name: as_table(server) for name, server in servers.items()})
        return
    if not servers:
        tell(
            "localchat: there are no MCP servers yet; localchat config mcp add NAME COMMAND adds one"
        )
        return
    rows = [
        (name, server.url or " ".join((server.command, *server.args)))
        for name, server in servers.items()
    ]
    print_lines(app.environ, table((), rows))


@command.command(
    "add", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.argument("name")
@click.argument("words", nargs=-1, required=True, metavar="COMMAND [ARGS]|URL")
@click.option("--env", multiple=True, metavar="NAME", help="Variable to pass on. Repeatable.")
@click.option("--key-env", metavar="NAME", help="Variable with the bearer token of a URL.")
@click.option("--trusted", is_flag=True, help="Treat its read-only tools like reading a file.")
@click.pass_obj
def add(
    app: AppContext,
    name: str,
    words: tuple[str, ...],
    env: tuple[str, ...],
    key_env: str | None,
    trusted: bool,
) -> None:
    """Add a server: its command after the name, or its URL. Flags of ours come before the name."""
    from localchat.config.settings_file import write_mcp_server

    if words[0] == "--":  # as other programs want it between the name and the command
        words = words[1:]
    if not words:
        raise UsageError(
            "there is no command after --", hint="localchat config mcp add NAME COMMAND"
        )
    first, *args = words
    server = McpServer(name, env=env, key_env=key_env or "", trusted=trusted)
    if first.startswith(("http://", "https://")):
        if args:
            raise UsageError(f"a URL has no arguments, but {args[0]!r} follows it")
        fields = {"url": first}
    else:
        fields = {"command": first}
        if shutil.which(first) is None:
            tell(f"localchat: there is no program {first} on this machine yet")
    server = msgspec.structs.replace(server, args=tuple(args), **fields)
    file = find_paths(app.environ).settings_file
    done = "added"
    if name in _servers(app):
        done = "replaced"
    write_mcp_server(file, server)
    tell(f"localchat: {done} {name} in {file}; localchat config mcp test {name} tries it")


@command.command("remove")
@click.argument("name")
@click.pass_obj
def remove(app: AppContext, name: str) -> None:
    """Remove a server."""
    from localchat.config.settings_file import remove_mcp_server

    _server(app, name)
    file = find_paths(app.environ).settings_file
    remove_mcp_server(file, name)
    tell(f"localchat: removed {name} from {file}")


@command.command("test")
@click.argument("name")
@click.pass_obj
def test(app: AppContext, name: str) -> int:
    """Start a server, and list its tools and prompts."""
    server = _server(app, name)
    tell(f"localchat: starting {name} …")
    lines, problems = asyncio.run(_tried(server, app))
    print_lines(app.environ, lines)
    for problem in problems:
        tell(f"localchat: {problem}")
    if not lines:
        return ExitCode.ERROR
    return ExitCode.OK


async def _tried(server: McpServer, app: AppContext) -> tuple[list[str], list[str]]:
    """Return the lines about a server and its problems. No lines: it could not be started."""
    from localchat.tools.mcp_servers import McpServers

    servers = McpServers([server], app.environ, Path.cwd())
    connections, problems = await servers.start()
    lines: list[str] = []
    for connection in connections:
        lines += [f"{tool.name}  {_first_line(tool.description)}" for tool in connection.tools]
        lines += [
            f"/{command} {prompt.usage}  {prompt.about}".rstrip()
            for command, prompt in connection.prompts.items()
        ]
        lines = lines or ["the server has no tools"]
    await servers.close()
    return lines, problems


def _first_line(description: str) -> str:
    line = sanitize_line(sanitize(description).strip().partition("\n")[0])
    if len(line) > _MAX_ABOUT:
        return f"{line[:_MAX_ABOUT].rstrip()}…"
    return line


def _servers(app: AppContext) -> dict[str, McpServer]:
    from localchat.config.settings_file import read_settings

    return dict(read_settings(find_paths(app.environ).settings_file).mcp_servers)


def _server(app: AppContext, name: str) -> McpServer:
    servers = _servers(app)
    if name not in servers:
        raise UsageError(
            f"there is no MCP server {name!r}",
            hint=did_you_mean(name, servers) if servers else "localchat config mcp add",
        )
    return servers[name]
