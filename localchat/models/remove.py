"""Removes models: plans which files to delete and what that frees, then deletes them."""

from pathlib import Path
from typing import NamedTuple

from localchat.config.paths import Paths
from localchat.errors import LocalchatError, UsageError
from localchat.models.aliases import remove_alias
from localchat.models.external.stores import FOLDER, HUGGING_FACE, OLLAMA
from localchat.models.hub.manifest import forget, read
from localchat.models.index import Model, ModelIndex


class Removal(NamedTuple):
    """A planned removal."""

    model: Model
    files: tuple[Path, ...]
    """Files to delete, in order."""
    freed_bytes: int
    kept: str
    """Sentence on why less than the model's size is freed. Empty if all of it is."""
    orphans: tuple[str, ...]
    """Aliases of the model."""


def plan_removal(model: Model, index: ModelIndex, paths: Paths) -> Removal:
    """Plan a removal. Raises UsageError for the guide, and for files of other programs."""
    _refuse(model, paths)
    orphans = tuple(other.name for other in index.models if other.stands_for == model.name)
    if model.kind == "alias":
        dangling = not model.files
        kept = f"it is an alias; {model.stands_for} {'is gone already' if dangling else 'stays'}"
        return Removal(model, (), 0, kept, orphans)
    files = tuple(dict.fromkeys(_files(model)))
    freed = sum(_freed(file) for file in files)
    return Removal(model, files, freed, _kept(model, files, freed), orphans)


def carry_out(removal: Removal, paths: Paths) -> None:
    """Delete the files, and ignore missing ones. Raises LocalchatError if one cannot be deleted."""
    model = removal.model
    if model.kind == "alias":
        remove_alias(paths, model.name)
        return
    try:
        for file in removal.files:
            file.unlink(missing_ok=True)
        if model.installed is not None:
            forget(model.installed.folder, model.installed.manifest.name)
    except OSError as problem:
        raise LocalchatError(
            f"{model.name} cannot be removed: {problem.strerror or problem} ({problem.filename})",
            hint="what is left of it stays as it is; check the permissions and try again",
        ) from problem
    _remove_empty_folders(removal.files, paths.models_dir)


def _refuse(model: Model, paths: Paths) -> None:
    if model.kind == "guide":
        raise UsageError("the guide is part of localchat and cannot be removed")
    if model.kind == "alias":
        return
    if model.kind == "adopted":
        owner = "is in your folder"
        if model.origin != "folder":
            owner = f"belongs to {model.origin}"
        raise UsageError(
            f"{model.name} {owner} and is not deleted",
            hint=_elsewhere(model),
        )
    if model.path is not None and not model.path.is_relative_to(paths.models_dir):
        raise UsageError(
            f"{model.path} lies outside the models folder and is not touched",
            hint="delete the file yourself",
        )


def _elsewhere(model: Model) -> str:
    if model.origin == OLLAMA:
        return f"ollama rm {model.name.removeprefix('ollama/')} removes it there"
    if model.origin == HUGGING_FACE:
        return "hf cache rm removes it there"
    if model.origin == FOLDER:
        return "delete the file yourself, or look there no longer: localchat import FOLDER --forget"
    return "remove it with the program that it belongs to"


def _files(model: Model) -> tuple[Path, ...]:
    if model.installed is None:
        return model.files
    others = _needed_by_others(model)
    return tuple(file for file in model.files if file not in others)


def _needed_by_others(model: Model) -> frozenset[Path]:
    """Return the files that other models of the same repository use too."""
    assert model.installed is not None
    folder = model.installed.folder
    name = model.installed.manifest.name
    return frozenset(
        folder / file.path
        for manifest in read(folder)
        if manifest.name != name
        for file in manifest.files
    )


def _freed(file: Path) -> int:
    """Return the bytes that deleting this name frees. 0 for a link, or if another hard link stays."""
    if file.is_symlink() or not file.is_file():
        return 0
    about = file.stat()
    if about.st_nlink == 1:
        return about.st_size
    return 0


def _kept(model: Model, files: tuple[Path, ...], freed: int) -> str:
    if freed >= model.size_bytes:
        return ""
    if model.installed is not None and len(files) < len(model.files):
        return "another name of it stays, and needs its files"
    if any(file.is_symlink() for file in files):
        return f"only the link goes; {model.files[0].resolve()} stays"
    return "another link to the file stays"


def _remove_empty_folders(files: tuple[Path, ...], models_dir: Path) -> None:
    for file in files:
        for folder in file.parents:
            if folder == models_dir or not folder.is_relative_to(models_dir):
                break
            try:
                folder.rmdir()
            except OSError:
                break  # something else lies in it
