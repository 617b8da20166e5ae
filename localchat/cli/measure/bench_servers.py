"""Servers of a benchmark: child processes with the settings of the command line, or running ones."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click
from msgspec import structs

from localchat.cli.context import AppContext
from localchat.cli.options import given_flags
from localchat.cli.streams import Terminal
from localchat.errors import LocalchatError, UsageError

if TYPE_CHECKING:
    from localchat.cli.resolve import Setup
    from localchat.measure.endpoint import BenchEndpoint
    from localchat.measure.memory_roof import MemoryRoof
    from localchat.measure.sweep import BenchVariant

_OWN_KEYS = ("quiet", "color", "model", "temperature")
"""Settings of the command alone, not of the servers that it starts."""


class BenchServers:
    """Opens the server of a variant: a child process, or the address of one that runs."""

    def __init__(self, ctx: click.Context, terminal: Terminal, *, loop_guard: bool = False) -> None:
        """loop_guard: the servers end answers that repeat themselves forever."""
        from localchat.config.settings import KEYS

        self._ctx = ctx
        self._terminal = terminal
        self._loop_guard = loop_guard
        self._environ = dict(ctx.find_object(AppContext).environ)  # type: ignore[union-attr]
        self._roofs: dict[str, MemoryRoof | None] = {}
        """By the names of variants, because each is opened in every round."""
        self._flags = {
            key: _text(given.value)
            for key, given in given_flags(ctx).items()
            if key in KEYS and key not in _OWN_KEYS
        }

    @contextmanager
    def open(self, variant: "BenchVariant") -> "Iterator[tuple[BenchEndpoint, MemoryRoof | None]]":
        """Serve the variant during the block. Raises LocalchatError."""
        from localchat.measure.endpoint import BenchEndpoint
        from localchat.measure.server_process import ServerCommand, server_process
        from localchat.measure.variants import is_running

        if is_running(variant.model):
            yield self._remote(variant.model), None
            return
        settings = {**self._flags, **variant.settings}
        if variant.name not in self._roofs:
            self._roofs[variant.name] = self._roof(variant.model, settings, variant.parallel)
        command = ServerCommand(variant.model, settings, variant.parallel, self._loop_guard)
        with server_process(command, self._environ) as url:
            yield BenchEndpoint(url, own=True), self._roofs[variant.name]

    def check(self, variants: "Iterable[BenchVariant]") -> None:
        """Find all models before the first is measured. Raises ModelMissing, UsageError."""
        from localchat.measure.variants import is_running

        for variant in variants:
            if is_running(variant.model):
                self._remote(variant.model)
            else:
                self._setup(variant.model, {**self._flags, **variant.settings})

    def _setup(self, word: str, settings: Mapping[str, str]) -> "Setup":
        from localchat.cli.resolve import Inputs, resolve_inputs
        from localchat.config.settings import Given

        given = {key: Given(value, key) for key, value in settings.items()}
        app = self._ctx.find_object(AppContext)
        assert app is not None
        return resolve_inputs(Inputs(app, given, word), self._terminal)

    def _remote(self, word: str) -> "BenchEndpoint":
        from localchat.cli.resolve import Inputs
        from localchat.config.remotes import find_remote
        from localchat.measure.endpoint import BenchEndpoint

        inputs = Inputs.of(self._ctx)
        remote = find_remote(word, inputs.remotes)
        if inputs.settings().settings.offline and not remote.here:
            raise UsageError(f"{word} is on another machine, and offline is set")
        return BenchEndpoint(remote.url, remote.model, remote.key(self._environ))

    def _roof(
        self, word: str, settings: Mapping[str, str], parallel: int | None
    ) -> "MemoryRoof | None":
        """The memory roof under these settings; None where the planner cannot tell.

        Raises ModelMissing, DoesNotFit and UsageError before a server is started in vain."""
        from localchat.backend_api.registry import usable_machine
        from localchat.errors import ModelMissing
        from localchat.measure.memory_roof import memory_roof
        from localchat.model_files.checkpoint import read_summary
        from localchat.models.assess import Subject, assess
        from localchat.models.resolve import planned_load

        setup = self._setup(word, settings)
        try:
            model = read_summary(setup.model.path, dummy_weights=setup.settings.dummy_weights)
            machine = usable_machine()
            options = planned_load(setup.settings, setup.paths, max_slots=parallel or 16)
            options = structs.replace(options, room_for_slots=True, more_slots=parallel is None)
            subject = Subject(setup.model.name, model, setup.model.path, setup.settings.backend)
            plan = assess(subject, options, machine, None, speed=False).plan
            return memory_roof(setup.model.path, model, plan, machine)
        except (ModelMissing, UsageError):
            raise
        except LocalchatError:  # a model of a backend whose files we cannot read
            return None


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
