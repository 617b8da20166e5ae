"""Finds the sampling that the makers of a catalogue model recommend.

The settings file overrides it; it overrides the model file's own metadata.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from localchat.config.paths import Paths
from localchat.errors import LocalchatError
from localchat.models.catalog import Catalog, CatalogEntry, read_catalog
from localchat.models.external.stores import PREFIXES
from localchat.models.hub.manifest import installed
from localchat.models.names import entry_of_file, entry_of_title, find_entry, parse
from localchat.models.resolve import GUIDE, ResolvedModel


class RecommendedSampling(NamedTuple):
    """Sampling by its field names, with its source."""

    sampling: dict[str, float]
    entry: str
    """Name of the catalogue's entry (`qwen2.5:7b`)."""


NO_RECOMMENDATION: Final = RecommendedSampling({}, "")


def recommended_sampling(model: ResolvedModel, paths: Paths) -> RecommendedSampling:
    """Return the recommendation for a model, or NO_RECOMMENDATION if the catalogue lacks it.

    Raises UsageError for an invalid models.toml of the user.
    """
    if model.word == GUIDE:
        return NO_RECOMMENDATION
    catalogue = read_catalog(paths)
    entry = _entry(model, paths, catalogue)
    if entry is None:
        return NO_RECOMMENDATION
    stated = msgspec.structs.asdict(entry.sampling)
    sampling: dict[str, float] = {key: value for key, value in stated.items() if value is not None}
    if sampling:
        return RecommendedSampling(sampling, entry.name)
    return NO_RECOMMENDATION


def _entry(model: ResolvedModel, paths: Paths, catalogue: Catalog) -> CatalogEntry | None:
    for name in _words(model, paths):
        try:
            # A server looks this up every few seconds, and parse takes 1 ms to suggest similar names.
            if "/" not in name and find_entry(name, catalogue) is None:
                continue
            reference = parse(name, catalogue)
        except LocalchatError:
            continue
        if reference.entry is not None:
            return reference.entry
        if entry := _of_repository(reference.repository, catalogue):
            return entry
    return entry_of_file(model.path, catalogue)


def _words(model: ResolvedModel, paths: Paths) -> Iterator[str]:
    """Yield names by which the catalogue may list it, the most reliable first."""
    for entry in installed(paths.models_dir):
        if entry.path == model.path:
            yield f"hf.co/{entry.manifest.repository}"
    for name in model.names:
        prefix, _, tail = name.partition("/")
        bare = tail if prefix in PREFIXES else name
        # Ollama's own names are the catalogue's; a user's namespace on Ollama holds other models.
        if bare and not bare.startswith("/") and not name.lower().endswith(".gguf"):
            yield bare


def _of_repository(repository: str, catalogue: Catalog) -> CatalogEntry | None:
    name = repository.lower()
    for entry in catalogue.values():
        if any(source.repository.lower() == name for source in entry.sources):
            return entry
    return entry_of_title(name.partition("/")[2], catalogue)
