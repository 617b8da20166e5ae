"""Index of the models on this machine: guide, pulled models, loose files, aliases, other programs' models."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from localchat.config.paths import Paths
from localchat.errors import LocalchatError, ModelMissing
from localchat.model_files.checkpoint import weight_files
from localchat.models.aliases import read_aliases
from localchat.models.external.discovery import find_external_models
from localchat.models.gguf_files import split_parts
from localchat.models.hub.manifest import Installed, installed
from localchat.models.hub.safe_paths import is_known_kind
from localchat.models.resolve import GUIDE, IN_COMMAND, locate, loose_files

Kind = Literal["guide", "file", "link", "pulled", "alias", "adopted", "path"]
"""`kind` in `list --json`. `adopted`: a model of another program. `path`: one that was used by its path."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the index."""

    name: str
    kind: Kind
    origin: str
    """Phrase on its source."""
    path: Path | None
    """Path that an engine opens. None if there is nothing to open."""
    files: tuple[Path, ...] = ()
    """All files of the model."""
    trouble: str = ""
    """Why it cannot be used, as far as that shows without opening it."""
    stands_for: str = ""
    """Name behind an alias."""
    notes: tuple[str, ...] = ()
    """See ExternalModel."""
    installed: Installed | None = None
    """Manifest of a pulled model."""

    @property
    def size_bytes(self) -> int:
        """Size of all files that exist."""
        return sum(file.stat().st_size for file in self.files if file.is_file())


class ModelIndex(NamedTuple):
    """All models, and notices about folders that could not be read."""

    models: tuple[Model, ...]
    notices: tuple[str, ...]
    """Sentences about folders that could not be read."""

    def find(self, name: str) -> Model | None:
        """Return the model of exactly this name, whatever its letter case."""
        same = name.casefold()
        return next((model for model in self.models if model.name.casefold() == same), None)


def read_index(paths: Paths, environ: Mapping[str, str]) -> ModelIndex:
    """Find all models without opening them. Raises LocalchatError if the aliases cannot be read."""
    own = [*_guide(paths), *_pulled(paths), *_loose(paths)]
    own_files = {file.resolve() for model in own for file in model.files if model.kind != "link"}
    discovered = find_external_models(environ)
    external = (
        Model(
            name=match.name,
            kind="adopted",
            origin=match.origin,
            path=match.path,
            files=split_parts(match.path) if match.path is not None else (),
            trouble=match.trouble,
            notes=match.notes,
        )
        for match in discovered.models
        if match.path is None or match.path.resolve() not in own_files
    )
    aliases = _aliases(paths, environ)
    return ModelIndex((*own, *aliases, *external), discovered.notices)


def used_by_path(names: Iterable[str], models: Iterable[Model]) -> Iterator[Model]:
    """Yield the models whose paths are among used names, without those in `models`."""
    listed = {_file_id(model.path) for model in models if model.path is not None}
    for name in names:
        path = Path(name)
        if not path.is_absolute() or _file_id(path) in listed:
            continue
        try:
            if not path.exists():
                continue
            files = files_of(path)
        except OSError:
            continue  # the name is too long, or the folder is not accessible
        if files:
            listed.add(_file_id(path))
            yield Model(name, "path", "used by its path", path, files)


def _file_id(path: Path) -> object:
    """Return what identifies a file, whichever link names it."""
    try:
        status = path.stat()
    except (OSError, ValueError):  # a name may have characters that no file name has
        return path
    return status.st_dev, status.st_ino


def find_model(name: str, index: ModelIndex, paths: Paths, environ: Mapping[str, str]) -> Model:
    """Return the model with this name, from the index or by `locate` (paths, short forms).

    Raises ModelMissing, ModelInvalid, UsageError.
    """
    if model := index.find(name):
        return model
    resolved = locate(name, paths, IN_COMMAND, environ)
    if (model := index.find(resolved.name)) and model.path == resolved.path:
        return model
    real = resolved.path.resolve()
    for model in index.models:
        if model.kind != "alias" and model.path is not None and model.path.resolve() == real:
            return model
    return Model(
        resolved.name, "file", f"the path {resolved.path}", resolved.path, files_of(resolved.path)
    )


def files_of(path: Path) -> tuple[Path, ...]:
    """Return all files of the model at a path: parts of a split GGUF, or known files of a checkpoint."""
    if not path.is_dir():
        return split_parts(path)
    files = sorted(file for file in path.iterdir() if is_known_kind(file.name) and file.is_file())
    weights = {*weight_files([file.name for file in files if file.suffix == ".safetensors"])}
    settings = [file for file in files if file.suffix not in (".safetensors", ".gguf")]
    return (*settings, *(path / name for name in sorted(weights)))


def _guide(paths: Paths) -> Iterator[Model]:
    try:
        path = locate(GUIDE, paths, "").path
    except ModelMissing:
        return
    yield Model(GUIDE, "guide", "built in", path, (path,))


def _pulled(paths: Paths) -> Iterator[Model]:
    for entry in installed(paths.models_dir):
        name = entry.manifest.name
        repository = entry.manifest.repository
        trouble = "files of it are missing: pull it again"
        if entry.complete:
            trouble = ""
        yield Model(name, "pulled", repository, entry.path, entry.files, trouble, installed=entry)


def _loose(paths: Paths) -> Iterator[Model]:
    """Yield the GGUF files of the models folder that no manifest lists."""
    for name, path in loose_files(installed(paths.models_dir), paths).items():
        if path.is_symlink():
            yield Model(name, "link", f"link to {path.resolve()}", path, split_parts(path))
        else:
            yield Model(name, "file", "models folder", path, split_parts(path))


def _aliases(paths: Paths, environ: Mapping[str, str]) -> Iterator[Model]:
    for name, target in read_aliases(paths).aliases.items():
        try:
            path = locate(target, paths, f"the alias {name}", environ).path
        except LocalchatError as problem:
            yield Model(name, "alias", f"alias of {target}", None, (), problem.message, target)
            continue
        yield Model(name, "alias", f"alias of {target}", path, files_of(path), "", target)
