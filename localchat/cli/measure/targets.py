"""Servers and engines to measure: of this machine with the flags of the command line, or running servers."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import click
from msgspec import structs

from localchat.cli.context import app_context
from localchat.cli.options import given_flags
from localchat.cli.streams import Terminal
from localchat.errors import LocalchatError, UsageError

if TYPE_CHECKING:
    from localchat.cli.resolve import Setup
    from localchat.config.remotes import Remote
    from localchat.engine.interface import Engine
    from localchat.measure.endpoint import BenchEndpoint
    from localchat.measure.memory_roof import MemoryRoof
    from localchat.measure.variants import BenchVariant

_COMMAND_KEYS: Final = ("quiet", "color", "model", "temperature")
"""Settings of the command alone, not of the models that it measures."""
_SLOTS: Final = 16


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
        from localchat.measure.variants import is_running

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
        from localchat.cli.resolve import Inputs
        from localchat.config.remotes import find_remote

        inputs = Inputs.of(self._ctx)
        remote = find_remote(variant.model, inputs.remotes)
        if inputs.settings().settings.offline and not remote.here:
            raise UsageError(f"{variant.model} is on another machine, and offline is set")
        return remote


class BenchTargets(_Targets):
    """Opens the server of a variant: a child process, or the address of a running one."""

    def __init__(self, ctx: click.Context, terminal: Terminal, *, loop_guard: bool = False) -> None:
        """`loop_guard`: the servers end answers that repeat themselves forever."""
        super().__init__(ctx, terminal)
        self._loop_guard = loop_guard
        # Each round opens all variants again, but measures the bandwidth only once.
        self._roofs: dict[str, MemoryRoof | None] = {}

    @contextmanager
    def open(self, variant: "BenchVariant") -> "Iterator[tuple[BenchEndpoint, MemoryRoof | None]]":
        """Serve the variant during the block. Raises LocalchatError."""
        from localchat.config.parameters import PARAMETERS
        from localchat.measure.endpoint import BenchEndpoint
        from localchat.measure.server_process import ServerCommand, server_process
        from localchat.measure.variants import is_running, setting_text

        if is_running(variant.model):
            remote = self._remote(variant)
            yield BenchEndpoint(remote.url, remote.model, remote.key(self._app.environ)), None
            return
        if variant.name not in self._roofs:
            self._roofs[variant.name] = self._roof(variant)
        flags = {
            key: setting_text(flag.value) for key, flag in self._flags.items() if key in PARAMETERS
        }
        settings = {**flags, **variant.settings}
        command = ServerCommand(variant.model, settings, variant.parallel, self._loop_guard)
        with server_process(command, self._app.environ) as server:
            yield BenchEndpoint(server.url, own=True), self._roofs[variant.name]

    def _roof(self, variant: "BenchVariant") -> "MemoryRoof | None":
        """Return the memory roof of a variant; None if the planner cannot compute it.

        Raises ModelMissing, DoesNotFit and UsageError, before a server starts in vain.
        """
        from localchat.backend_api.registry import usable_machine
        from localchat.cli.resolve import subject_of
        from localchat.errors import ModelMissing
        from localchat.measure.memory_roof import memory_roof
        from localchat.models.assess import assess
        from localchat.models.resolve import planned_load

        setup = self._setup(variant)
        settings = setup.settings
        try:
            subject = subject_of(setup.model, settings)
            machine = usable_machine()
            options = structs.replace(
                planned_load(settings, setup.paths, max_slots=variant.parallel or _SLOTS),
                room_for_slots=True,
                more_slots=variant.parallel is None,
            )
            plan = assess(subject, options, machine, None, speed=False).plan
            return memory_roof(setup.model.path, subject.model, plan, machine)
        except (ModelMissing, UsageError):
            raise
        except LocalchatError:  # a model of a backend whose files we cannot read
            return None


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


def _ignore_notice(_: str) -> None:
    """Drop a notice on speed or on a chat, which would break the progress bar."""
