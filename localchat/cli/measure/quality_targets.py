"""Engines of a comparison of quality: loaded here one after the other, or servers that run already."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from localchat.cli.context import AppContext
from localchat.cli.options import given_flags
from localchat.cli.streams import Terminal
from localchat.errors import UsageError

if TYPE_CHECKING:
    from localchat.cli.resolve import Setup
    from localchat.config.remotes import Remote
    from localchat.measure.comparison import QualityTarget
    from localchat.measure.sweep import BenchVariant

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
        from localchat.cli.resolve import engine_options
        from localchat.measure.comparison import QualityTarget
        from localchat.measure.variants import is_running

        if is_running(variant.model):
            with self._server(variant.model) as target:
                yield target
            return
        options = engine_options(self._setup(variant))
        engine = self._app.open_engine(options, _unheard)
        try:
            yield QualityTarget(engine)
        finally:
            engine.close()

    def check(self, variants: "Iterable[BenchVariant]") -> None:
        """Find all models before the first is measured. Raises ModelMissing, UsageError."""
        from localchat.measure.variants import is_running

        for variant in variants:
            if is_running(variant.model):
                self._remote(variant.model)
            else:
                self._setup(variant)

    def _setup(self, variant: "BenchVariant") -> "Setup":
        from localchat.cli.resolve import Inputs, resolve_inputs
        from localchat.config.settings import Given

        varied = {
            key: Given(value, f"--vary {key}={value}") for key, value in variant.settings.items()
        }
        inputs = Inputs(self._app, {**self._flags, **varied}, variant.model)
        return resolve_inputs(inputs, self._terminal)

    def _remote(self, word: str) -> "Remote":
        from localchat.cli.resolve import Inputs
        from localchat.config.remotes import find_remote

        inputs = Inputs.of(self._ctx)
        remote = find_remote(word, inputs.remotes)
        if inputs.settings().settings.offline and not remote.here:
            raise UsageError(f"{word} is on another machine, and offline is set")
        return remote

    @contextmanager
    def _server(self, word: str) -> "Iterator[QualityTarget]":
        from localchat.engine.remote.client import RemoteClient
        from localchat.engine.remote.engine import RemoteEngine, RemoteOptions
        from localchat.measure.comparison import QualityTarget

        remote = self._remote(word)
        key = remote.key(self._app.environ)
        engine = RemoteEngine(RemoteOptions(remote.url, remote.model, key), notify=_unheard)
        client = RemoteClient(remote.url, key, _ANSWER_S)
        try:
            yield QualityTarget(engine, client)
        finally:
            client.close()
            engine.close()


def _unheard(_: str) -> None:
    """Drop a remark on speed or on a chat, which would break the progress bar and concerns no comparison."""
