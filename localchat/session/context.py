"""What the screen is given from outside: folders, the environment, how a model is settled and opened."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from localchat.config.paths import Paths
from localchat.config.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from localchat.engine.events import Done
    from localchat.engine.interface import EngineInfo
    from localchat.engine.options import EngineOptions
    from localchat.engine.request import GenerateRequest, Prompt
    from localchat.fit.load_options import LoadOptions
    from localchat.fit.memory_plan import MemoryPlan
    from localchat.models.onboarding import FirstRun
    from localchat.models.resolve import ResolvedModel
    from localchat.session.engine_holder import OpenEngine


class CatalogEstimate(NamedTuple):
    """A model of the catalogue before it is fetched: what a load of it would take, and how large its files
    are."""

    plan: "MemoryPlan"
    file_bytes: int


class ModelSetup(NamedTuple):
    """A model that exists, the settings in force for it, how its engine is opened, and what opens it."""

    model: "ResolvedModel"
    settings: Settings
    options: "EngineOptions"
    open_engine: "OpenEngine"


class SetupChange(NamedTuple):
    """Another model, or other parameters."""

    apply: Callable[[], None]
    reload: bool
    """Applying it opens the engine again."""


@dataclass(frozen=True, slots=True)
class SessionContext:
    """settle(word, changes): the model that a word means (None: the one the command named) under the flags of
    the command and the changes made since, by key; raises ModelMissing, UsageError. plan: what a load with
    this wish would take of this machine, read from the header alone; raises LocalchatError. foresee(name): the
    same of a model of the catalogue, by its published shape, as `localchat fit NAME --offline` has it; None
    where that is not known; raises LocalchatError. remember(model, info, done): it answered so, and is the
    next run's; blocks; raises OSError, LocalchatError. first_run(): hardware, external models and three to
    begin with, where there is no model but the guide; takes seconds; raises LocalchatError. keys: the `[keys]`
    table of the settings file. history_file: None where nothing is kept on the disk."""

    paths: Paths
    environ: Mapping[str, str]
    resolve: "Callable[[str | None, Mapping[str, str]], ModelSetup]"
    request: "Callable[[Settings, Prompt], GenerateRequest]"
    plan: "Callable[[ModelSetup, LoadOptions], MemoryPlan]"
    estimate: "Callable[[str], CatalogEstimate | None]"
    remember: "Callable[[ResolvedModel, EngineInfo | None, Done | None], None]"
    first_run: "Callable[[], FirstRun | None]"
    keys: Mapping[str, str]
    history_file: "Path | None"
