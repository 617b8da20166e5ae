"""Names of models: `family:size-quant`, `family:size`, `hf.co/user/repo:QUANT`, `user/repo`.

A name resolves to a repository and a quantization. A listing of the repository finds the files, so that split
and renamed files work.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from localchat.errors import ModelMissing, UsageError
from localchat.models.catalog import Catalog, CatalogEntry
from localchat.models.gguf_files import plain_stem, without_part_number
from localchat.models.hub.manifest import Format, Installed
from localchat.models.quantizations import (
    DEFAULT_QUANTIZATION,
    canonical,
    is_quantization,
    quantization_of,
    same_quantization,
)
from localchat.suggestions import closest

_HOSTS: Final = ("https://huggingface.co/", "https://hf.co/", "huggingface.co/", "hf.co/")
_PART: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_-])?")
_TAG: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}")
_FORMAT_SUFFIX: Final = re.compile(r"-(gguf|awq|gptq(-int[48])?|fp8|bf16)$")
_FORM: Final = "names look like qwen2.5:7b-q4_k_m, qwen2.5:7b, hf.co/user/repo:QUANT or user/repo"


class Reference(NamedTuple):
    """A parsed name of a model on the hub."""

    name: str
    """Canonical spelling. A catalogue name includes the quantization."""
    repository: str
    quantization: str | None
    """Requested quantization. None if the repository's listing decides."""
    exact: bool
    """Whether the user named the quantization."""
    format: Format | None
    """Requested format. None if the repository's listing decides."""
    entry: CatalogEntry | None

    @property
    def repositories(self) -> tuple[str, ...]:
        """Repositories that a pulled copy can come from, in lower case."""
        sources = self.entry.sources if self.entry is not None and not self.exact else ()
        return tuple(
            dict.fromkeys(
                name.lower() for name in (self.repository, *(s.repository for s in sources))
            )
        )

    def stored_name(self, quantization: str) -> str:
        """Return the name of the pulled model, once its quantization is known."""
        if self.entry is not None:
            quantization = quantization or self.quantization or ""
            return f"{self.entry.name}-{quantization.lower()}"
        return f"hf.co/{self.repository}" + (f":{quantization}" if quantization else "")


def is_hub_name(name: str) -> bool:
    """Return True for names of hub repositories: `user/repo`, `hf.co/user/repo:QUANT`."""
    try:
        return "/" in name and bool(_hub(name).repository)
    except UsageError:
        return False


def parse(typed: str, catalogue: Catalog) -> Reference:
    """Parse a name. Raises UsageError for an ambiguous or malformed one, ModelMissing for an unknown one."""
    if "/" in typed:
        return _hub(typed)
    entry, quantization = _entry(typed.lower(), catalogue)
    chosen = entry.source(quantization)
    if chosen is None and quantization is not None and is_quantization(quantization):
        gguf = next((source for source in entry.sources if source.format == "gguf"), None)
        chosen = None
        if gguf:
            chosen = (gguf, canonical(quantization))
    if chosen is None:
        raise ModelMissing(f"there is no {quantization} of {entry.name}", hint=_quantized(entry))
    source, written = chosen
    name = f"{entry.name}-{written.lower()}"
    return Reference(
        name, source.repository, written, quantization is not None, source.format, entry
    )


def _hub(name: str) -> Reference:
    path = next(
        (_page(name[len(host) :]) for host in _HOSTS if name.lower().startswith(host)), name
    ).rstrip("/")
    repository, colon, tag = path.partition(":")
    parts = repository.split("/")
    usable = len(parts) == 2 and all(_usable(part) for part in parts)
    if not usable or (colon and not _TAG.fullmatch(tag)) or ".." in tag:
        raise UsageError(f"{name!r} is not the name of a repository", hint=_FORM)
    if tag.lower() == "latest":  # Ollama's tag for the default
        tag = ""
        path = repository
    return Reference(f"hf.co/{path}", repository, tag or None, bool(tag), None, None)


def _page(path: str) -> str:
    """Return the name for a hub page: a repository, its list of files, or a file of its main branch."""
    parts = path.partition("?")[0].rstrip("/").split("/")
    if parts[2:] in (["tree", "main"], []):
        return "/".join(parts[:2])
    inside = parts[2:]
    if parts[2] in ("blob", "resolve", "tree"):
        inside = parts[4:] if parts[2] != "tree" and parts[3:4] == ["main"] else []
    file, dot, kind = inside[-1].rpartition(".") if inside else ("", "", "")
    if dot and kind.lower() == "gguf" and all(_usable(part) for part in inside):
        return f"{parts[0]}/{parts[1]}:{without_part_number(file)}"
    if len(inside) == 1 and len(parts) == 5:
        return f"{parts[0]}/{parts[1]}"
    return path


def _usable(part: str) -> bool:
    return _PART.fullmatch(part) is not None and ".." not in part


def find_entry(typed: str, catalogue: Catalog) -> tuple[CatalogEntry, str | None] | None:
    """Return the entry and the quantization after its name. None for an unknown name.

    Raises UsageError for an ambiguous name.
    """
    typed = typed.lower().removesuffix(":latest")
    if typed in catalogue:
        return catalogue[typed], None
    fitting = [name for name in catalogue if typed.startswith((f"{name}-", f"{name}:"))]
    if fitting:
        name = max(fitting, key=len)
        return catalogue[name], typed[len(name) + 1 :]
    family = [name for name, entry in catalogue.items() if entry.family == typed]
    if len(family) > 1:
        raise UsageError(
            f"{typed} is a family of {len(family)} models", hint=f"name one: {', '.join(family)}"
        )
    if family:
        return (catalogue[family[0]], None)
    return None


def _entry(typed: str, catalogue: Catalog) -> tuple[CatalogEntry, str | None]:
    """Return what find_entry finds. Raises ModelMissing for an unknown name."""
    if match := find_entry(typed, catalogue):
        return match
    typed = typed.removesuffix(":latest")
    raise ModelMissing(f"no model {typed!r} in the catalogue", hint=similar_names(typed, catalogue))


def _quantized(entry: CatalogEntry) -> str:
    names = [name for source in entry.sources for name in source.quantizations]
    return f"there are {', '.join(f'{entry.name}-{name.lower()}' for name in names)}"


def quantizations_hint(name: str, catalogue: Catalog) -> str:
    """Return a hint with the quantizations of the model that starts the name. Empty for other names."""
    try:
        entry, quantization = _entry(name.lower(), catalogue)
    except (ModelMissing, UsageError):
        return ""
    if quantization is not None:
        return _quantized(entry)
    return ""


def entry_of_file(path: Path, catalogue: Catalog) -> CatalogEntry | None:
    """Find the entry of a file by its name, such as `Qwen2.5-7B-Instruct-Q4_K_M.gguf`."""
    stem = plain_stem(path) if path.suffix.lower() == ".gguf" else path.name
    quantization = quantization_of(f"{stem}.gguf")
    if quantization:
        stem = re.sub(rf"[-_.]{re.escape(quantization)}$", "", stem, flags=re.IGNORECASE)
    return entry_of_title(stem, catalogue)


def entry_of_title(title: str, catalogue: Catalog) -> CatalogEntry | None:
    """Find an entry by the makers' title: a repository or file name without suffixes of the format."""
    bare = _bare(title)
    for entry in catalogue.values():
        if bare and any(
            _bare(source.repository.partition("/")[2]) == bare for source in entry.sources
        ):
            return entry
    return None


def _bare(title: str) -> str:
    return _FORMAT_SUFFIX.sub("", title.lower())


def similar_names(typed: str, names: Iterable[str], own: Iterable[str] = ()) -> str:
    """Return a hint with related and similar names, or the forms of names.

    own: names of models that are here. They come first.
    """
    close = list(dict.fromkeys((*_similar_own(typed, own), *_similar(typed, {*names, *own}))))[:8]
    if close:
        return f"the nearest names: {', '.join(close)}"
    return _FORM


def _similar_own(typed: str, own: Iterable[str]) -> list[str]:
    """Return the names whose last part begins like the typed one, most similar first.

    File names are long, so only their beginning is compared.
    """
    tails = {}
    for name in sorted(own):
        tail = name.rpartition("/")[2]
        tails[tail.lower()[: len(typed) + 1]] = name
    return [tails[near] for near in closest(typed, tails, count=3, min_similarity=0.7)]


def _similar(typed: str, names: Iterable[str]) -> list[str]:
    spellings = {name.lower(): name for name in sorted(names)}
    near = closest(typed, spellings.values(), count=4, min_similarity=0.5)
    family = typed.lower().partition(":")[0]
    same_family = [
        name
        for lower, name in spellings.items()
        if lower.partition(":")[0] == family or lower.startswith(f"{family}/")
    ]
    return [*same_family, *near]


def find_pulled(reference: Reference, models: Iterable[Installed]) -> Installed | None:
    """Return the pulled model of a reference: its default quantization, else the only one here.

    Raises UsageError if several match.
    """
    matches = [
        model for model in models if model.manifest.repository.lower() in reference.repositories
    ]
    quantization = reference.quantization or DEFAULT_QUANTIZATION
    # Of two names for the same files, the requested one comes first.
    matches.sort(key=lambda model: model.manifest.name.lower() != reference.name.lower())
    for model in matches:
        if _is(model, reference, quantization):
            return model
    if reference.exact or not matches:
        return None
    if len(matches) == 1:
        return matches[0]
    raise UsageError(
        f"{reference.name} matches {len(matches)} models here",
        hint=f"name one: {', '.join(model.manifest.name for model in matches)}",
    )


def _is(model: Installed, reference: Reference, quantization: str) -> bool:
    """Return True if the model has this quantization, or its file has this name."""
    manifest = model.manifest
    return same_quantization(manifest.quantization, quantization) or manifest.name.lower() in (
        reference.name.lower(),
        f"hf.co/{reference.repository}:{quantization}".lower().removesuffix(".gguf"),
    )
