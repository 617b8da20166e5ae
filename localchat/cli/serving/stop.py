"""Command `localchat stop`: stop a running server, or unload one of its models."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from localchat.cli.context import AppContext
from localchat.cli.options import complete_model
from localchat.cli.streams import tell
from localchat.config.paths import Paths, find_paths
from localchat.errors import LocalchatError, ModelMissing
from localchat.units import counted

if TYPE_CHECKING:
    from localchat.engine.attached.engine import ServerClient

_TIMEOUT_S = 20.0
"""Longest wait for the end of a server, which lets running requests finish for a few seconds."""


@click.command("stop")
@click.argument("model", metavar="[MODEL]", required=False, shell_complete=complete_model)
@click.pass_obj
def command(app: AppContext, model: str | None) -> None:
    """Stop the running server, or unload one of its models.

    Requests that use the model end with an error.
    """
    from localchat.cli.attach import running_servers

    paths = find_paths(app.environ)
    servers = running_servers(paths)
    if not servers:
        raise LocalchatError(
            "no server is running",
            hint="prompts and conversations unload their own models when they end",
        )
    if model is None:
        _stop(paths, [server for server, _ in servers])
        return
    for server, _ in servers:
        stopped = server.stop(model)
        if stopped.ended is not None:
            message = f"localchat: {server.url} unloaded {model}"
            if stopped.ended:
                message += f" and cancelled {counted(stopped.ended, 'request')}"
            tell(message)
            return
    loaded = ", ".join(dict.fromkeys(entry.name for _, models in servers for entry in models))
    hint = f"loaded: {loaded}" if loaded else "no model is loaded"
    raise ModelMissing(f"{model} is not loaded", hint=f"{hint}; localchat ps shows more")


def _stop(paths: Paths, servers: "Iterable[ServerClient]") -> None:
    """Stop the servers, and wait until their memory is free."""
    from localchat.pool.server_registry import registered, wait_for_end

    registrations = {entry.url: entry for entry in registered(paths)}
    stopping = list(servers)
    for server in stopping:
        server.stop(None)
    for server in stopping:
        entry = registrations.get(server.url)
        if entry is None or wait_for_end(paths, entry, _TIMEOUT_S):
            tell(f"localchat: stopped the server at {server.url}")
        else:
            tell(f"localchat: the server at {server.url} is still finishing its requests")
