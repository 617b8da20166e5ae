"""Services that a front end gives to a session: paths, environment, models and engines."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from localchat.config.paths import Paths
from localchat.config.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from localchat.chat.conversation import Conversation
    from localchat.config.mcp_servers import McpServer
    from localchat.documents.library import DocumentLibrary
    from localchat.engine.events import Done
    from localchat.engine.interface import EngineInfo
    from localchat.engine.options import EngineOptions
    from localchat.engine.request import GenerateRequest, Prompt
    from localchat.fit.load_options import LoadOptions
    from localchat.fit.memory_plan import MemoryPlan
    from localchat.fit.steps import MemoryStep
    from localchat.models.onboarding import FirstRun
    from localchat.models.recommended_models import Recommendation
    from localchat.models.resolve import ResolvedModel
    from localchat.session.engine_holder import OpenEngine


class CatalogEstimate(NamedTuple):
    """Memory plan and file size of a published model that is not on this machine."""

    plan: "MemoryPlan"
    file_bytes: int


class ModelSetup(NamedTuple):
    """A model with its settings, and a function that opens its engine."""

    model: "ResolvedModel"
    settings: Settings
    options: "EngineOptions"
    open_engine: "OpenEngine"


class SetupChange(NamedTuple):
    """A change to another model or other parameters."""

    apply: Callable[[], None]
    reload: bool
    """Whether applying the change opens the engine again."""


class SessionContext(msgspec.Struct, frozen=True):
    """Services and data of the front end, for one session.

    Size: it holds every service that a session uses.
    """

    paths: Paths
    environ: Mapping[str, str]
    resolve: "Callable[[str | None, Mapping[str, str]], ModelSetup]"
    """Resolves a model's name (None: the one of the command) with changed settings by key.

    The flags of the command apply too. Raises ModelMissing, UsageError."""
    request: "Callable[[Settings, Prompt], GenerateRequest]"
    plan: "Callable[[ModelSetup, LoadOptions], MemoryPlan]"
    """Plans the memory of a load on this machine, from the model's headers. Raises LocalchatError."""
    estimate: "Callable[[str], CatalogEstimate | None]"
    """Plans a published model from its shape. None if the shape is unknown. Raises LocalchatError."""
    remember: "Callable[[ResolvedModel, EngineInfo | None, Done | None], None]"
    """Makes a model that answered the default of the next run, and records its speed.

    Blocks. Raises OSError, LocalchatError."""
    first_run: "Callable[[], FirstRun | None]"
    """Finds hardware, external models and recommendations if the guide is the only model.

    Takes seconds. Raises LocalchatError."""
    keys: Mapping[str, str]
    """The `[keys]` table of the settings file."""
    history_file: "Path | None"
    """Database of the conversations. None if they are not saved."""
    notices: tuple[str, ...] = ()
    """Sentences about the settings file, for the user."""
    mcp_servers: "Mapping[str, McpServer]" = msgspec.field(default_factory=dict)
    """MCP servers of the settings file, by name."""
    memory_steps: "Callable[[ModelSetup], tuple[MemoryStep, ...]]" = lambda setup: ()
    """Finds steps that make room for a load. Takes a second or two. Raises LocalchatError."""
    recommended: "Callable[[], tuple[Recommendation, ...]]" = tuple
    """Returns published models that suit this machine, from quick to best.

    Takes about a second. Raises LocalchatError."""

    def owned(
        self, settings: Settings, prompt: "Prompt", conversation: "Conversation"
    ) -> "GenerateRequest":
        """Return a request whose KV is stored on disk, if conversations are saved."""
        request = self.request(settings, prompt)
        if self.history_file is None:
            return request
        return msgspec.structs.replace(request, owner=conversation.id)

    @property
    def library(self) -> "DocumentLibrary":
        """The documents of this user."""
        from localchat.documents.library import DocumentLibrary

        return DocumentLibrary(self.paths.data_dir / "documents")
