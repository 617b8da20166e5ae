"""Finds the sampling that the makers of a catalogue model recommend.

The settings file overrides it; it overrides the model file's own metadata.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from localchat.config.paths import Paths
from localchat.errors import LocalchatError
from localchat.models.catalog import Catalog, CatalogEntry, read_catalog
from localchat.models.gguf_files import plain_stem
from localchat.models.hub.manifest import installed
from localchat.models.names import find_entry, parse
from localchat.models.quantizations import quantization_of
from localchat.models.resolve import GUIDE, ResolvedModel

_STORE_PREFIXES: Final = ("ollama/", "lmstudio/", "hf/", "llamacpp/", "folder/")
_SUFFIX: Final = re.compile(r"-(gguf|awq|gptq(-int[48])?|fp8|bf16)$")


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
    sampling = {key: float(value) for key, value in stated.items() if value is not None}
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
    return _of_title(_title(model.path), catalogue)


def _words(model: ResolvedModel, paths: Paths) -> Iterator[str]:
    """Yield names by which the catalogue may list it, the most reliable first."""
    for entry in installed(paths.models_dir):
        if entry.path == model.path:
            yield f"hf.co/{entry.manifest.repository}"
    for name in (model.name, model.word):
        bare = next((name[len(k) :] for k in _STORE_PREFIXES if name.startswith(k)), name)
        # Ollama's own names are the catalogue's; a user's namespace on Ollama holds other models.
        if bare and not bare.startswith("/") and not name.lower().endswith(".gguf"):
            yield bare


def _of_repository(repository: str, catalogue: Catalog) -> CatalogEntry | None:
    name = repository.lower()
    for entry in catalogue.values():
        if any(source.repository.lower() == name for source in entry.sources):
            return entry
    return _of_title(name.partition("/")[2], catalogue)


def _of_title(title: str, catalogue: Catalog) -> CatalogEntry | None:
    """Find an entry by the makers' title: a repository or file name without suffixes of the format."""
    bare = _bare(title)
    for entry in catalogue.values():
        if bare and any(
            _bare(source.repository.partition("/")[2]) == bare for source in entry.sources
        ):
            return entry
    return None


def _bare(title: str) -> str:
    return _SUFFIX.sub("", title.lower())


def _title(path: Path) -> str:
    """Return `qwen2.5-7b-instruct` for `Qwen2.5-7B-Instruct-Q4_K_M.gguf`, and for its parts."""
    stem = plain_stem(path) if path.suffix.lower() == ".gguf" else path.name
    quantization = quantization_of(f"{stem}.gguf")
    if quantization:
        stem = re.sub(rf"[-_.]{re.escape(quantization)}$", "", stem, flags=re.IGNORECASE)
    return stem
