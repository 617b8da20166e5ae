"""Aliases of models and the user's extra model folders, in a small JSON file in the data folder.

An alias stands for a word, not for a file, so it stays right when its model is pulled again. Unlike state,
the file holds the user's own input, so a damaged one is an error.
"""

import re
from pathlib import Path
from typing import Final

import msgspec

from localchat.config.paths import Paths
from localchat.errors import LocalchatError, UsageError, reason
from localchat.models.external.stores import PREFIXES
from localchat.state_file import StateFile

_FILE: Final = "bookmarks.json"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]{0,99}")
_TAKEN: Final = frozenset({"guide", *PREFIXES})


class Aliases(msgspec.Struct, frozen=True):
    """The content of the file."""

    aliases: dict[str, str] = {}
    """The word that each name stands for."""
    folders: tuple[str, ...] = ()
    """Absolute paths, in the order in which they were added."""


def check_name(name: str) -> None:
    """Raise UsageError unless `name` can name a model: one word, not a path, not reserved."""
    if not _NAME.fullmatch(name) or name.lower().endswith(".gguf"):
        raise UsageError(
            f"{name!r} cannot be the name of a model",
            hint="a name has only letters, digits and . _ - : +, and does not end with .gguf",
        )
    if name.lower() in _TAKEN:
        raise UsageError(f"{name} means something else already", hint="choose another name")


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


def add_alias(paths: Paths, name: str, word: str) -> None:
    """Make `name` an alias of `word`, replacing an older one. Raises UsageError, LocalchatError."""
    check_name(name)
    known = read_aliases(paths)
    _write(paths, Aliases({**known.aliases, name: word}, known.folders))


def remove_alias(paths: Paths, name: str) -> None:
    """Remove an alias. Raises LocalchatError."""
    known = read_aliases(paths)
    left = {other: word for other, word in known.aliases.items() if other != name}
    _write(paths, Aliases(left, known.folders))


def add_folder(paths: Paths, folder: Path) -> None:
    """Add a folder to search for models. Raises LocalchatError."""
    known = read_aliases(paths)
    folders = dict.fromkeys((*known.folders, str(folder)))
    _write(paths, Aliases(known.aliases, tuple(folders)))


def remove_folder(paths: Paths, folder: Path) -> bool:
    """Remove a folder from the search, not its files; False if it was not one. Raises LocalchatError."""
    known = read_aliases(paths)
    if str(folder) not in known.folders:
        return False
    left = tuple(other for other in known.folders if other != str(folder))
    _write(paths, Aliases(known.aliases, left))
    return True


def _file(paths: Paths) -> StateFile[Aliases]:
    return StateFile(paths.data_dir / _FILE, Aliases, Aliases())


def _write(paths: Paths, content: Aliases) -> None:
    ordered = Aliases(dict(sorted(content.aliases.items())), content.folders)
    file = _file(paths)
    try:
        file.write(ordered)
    except OSError as problem:
        raise LocalchatError(f"{file.path} cannot be written: {reason(problem)}") from problem
