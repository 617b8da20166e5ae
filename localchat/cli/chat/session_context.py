"""Build the context of a chat session, which resolves, plans and remembers models."""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from localchat.cli.chat.conversation_options import HISTORY_FILE
from localchat.cli.resolve import (
    Inputs,
    Setup,
    chat_slots,
    engine_options,
    open_engine,
    record_use,
    request_for,
    resolve_inputs,
    subject_of,
)
from localchat.config.settings import Given, check_key
from localchat.config.settings_file import read_settings
from localchat.fit.report import USUAL_LENGTH
from localchat.models.resolve import ResolvedModel, planned_load
from localchat.session.context import CatalogEstimate, ModelSetup, SessionContext

# The functions that need the planner and its hardware probe import them, so that the first frame does not wait.
if TYPE_CHECKING:
    from localchat.engine.events import Done
    from localchat.engine.interface import Engine, EngineInfo
    from localchat.fit.hardware import Machine
    from localchat.fit.load_options import LoadOptions
    from localchat.fit.memory_plan import MemoryPlan
    from localchat.fit.steps import MemoryStep
    from localchat.models.catalog import Catalog
    from localchat.models.onboarding import FirstRun
    from localchat.models.recommended_models import Recommendation

_ORIGIN = "set in this chat"
_MACHINE_FRESH_S = 5.0


def session_context(setup: Setup) -> tuple[SessionContext, ModelSetup]:
    """Return the context of a session, and its first model. Raises LocalchatError."""
    # The first model names its own server. All other models are on this machine.
    shared_flags = dict(setup.flags)
    shared_flags.pop("remote", None)

    def resolved(name: str | None, changes: Mapping[str, str]) -> ModelSetup:
        for key in changes:
            check_key(key, _ORIGIN)
        session_settings = {key: Given(text, _ORIGIN) for key, text in changes.items()}
        inputs = Inputs(setup.app, shared_flags | session_settings, name or setup.model.word)
        return model_setup(resolve_inputs(inputs, setup.terminal))

    def remember(model: ResolvedModel, info: "EngineInfo | None", done: "Done | None") -> None:
        record_use(model, setup.paths, lambda: info, done)

    planner = LoadPlanner(setup)
    file = read_settings(setup.paths.settings_file)
    context = SessionContext(
        paths=setup.paths,
        environ=setup.app.environ,
        resolve=resolved,
        request=request_for,
        plan=planner.plan,
        estimate=planner.estimate,
        recommended=lambda: _recommended(setup),
        memory_steps=planner.memory_steps,
        first_run=lambda: _first_run(setup),
        remember=remember,
        keys=file.keys,
        notices=(*Inputs(setup.app, {}).notices, *filter(None, (setup.model.notice,))),
        mcp_servers=file.mcp_servers,
        history_file=setup.paths.data_dir / HISTORY_FILE if setup.settings.history else None,
    )
    return context, model_setup(setup)


def model_setup(setup: Setup) -> ModelSetup:
    """Return the model of a command as a session uses it."""

    def opened(notify: Callable[[str], None]) -> "Engine":
        return open_engine(setup, "terminal", notify)

    return ModelSetup(setup.model, setup.settings, engine_options(setup), opened)


class LoadPlanner:
    """Plans loads for the screens.

    The hardware is probed again only after a few seconds, because a probe takes a second on machines with GPUs.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._machine: Machine | None = None
        self._probed_s = float("-inf")
        self._catalog: Catalog = {}

    def plan(self, setup: ModelSetup, options: "LoadOptions") -> "MemoryPlan":
        """Return the memory plan of a load, from the headers of the model. Raises LocalchatError."""
        from localchat.models.assess import assess

        subject = subject_of(setup.model, setup.settings)
        return assess(subject, options, self._usable_machine(), None, speed=False).plan

    def memory_steps(self, setup: ModelSetup) -> "tuple[MemoryStep, ...]":
        """Return the steps that make room for a model. Raises LocalchatError."""
        from localchat.models.substitutes import memory_steps

        if setup.model.remote is not None:
            return ()
        return memory_steps(
            subject_of(setup.model, setup.settings),
            setup.options.load,
            self._usable_machine(),
            self._setup.paths,
            self._setup.app.environ,
        )

    def estimate(self, name: str) -> CatalogEstimate | None:
        """Estimate the memory of a catalog model. None if its shape is unknown. Raises LocalchatError.

        A usual context is planned, unless the settings name another.
        """
        from localchat.models.assess import Subject, assess
        from localchat.models.catalog import read_catalog
        from localchat.models.names import parse
        from localchat.models.published_shapes import published_model

        if not self._catalog:
            self._catalog = read_catalog(self._setup.paths)
        model = published_model(parse(name, self._catalog))
        if model is None:
            return None
        settings = self._setup.settings_for((model.name,))
        options = planned_load(settings, self._setup.paths, max_slots=chat_slots(settings))
        if options.context_tokens is None:
            tokens = min(USUAL_LENGTH, model.context_train or USUAL_LENGTH)
            options = msgspec.structs.replace(options, context_tokens=tokens)
        subject = Subject(model.name, model, None, settings.backend)
        report = assess(subject, options, self._usable_machine(), None, speed=False)
        return CatalogEstimate(report.plan, model.file_bytes)

    def _usable_machine(self) -> "Machine":
        from localchat.backend_api.registry import usable_machine

        if self._machine is None or time.monotonic() - self._probed_s > _MACHINE_FRESH_S:
            self._machine = usable_machine()
            self._probed_s = time.monotonic()
        return self._machine


def _first_run(setup: Setup) -> "FirstRun | None":
    from localchat.models.onboarding import first_run, is_first_run

    environ = setup.app.environ
    if is_first_run(setup.paths, environ):
        return first_run(setup.paths, environ)
    return None


def _recommended(setup: Setup) -> "tuple[Recommendation, ...]":
    from localchat.models.recommended_models import recommended_models

    return recommended_models(setup.paths)
