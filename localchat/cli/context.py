"""Application context of the commands: environment and openers of engines. Tests pass their own."""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import click

    from localchat.config.paths import Paths
    from localchat.engine.attached.protocol import AttachSpec
    from localchat.engine.interface import Engine
    from localchat.engine.options import EngineOptions
    from localchat.pool.entry import OpenEngine, PooledEngine

Notify: TypeAlias = Callable[[str], None]
"""Called with sentences for the user, from any thread."""
AttachEngine: TypeAlias = "Callable[[Paths, AttachSpec, str, Notify], Engine | None]"
"""Attaches to a server of this user, if one runs. The string is the user name that `ps` shows."""


def _open_engine(options: "EngineOptions", notify: Notify) -> "PooledEngine":
    if options.remote is not None:
        from localchat.engine.remote.engine import RemoteEngine, RemoteOptions

        remote = options.remote
        key = remote.key(os.environ)
        return RemoteEngine(RemoteOptions(remote.url, remote.model, key), notify=notify)
    from localchat.engine.local.engine import LocalEngine

    # The guide checks its answers by their topics. Without that file, it is an ordinary model.
    if options.model.name == "guide.gguf":
        from localchat.engine.guide.engine import GuideEngine
        from localchat.engine.guide.topics import topics_file

        if topics_file(options.model).is_file():
            return GuideEngine(options, notify, _guide_phrases())
    return LocalEngine(options, notify=notify)


def _guide_phrases() -> "dict[str, Callable[[], str]]":
    """Return phrases that make the guide recommend the same models as all other messages."""
    from localchat.config.paths import find_paths
    from localchat.models.guide_phrases import guide_phrases

    return guide_phrases(find_paths(os.environ))


def _attach(paths: "Paths", spec: "AttachSpec", user: str, notify: Notify) -> "Engine | None":
    from localchat.cli.attach import attached_engine

    return attached_engine(paths, spec, user, notify)


class AppContext(NamedTuple):
    """Object of the click context (`ctx.obj`)."""

    open_engine: "OpenEngine" = _open_engine
    attach: AttachEngine = _attach
    environ: Mapping[str, str] = os.environ

    @property
    def debugging(self) -> bool:
        """True if errors are raised with their traceback."""
        return bool(self.environ.get("LOCALCHAT_DEBUG"))


def app_context(ctx: "click.Context") -> AppContext:
    """Return the application context of a command."""
    app = ctx.find_object(AppContext)
    assert app is not None
    return app
