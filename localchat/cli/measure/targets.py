"""Servers and engines to measure: of this machine with the flags of the command line, or running servers."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import click

from localchat.cli.context import app_context
from localchat.cli.options import given_flags
from localchat.cli.streams import Terminal

if TYPE_CHECKING:
    from localchat.cli.resolve import Setup
    from localchat.config.remotes import Remote
    from localchat.engine.interface import Engine
    from localchat.measure.endpoint import BenchEndpoint
    from localchat.measure.variants import BenchVariant

_COMMAND_KEYS: Final = ("quiet", "color", "model", "temperature")
"""Settings of the command alone, not of the models that it measures."""


class _Targets:
    """Resolves variants under the flags of the command line."""

    def __init__(self, ctx: click.Context, terminal: Terminal) -> None:
        self._app = app_context(ctx)
        self._ctx = ctx
        self._terminal = terminal
        self._flags = {
            key: value for key, value in given_flags(ctx).items() if key not in _COMMAND_KEYS
        }

    def check(self, variants: "Iterable[BenchVariant]") -> None:
        """Find all models before the first one is measured. Raises ModelMissing, UsageError."""
        from localchat.cli.resolve import Inputs
        from localchat.measure.variants import is_running

        Inputs.of(self._ctx)  # prints notices about the settings
        for variant in variants:
            if is_running(variant.model):
                self._remote(variant)
            else:
                self._setup(variant)

    def _setup(self, variant: "BenchVariant") -> "Setup":
        from localchat.cli.resolve import Inputs, resolve_inputs
        from localchat.config.settings import Given
        from localchat.measure.variants import flag_name

        varied = {
            key: Given(value, f"--vary {flag_name(key)}={value}")
            for key, value in variant.settings.items()
        }
        inputs = Inputs(self._app, {**self._flags, **varied}, variant.model)
        return resolve_inputs(inputs, self._terminal)

    def _remote(self, variant: "BenchVariant") -> "Remote":
        from localchat.cli.resolve import Inputs, allowed_remote
        from localchat.config.remotes import find_remote

        inputs = Inputs.of(self._ctx)
        remote = find_remote(variant.model, inputs.remotes)
        return allowed_remote(remote, inputs.settings().settings)


def _ignore_notice(_: str) -> None:
    """Drop a notice on speed or on a chat, which would break the progress bar."""


class BenchTargets(_Targets):
    """Opens the server of a variant: a child process, or the address of a running one."""

    def __init__(
        self,
        ctx: click.Context,
        terminal: Terminal,
        *,
        loop_guard: bool = False,
        notify: Callable[[str], None] = _ignore_notice,
    ) -> None:
        """`loop_guard`: the servers end answers that repeat themselves forever.

        `notify`: called by another thread with notices about the model.
        """
        super().__init__(ctx, terminal)
        self._loop_guard = loop_guard
        self._notify = notify

    @contextmanager
    def open(self, variant: "BenchVariant") -> "Iterator[BenchEndpoint]":
        """Serve the variant during the block. Raises LocalchatError."""
        from localchat.config.parameters import PARAMETERS
        from localchat.measure.endpoint import BenchEndpoint
        from localchat.measure.server_process import ServerCommand, server_process
        from localchat.measure.variants import is_running, setting_text

        if is_running(variant.model):
            remote = self._remote(variant)
            yield BenchEndpoint(remote.url, remote.model, remote.key(self._app.environ))
            return
        flags = {
            key: setting_text(flag.value) for key, flag in self._flags.items() if key in PARAMETERS
        }
        settings = {**flags, **variant.settings}
        command = ServerCommand(variant.model, settings, variant.parallel, self._loop_guard)
        with server_process(command, self._app.environ, self._notify) as server:
            yield BenchEndpoint(server.url, own=True)


class QualityTargets(_Targets):
    """Opens the engine of a variant."""

    @contextmanager
    def open(self, variant: "BenchVariant") -> "Iterator[Engine]":
        """Open the variant during the block. Raises LocalchatError."""
        from localchat.cli.resolve import engine_options

        engine = self._app.open_engine(engine_options(self._setup(variant)), _ignore_notice)
        try:
            yield engine
        finally:
            engine.close()
