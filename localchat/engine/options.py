"""Options of an engine of our own. Apart from the engine, so that reading settings imports none of it."""

from pathlib import Path

import msgspec

from localchat.config.remotes import Remote
from localchat.config.routes import Route
from localchat.config.settings import Settings
from localchat.fit.load_options import LoadOptions

_MIB = 2**20
_NO_OPTIONS = LoadOptions()


class EngineOptions(msgspec.Struct, frozen=True):
    """A model, how it is loaded, and what only its engine needs to know."""

    model: Path
    """A file or folder."""
    load: LoadOptions = _NO_OPTIONS
    name: str = ""
    """What the user calls the model; empty: the stem of the file."""
    backend: str | None = None
    """A backend's name, or `module:Class`; None: the best that can run here."""
    speculation: bool = True
    """Draft tokens from earlier text."""
    sampling: dict[str, float] = msgspec.field(default_factory=dict)
    """Sampling defaults of the catalogue or the user, by name; they go before the model's own."""
    state_dir: Path | None = None
    """Folder with the record of builds that crashed and the speeds of past runs."""
    kv_folder: Path | None = None
    """Folder where the KV of conversations is kept; None: nowhere."""
    kv_folder_bytes: int = 0
    """Most bytes of it."""
    remote: Remote | None = None
    """A server that answers instead; then nothing is loaded here."""
    route: "RouteOptions | None" = None
    """Two models instead; then `model` is the small one."""
    audit: bool = False
    """Check the KV cache manager whenever idle (tests)."""


class RouteOptions(msgspec.Struct, frozen=True):
    """A small model, and a large one where it is needed."""

    route: Route
    small: EngineOptions
    large: EngineOptions


def load_options(settings: Settings, *, max_slots: int = _NO_OPTIONS.max_slots) -> LoadOptions:
    """The load that these settings ask for. A setting that has the name of an option is taken as it is."""
    # A draft model's name is looked up by who knows the models (models.resolve.planned_load).
    fields = set(LoadOptions.__struct_fields__) & set(Settings.__struct_fields__) - {"draft"}
    cache_mib = settings.cache_ram_mib
    return LoadOptions(
        **{name: getattr(settings, name) for name in fields},
        context_tokens=settings.context_length,
        kv_type=settings.kv_cache_type,
        max_slots=max_slots,
        cache_ram_bytes=None if cache_mib is None else cache_mib * _MIB,
        gpu_limit_bytes=_gigabytes(settings.vram_gb),
        kv_limit_bytes=_gigabytes(settings.kv_gb),
    )


def _gigabytes(limit: float | None) -> int | None:
    return None if limit is None else int(limit * 1e9)
