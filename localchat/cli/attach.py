"""Attaches a command to a running server, so that a prompt waits for no load."""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from localchat.config.paths import Paths
from localchat.engine.attached.protocol import AttachSpec
from localchat.pool.server_registry import registered

if TYPE_CHECKING:
    from localchat.engine.attached.engine import ServerClient
    from localchat.engine.interface import Engine


def running_servers(paths: Paths) -> "list[tuple[ServerClient, bytes]]":
    """Servers that respond, newest first, each with the JSON of its loaded models."""
    found = []
    for entry in registered(paths):
        # http.client, which most runs do without because no server is registered
        from localchat.engine.attached.engine import ServerClient

        server = ServerClient(entry.url, entry.token)
        if (loaded := server.loaded_models()) is not None:
            found.append((server, loaded))
    return found


def attached_engine(
    paths: Paths, spec: AttachSpec, user: str, notify: Callable[[str], None]
) -> "Engine | None":
    """An engine on a running server; None if no server responds. `user`: shown by `ps`."""
    servers = running_servers(paths)
    if not servers:
        return None
    from localchat.engine.attached.engine import AttachedEngine

    server = choose_server(servers, os.fsdecode(spec.model))
    notify(f"attached to the server at {server.url}")
    return AttachedEngine(server, spec, user)


def choose_server(servers: "Sequence[tuple[ServerClient, bytes]]", path: str) -> "ServerClient":
    """The first server that has this file loaded, else the first of all."""
    from localchat.pool.entry import ServerStatus

    for server, loaded in servers:
        models = msgspec.json.decode(loaded, type=ServerStatus).models
        if any(model.path == path for model in models):
            return server
    return servers[0][0]
