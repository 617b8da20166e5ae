"""Stores model aliases and the user's model folders in a JSON file.

An alias stands for a name, not for a file, so it stays correct when its model is pulled again. Unlike state,
the file contains the user's own input, so a damaged file is an error.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from localchat.config.paths import Paths
from localchat.errors import LocalchatError, UsageError, os_errors_as, reason
from localchat.models.external.stores import PREFIXES
from localchat.state_file import StateFile

_FILE: Final = "bookmarks.json"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]{0,99}")
_RESERVED: Final = frozenset({"guide", *PREFIXES})


class Aliases(msgspec.Struct, frozen=True):
    """Content of the file."""

    aliases: dict[str, str] = {}
    """Model name behind each alias."""
    folders: tuple[str, ...] = ()
    """Absolute paths, in the order in which they were added."""


class ModelAlias(NamedTuple):
    """A name of the user for a model."""

    name: str
    target: str


def find_alias(name: str, stored: Aliases) -> ModelAlias | None:
    """Return the alias of this name. Letter case matters only if several names differ in nothing else."""
    if name in stored.aliases:
        return ModelAlias(name, stored.aliases[name])
    matches = [alias for alias in stored.aliases if alias.casefold() == name.casefold()]
    if len(matches) != 1:
        return None
    return ModelAlias(matches[0], stored.aliases[matches[0]])


def check_name(name: str) -> None:
    """Raise UsageError unless `name` can name a model: one word, not a path, not reserved."""
    if not _NAME.fullmatch(name) or name.lower().endswith(".gguf"):
        raise UsageError(
            f"{name!r} cannot be the name of a model",
            hint="a name has only letters, digits and . _ - : +, and does not end with .gguf",
        )
    if name.lower() in _RESERVED:
        raise UsageError(f"{name} is already in use", hint="choose another name")


def read_aliases(paths: Paths) -> Aliases:
    """Read aliases and folders. Raises LocalchatError for a file that cannot be read."""
    file = _file(paths)
    try:
        return file.read_strictly()
    except (OSError, msgspec.DecodeError) as problem:
        raise LocalchatError(
            f"the aliases and folders in {file.path} cannot be read: {reason(problem)}",
            hint="repair the file or delete it",
        ) from problem


def add_alias(paths: Paths, name: str, target: str) -> None:
    """Make `name` an alias of `target`, and replace an older one. Raises UsageError, LocalchatError."""
    check_name(name)
    _update(paths, lambda stored: replace(stored, aliases={**stored.aliases, name: target}))


def remove_alias(paths: Paths, name: str) -> None:
    """Remove an alias. Raises LocalchatError."""

    def without(stored: Aliases) -> Aliases:
        left = {other: target for other, target in stored.aliases.items() if other != name}
        return replace(stored, aliases=left)

    _update(paths, without)


def add_folder(paths: Paths, folder: Path) -> None:
    """Add a folder to search for models. Raises LocalchatError."""
    _update(
        paths,
        lambda stored: replace(
            stored, folders=tuple(dict.fromkeys((*stored.folders, str(folder))))
        ),
    )


def remove_folder(paths: Paths, folder: Path) -> bool:
    """Stop searching a folder, and keep its files. False if it was not searched. Raises LocalchatError."""
    if str(folder) not in read_aliases(paths).folders:
        return False

    def without(stored: Aliases) -> Aliases:
        left = tuple(other for other in stored.folders if other != str(folder))
        return replace(stored, folders=left)

    _update(paths, without)
    return True


def _file(paths: Paths) -> StateFile[Aliases]:
    return StateFile(paths.data_dir / _FILE, Aliases, Aliases())


def _update(paths: Paths, change: Callable[[Aliases], Aliases]) -> None:
    """Write `change` of the stored content."""
    from filelock import FileLock

    file = _file(paths)
    path = paths.data_dir / _FILE
    with os_errors_as(LocalchatError, f"{path} cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Two processes must not lose each other's changes.
        with FileLock(path.with_suffix(".lock")):
            content = change(read_aliases(paths))
            file.write(replace(content, aliases=dict(sorted(content.aliases.items()))))
