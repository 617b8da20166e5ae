"""From a settled command to the screen: what `localchat` alone opens on a terminal."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import click

from localchat.chat.conversation import Conversation
from localchat.cli.conversation_options import FILE
from localchat.cli.options import given_flags
from localchat.cli.resolve import Setup, engine_options, request_for, settle
from localchat.config.paths import Paths
from localchat.config.settings import Given, check_key
from localchat.config.settings_file import read_settings
from localchat.models.resolve import ResolvedModel, remember_model
from localchat.session.context import CatalogEstimate, ModelSetup, SessionContext
from localchat.tui.launch import launch

if TYPE_CHECKING:
    from localchat.engine.events import Done
    from localchat.engine.interface import Engine, EngineInfo
    from localchat.fit.hardware import Machine
    from localchat.fit.load_options import LoadOptions
    from localchat.fit.memory_plan import MemoryPlan
    from localchat.models.catalog import Catalog
    from localchat.models.onboarding import FirstRun

_HERE = "set in this chat"
_MACHINE_STAYS_S = 5.0


def open_screen(ctx: click.Context, setup: Setup, conversation: Conversation) -> int:
    """Chat on the screen, in a conversation that is new or goes on; returns the exit code. Raises
    LocalchatError."""
    workplace, settled = workplace_of(ctx, setup)
    return launch(workplace, settled, conversation)


def workplace_of(ctx: click.Context, setup: Setup) -> tuple[SessionContext, ModelSetup]:
    """What the screen works with, and the model it begins with. Raises LocalchatError."""
    # The word of the model that the screen begins with names its server; another word is of this machine.
    flags = {key: given for key, given in given_flags(ctx).items() if key != "remote"}

    def settled(word: str | None, changes: Mapping[str, str]) -> ModelSetup:
        given = {key: Given(text, _HERE) for key, text in changes.items()}
        for key in given:
            check_key(key, _HERE)
        model = word or setup.model.word
        return _settled(settle(setup.door, {**flags, **given}, model, setup.terminal))

    planner = _Planner()
    workplace = SessionContext(
        paths=setup.paths,
        environ=setup.door.environ,
        resolve=settled,
        request=request_for,
        plan=planner.plan,
        estimate=lambda name: planner.estimate(name, setup),
        first_run=lambda: _first_run(setup),
        remember=partial(_remember, setup.paths),
        keys=read_settings(setup.paths.settings_file).keys,
        history_file=setup.paths.data_dir / FILE if setup.settings.history else None,
    )
    return workplace, _settled(setup)


def _settled(setup: Setup) -> ModelSetup:
    options = engine_options(setup)

    def open_engine(say: Callable[[str], None]) -> "Engine":
        return setup.door.attach(setup, "terminal", say) or setup.door.open_engine(options, say)

    return ModelSetup(setup.model, setup.settings, options, open_engine)


class _Planner:
    """Plans loads. The machine is looked at once in a while: that takes a second where there are GPUs."""

    def __init__(self) -> None:
        self._machine: Machine | None = None
        self._looked_s = float("-inf")
        self._catalogue: Catalog = {}

    def plan(self, settled: ModelSetup, options: "LoadOptions") -> "MemoryPlan":
        from localchat.model_files.checkpoint import read_summary
        from localchat.models.assess import Subject, assess

        model = settled.model
        unloaded = read_summary(model.path, dummy_weights=settled.settings.dummy_weights)
        subject = Subject(model.name, unloaded, model.path, settled.settings.backend)
        return assess(subject, options, self._here(), None, speed=False).plan

    def estimate(self, name: str, setup: Setup) -> CatalogEstimate | None:
        from localchat.cli.fit import LEAST_SLOTS
        from localchat.engine.options import load_options
        from localchat.models.assess import Subject, assess
        from localchat.models.catalog import read_catalog
        from localchat.models.names import parse
        from localchat.models.synthetic.gguf import synthetic_model

        if not self._catalogue:
            self._catalogue = read_catalog(setup.paths)
        drawn = synthetic_model(parse(name, self._catalogue))
        if drawn is None:
            return None
        settings = setup.settings_for((drawn.name,))
        options = load_options(settings, max_slots=max(LEAST_SLOTS, settings.n))
        subject = Subject(drawn.name, drawn, None, settings.backend)
        plan = assess(subject, options, self._here(), None, speed=False).plan
        return CatalogEstimate(plan, drawn.file_bytes)

    def _here(self) -> "Machine":
        from localchat.models.assess import usable_machine

        if self._machine is None or time.monotonic() - self._looked_s > _MACHINE_STAYS_S:
            self._machine, self._looked_s = usable_machine(), time.monotonic()
        return self._machine


def _remember(
    paths: Paths, model: ResolvedModel, info: "EngineInfo | None", done: "Done | None"
) -> None:
    from localchat.models.speed_recorder import record_speed  # looks at the machine

    if model.remote is not None:
        return
    remember_model(model, paths)
    if info is not None and done is not None:
        record_speed(info, done, paths.state_dir)


def _first_run(setup: Setup) -> "FirstRun | None":
    from localchat.models.onboarding import first_run, is_first_run

    environ = setup.door.environ
    return first_run(setup.paths, environ) if is_first_run(setup.paths, environ) else None
