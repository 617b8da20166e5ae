"""Engines of a comparison of quality: loaded here one after the other, or servers that run already."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from localchat.cli.context import AppContext
from localchat.cli.options import given_flags
from localchat.cli.streams import Terminal
from localchat.errors import UsageError

if TYPE_CHECKING:
    from localchat.bench.sweep import BenchVariant
    from localchat.quality.comparison import QualityTarget

_ANSWER_S = 600.0
_OWN_KEYS = ("quiet", "color", "model")


class QualityTargets:
    """Opens variants with the settings of the command line."""

    def __init__(self, ctx: click.Context, terminal: Terminal) -> None:
        app = ctx.find_object(AppContext)
        assert app is not None
        self._app = app
        self._ctx = ctx
        self._terminal = terminal
        self._flags = {
            key: given for key, given in given_flags(ctx).items() if key not in _OWN_KEYS
        }

    @contextmanager
    def open(self, variant: "BenchVariant") -> "Iterator[QualityTarget]":
        """Open the variant during the block. Raises LocalchatError."""
        from localchat.bench.variants import is_running
        from localchat.cli.resolve import Inputs, engine_options, resolve_inputs
        from localchat.config.settings import Given
        from localchat.quality.comparison import QualityTarget

        if is_running(variant.model):
            with self._server(variant.model) as target:
                yield target
            return
        varied = {
            key: Given(value, f"--vary {key}={value}") for key, value in variant.settings.items()
        }
        setup = resolve_inputs(
            Inputs(self._app, {**self._flags, **varied}, variant.model), self._terminal
        )
        engine = self._app.open_engine(engine_options(setup), self._terminal.note)
        try:
            yield QualityTarget(engine)
        finally:
            engine.close()

    @contextmanager
    def _server(self, word: str) -> "Iterator[QualityTarget]":
        from localchat.cli.resolve import Inputs
        from localchat.config.remotes import find_remote
        from localchat.engine.remote.client import RemoteClient
        from localchat.engine.remote.engine import RemoteEngine, RemoteOptions
        from localchat.quality.comparison import QualityTarget

        inputs = Inputs.of(self._ctx)
        remote = find_remote(word, inputs.remotes)
        if inputs.settings().settings.offline and not remote.here:
            raise UsageError(f"{word} is on another machine, and offline is set")
        key = remote.key(self._app.environ)
        engine = RemoteEngine(
            RemoteOptions(remote.url, remote.model, key), notify=self._terminal.note
        )
        client = RemoteClient(remote.url, key, _ANSWER_S)
        try:
            yield QualityTarget(engine, client)
        finally:
            client.close()
            engine.close()
