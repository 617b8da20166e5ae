"""Index of the models on this machine: guide, pulled models, loose files, aliases, other programs' models."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from localchat.config.paths import Paths
from localchat.errors import LocalchatError, ModelMissing
from localchat.model_files.checkpoint import weight_files
from localchat.models.aliases import read_aliases
from localchat.models.external.discovery import find_external_models
from localchat.models.gguf_files import models_in_folder, split_parts
from localchat.models.hub.manifest import Installed, installed
from localchat.models.hub.safe_paths import is_known_kind
from localchat.models.resolve import GUIDE, IN_COMMAND, locate

Kind = Literal["guide", "file", "link", "pulled", "alias", "adopted"]
"""`kind` in `list --json`. `adopted`: a model of another program."""


@dataclass(frozen=True, slots=True)
class Model:
    """One model of the index."""

    name: str
    kind: Kind
    origin: str
    """Its source, a phrase."""
    path: Path | None
    """The path that an engine opens; None where there is nothing to open."""
    files: tuple[Path, ...] = ()
    """All of its files."""
    trouble: str = ""
    """Why it cannot be used, as far as that is known without opening it."""
    stands_for: str = ""
    """Of an alias: its word."""
    owner_manifest: Path | None = None
    """See ExternalModel."""
    notes: tuple[str, ...] = ()
    """See ExternalModel."""
    installed: Installed | None = None
    """Of a pulled model: its manifest."""

    @property
    def size_bytes(self) -> int:
        """Of all files that exist."""
        return sum(file.stat().st_size for file in self.files if file.is_file())


class ModelIndex(NamedTuple):
    """All models, and what could not be read."""

    models: tuple[Model, ...]
    notices: tuple[str, ...]
    """Sentences about folders that could not be read."""

    def find(self, word: str) -> Model | None:
        """The model of exactly this name, letter case apart."""
        same = word.casefold()
        return next((model for model in self.models if model.name.casefold() == same), None)


def read_index(paths: Paths, environ: Mapping[str, str], *, root: Path = Path("/")) -> ModelIndex:
    """Find all models without opening them. `root`: where /usr stands.

    Raises LocalchatError where the aliases cannot be read.
    """
    own = [*_guide(paths), *_pulled(paths), *_loose(paths)]
    known = {file.resolve() for model in own for file in model.files if model.kind != "link"}
    found = find_external_models(environ, root=root)
    external = (
        Model(
            name=one.name,
            kind="adopted",
            origin=one.origin,
            path=one.path,
            files=split_parts(one.path) if one.path is not None else (),
            trouble=one.trouble,
            owner_manifest=one.owner_manifest,
            notes=one.notes,
        )
        for one in found.models
        if one.path is None or one.path.resolve() not in known
    )
    aliases = _aliases(paths, environ)
    return ModelIndex((*own, *aliases, *external), found.notices)


def find_model(word: str, index: ModelIndex, paths: Paths, environ: Mapping[str, str]) -> Model:
    """The model that `word` means, by the index or by `locate` (paths, short forms of a name).

    Raises ModelMissing, ModelInvalid, UsageError.
    """
    if model := index.find(word):
        return model
    found = locate(word, paths, IN_COMMAND, environ)
    if (model := index.find(found.name)) and model.path == found.path:
        return model
    here = found.path.resolve()
    for model in index.models:
        if model.kind != "alias" and model.path is not None and model.path.resolve() == here:
            return model
    return Model(found.name, "file", f"the path {found.path}", found.path, files_of(found.path))


def files_of(path: Path) -> tuple[Path, ...]:
    """All files of the model at a path: the parts of a split GGUF, or the known files of a checkpoint."""
    if not path.is_dir():
        return split_parts(path)
    known = sorted(file for file in path.iterdir() if is_known_kind(file.name) and file.is_file())
    weights = {*weight_files([file.name for file in known if file.suffix == ".safetensors"])}
    settings = [file for file in known if file.suffix not in (".safetensors", ".gguf")]
    return (*settings, *(path / name for name in sorted(weights)))


def _guide(paths: Paths) -> Iterator[Model]:
    try:
        path = locate(GUIDE, paths, "").path
    except ModelMissing:
        return
    yield Model(GUIDE, "guide", "built in", path, (path,))


def _pulled(paths: Paths) -> Iterator[Model]:
    for one in installed(paths.models_dir):
        name = one.manifest.name
        repository = one.manifest.repository
        trouble = "" if one.complete else "files of it are missing: pull it again"
        yield Model(name, "pulled", repository, one.path, one.files, trouble, installed=one)


def _loose(paths: Paths) -> Iterator[Model]:
    """GGUF files of the models folder that no manifest lists."""
    listed = {file for one in installed(paths.models_dir) for file in one.files}
    for name, path in models_in_folder(paths.models_dir).items():
        if path in listed:
            continue
        if path.is_symlink():
            yield Model(name, "link", f"link to {path.resolve()}", path, split_parts(path))
        else:
            yield Model(name, "file", "models folder", path, split_parts(path))


def _aliases(paths: Paths, environ: Mapping[str, str]) -> Iterator[Model]:
    for name, word in read_aliases(paths).aliases.items():
        try:
            path = locate(word, paths, f"the alias {name}", environ).path
        except LocalchatError as problem:
            yield Model(name, "alias", f"alias of {word}", None, (), problem.message, word)
            continue
        yield Model(name, "alias", f"alias of {word}", path, files_of(path), "", word)
