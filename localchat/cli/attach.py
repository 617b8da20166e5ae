"""Finds a running server of this user and attaches to it, so that a prompt pays no load."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from localchat.engine.attached.protocol import AttachSpec
from localchat.pool.server_registry import registered

if TYPE_CHECKING:
    from localchat.cli.resolve import Setup
    from localchat.config.paths import Paths
    from localchat.engine.attached.engine import ServerClient
    from localchat.engine.interface import Engine


def running_servers(paths: "Paths") -> "list[tuple[ServerClient, bytes]]":
    """Servers that answer, the newest first, each with what it has loaded, as JSON."""
    found = []
    for about in registered(paths):
        from localchat.engine.attached.engine import (
            ServerClient,  # http.client, only where somebody may answer
        )

        server = ServerClient(about.url, about.token)
        if (loaded := server.loaded()) is not None:
            found.append((server, loaded))
    return found


def attached_engine(setup: "Setup", user: str, say: Callable[[str], None]) -> "Engine | None":
    """The settled model on a running server, said in one line; None where there is no server, and the model
    is loaded here. `user`: for `ps`."""
    wanted = setup.settings.attach and setup.model.remote is None
    servers = running_servers(setup.paths) if wanted else []
    if not servers:
        return None
    from localchat.engine.attached.engine import AttachedEngine

    server = holder(servers, setup.model.path)
    say(f"attached to the server at {server.url}")
    return AttachedEngine(server, _spec(setup), user)


def holder(servers: "Sequence[tuple[ServerClient, bytes]]", model: Path) -> "ServerClient":
    """The first server that has this file loaded; the first of all where none has."""
    import msgspec

    from localchat.pool.entry import ServerStatus

    for server, told in servers:
        if any(
            one.path == str(model) for one in msgspec.json.decode(told, type=ServerStatus).models
        ):
            return server
    return servers[0][0]


def _spec(setup: "Setup") -> AttachSpec:
    from localchat.engine.options import load_options

    return AttachSpec(
        model=os.fsencode(setup.model.path),
        name=setup.model.name,
        word=setup.model.word,
        backend=setup.settings.backend,
        load=load_options(setup.settings),
    )
