"""Attach a command to a running server, which saves the load of its model."""

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
    from localchat.pool.entry import ModelStatus


def running_servers(paths: Paths) -> "list[tuple[ServerClient, tuple[ModelStatus, ...]]]":
    """Return the servers that respond, newest first, each with its loaded models."""
    servers = []
    for entry in registered(paths):
        # Imports http.client, which most runs do not need.
        from localchat.engine.attached.engine import ServerClient
        from localchat.pool.entry import ServerStatus

        server = ServerClient(entry.url, entry.token)
        if (loaded := server.loaded_models()) is not None:
            servers.append((server, msgspec.json.decode(loaded, type=ServerStatus).models))
    return servers


def attached_engine(
    paths: Paths, spec: AttachSpec, user: str, notify: Callable[[str], None]
) -> "Engine | None":
    """Return an engine on a running server, or None if no server responds. `ps` shows `user`."""
    servers = running_servers(paths)
    if not servers:
        return None
    from localchat.engine.attached.engine import AttachedEngine

    server = choose_server(servers, os.fsdecode(spec.model))
    notify(f"attached to the server at {server.url}")
    return AttachedEngine(server, spec, user)


def choose_server(
    servers: "Sequence[tuple[ServerClient, tuple[ModelStatus, ...]]]", path: str
) -> "ServerClient":
    """Return the first server that has loaded this file, or else the first one."""
    for server, models in servers:
        if any(model.path == path for model in models):
            return server
    return servers[0][0]
