"""Services that a session gets from its front end: paths, environment, models and engines."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from localchat.config.paths import Paths
from localchat.config.presets import Preset
from localchat.config.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from localchat.chat.conversation import Conversation
    from localchat.documents.collection import Embed
    from localchat.documents.library import DocumentLibrary
    from localchat.engine.events import Done
    from localchat.engine.interface import EngineInfo
    from localchat.engine.options import EngineOptions
    from localchat.engine.request import GenerateRequest, Prompt
    from localchat.fit.load_options import LoadOptions
    from localchat.fit.memory_plan import MemoryPlan
    from localchat.fit.steps import MemoryStep
    from localchat.models.assess import ExpectedSpeed
    from localchat.models.onboarding import FirstRun
    from localchat.models.recommended_models import Recommendation
    from localchat.models.resolve import ResolvedModel
    from localchat.session.engine_holder import OpenEngine


class CatalogEstimate(NamedTuple):
    """Memory plan and file size of a model of the catalog that is not here."""

    plan: "MemoryPlan"
    file_bytes: int


class ModelSetup(NamedTuple):
    """A model with its settings, and how its engine is opened."""

    model: "ResolvedModel"
    settings: Settings
    options: "EngineOptions"
    open_engine: "OpenEngine"


class SetupChange(NamedTuple):
    """Another model, or other parameters."""

    apply: Callable[[], None]
    reload: bool
    """Applying it opens the engine again."""


class SessionContext(msgspec.Struct, frozen=True):
    """Services and data of the front end, for one session."""

    paths: Paths
    environ: Mapping[str, str]
    resolve: "Callable[[str | None, Mapping[str, str]], ModelSetup]"
    """Resolves a word (None: the model of the command) with the flags of the command and changes by key.
    Raises ModelMissing, UsageError."""
    request: "Callable[[Settings, Prompt], GenerateRequest]"
    plan: "Callable[[ModelSetup, LoadOptions], MemoryPlan]"
    """Memory that a load takes on this machine, from the model's headers. Raises LocalchatError."""
    estimate: "Callable[[str], CatalogEstimate | None]"
    """The same for a model of the catalog, from its published shape; None if that is unknown. Raises
    LocalchatError."""
    remember: "Callable[[ResolvedModel, EngineInfo | None, Done | None], str]"
    """Makes a model that answered the default of the next run, and records its speed. Returns a sentence that
    offers a faster build of its backend, once; otherwise an empty one. Blocks; raises OSError,
    LocalchatError."""
    first_run: "Callable[[], FirstRun | None]"
    """Hardware, external models and three models to begin with, if there is no model but the guide. Takes
    seconds; raises LocalchatError."""
    keys: Mapping[str, str]
    """The `[keys]` table of the settings file."""
    history_file: "Path | None"
    """None: conversations are not saved."""
    notices: tuple[str, ...] = ()
    """Sentences about the settings file, for the user."""
    presets: Mapping[str, Preset] = msgspec.field(default_factory=dict)
    """Of the settings file, by name."""
    memory_steps: "Callable[[ModelSetup], tuple[MemoryStep, ...]]" = lambda setup: ()
    """What would make room for a load that does not fit. Takes a second or two. Raises LocalchatError."""
    embed: "Embed | None" = None
    """Embeds texts for documents that were learned with an embedding model."""
    speed: "Callable[[ModelSetup], ExpectedSpeed | None]" = lambda setup: None
    """Decode rate that was measured here, or is expected; None if unknown. The first call may take a second.
    Raises LocalchatError."""
    catalog_speed: "Callable[[str], ExpectedSpeed | None]" = lambda name: None
    """The same for a model of the catalog."""
    recommended: "Callable[[], tuple[Recommendation, ...]]" = tuple
    """Models of the catalog that suit this machine, from quick to best. Takes about a second. Raises
    LocalchatError."""

    def owned(
        self, settings: Settings, prompt: "Prompt", conversation: "Conversation"
    ) -> "GenerateRequest":
        """A request whose KV the disk keeps for a conversation, where conversations are kept."""
        import msgspec

        owner = conversation.id if self.history_file is not None else ""
        return msgspec.structs.replace(self.request(settings, prompt), owner=owner)

    @property
    def library(self) -> "DocumentLibrary":
        """The documents of this user."""
        from localchat.documents.library import DocumentLibrary

        return DocumentLibrary(self.paths.data_dir / "documents", self.embed)
