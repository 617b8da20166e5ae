"""Options of our engines. This module is separate, so that reading settings does not import an engine."""

from pathlib import Path

import msgspec

from localchat.config.remotes import Remote
from localchat.config.settings import Settings
from localchat.fit.load_options import LoadOptions

_MIB = 2**20
_NO_OPTIONS = LoadOptions()


class EngineOptions(msgspec.Struct, frozen=True):
    """A model, its load options, and other options of its engine."""

    model: Path
    """Path of a file or folder."""
    load: LoadOptions = _NO_OPTIONS
    name: str = ""
    """Name for users. Empty: the stem of the file name."""
    backend: str | None = None
    """Name of a backend, or `module:Class`. None: the best backend that can run here."""
    speculation: bool = True
    """Whether to draft tokens from earlier text."""
    sampling: dict[str, float] = msgspec.field(default_factory=dict)
    """Sampling defaults of the catalogue or the user by name. They override the model's own."""
    state_dir: Path | None = None
    """Folder with the record of crashed builds."""
    kv_folder: Path | None = None
    """Folder for the KV of conversations. None: nothing is stored."""
    kv_folder_bytes: int = 0
    """Maximum size of this folder."""
    remote: Remote | None = None
    """Server that answers instead, so that no model is loaded here."""


def load_options(settings: Settings, *, max_slots: int = _NO_OPTIONS.max_slots) -> LoadOptions:
    """Return the load options of the settings. Settings with the name of an option are copied."""
    # models.resolve.planned_load resolves the names of these files.
    files = {"draft", "mmproj", "lora"}
    fields = set(LoadOptions.__struct_fields__) & set(Settings.__struct_fields__) - files
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
