"""What the commands get from outside: the environment, and how engines are made. Tests hand in their own."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localchat.cli.resolve import Setup
    from localchat.engine.interface import Engine
    from localchat.engine.options import EngineOptions
    from localchat.pool.entry import OpenEngine, PooledEngine

    Attach = Callable[[Setup, str, Callable[[str], None]], Engine | None]


def _open_engine(options: "EngineOptions", say: Callable[[str], None]) -> "PooledEngine":
    if options.remote is not None:
        from localchat.engine.remote.engine import RemoteEngine, RemoteOptions

        remote = options.remote
        key = remote.key(os.environ)
        return RemoteEngine(RemoteOptions(remote.url, remote.model, key), say=say)
    from localchat.engine.local.engine import LocalEngine

    return LocalEngine(options, say=say)


def _attach(setup: "Setup", user: str, say: "Callable[[str], None]") -> "Engine | None":
    from localchat.cli.attach import attached_engine

    return attached_engine(setup, user, say)


@dataclass(frozen=True, slots=True)
class AppContext:
    """Carried as click's `ctx.obj`. `attach`: the settled model on a running server, where there
    is one, for a user that `ps` can name; `say` is told."""

    open_engine: "OpenEngine" = _open_engine
    attach: "Attach" = _attach
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    @property
    def debugging(self) -> bool:
        """Whether tracebacks are wanted."""
        return bool(self.environ.get("LOCALCHAT_DEBUG"))
