"""What the user told of models: aliases, and folders to look into. A small JSON file in the data folder.

An alias stands for a word, not for a file, so it follows its model when that is pulled anew.
"""

import re
from pathlib import Path
from typing import Final

import msgspec

from localchat.config.paths import Paths
from localchat.errors import LocalchatError, UsageError, reason
from localchat.models.external.base import PREFIXES
from localchat.state_file import StateFile

_FILE: Final = "bookmarks.json"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]{0,99}")
_TAKEN: Final = frozenset({"guide", *PREFIXES})


class Aliases(msgspec.Struct, frozen=True):
    """`aliases`: the word behind each name. `folders`: absolute, in the order in which they came."""

    aliases: dict[str, str] = {}
    folders: tuple[str, ...] = ()


def check_name(name: str) -> None:
    """Raise UsageError unless `name` can be a model's own name: one word, no path, nobody else's."""
    if not _NAME.fullmatch(name) or name.lower().endswith(".gguf"):
        raise UsageError(
            f"{name!r} cannot be the name of a model",
            hint="a name has letters, digits and . _ - : + alone, and does not end with .gguf",
        )
    if name.lower() in _TAKEN:
        raise UsageError(f"{name} means something else already", hint="choose another name")


def read_aliases(paths: Paths) -> Aliases:
    """What was told so far. Raises LocalchatError for a file that cannot be read."""
    file = _file(paths)
    try:
        return file.read_strictly()
    except (OSError, msgspec.DecodeError) as problem:
        raise LocalchatError(
            f"the aliases and folders in {file.path} cannot be read: {reason(problem)}",
            hint="mend the file or delete it",
        ) from problem


def add_alias(paths: Paths, name: str, word: str) -> None:
    """Let `name` stand for `word`, in place of what it stood for. Raises UsageError, LocalchatError."""
    check_name(name)
    known = read_aliases(paths)
    _write(paths, Aliases({**known.aliases, name: word}, known.folders))


def remove_alias(paths: Paths, name: str) -> None:
    """Forget an alias. Raises LocalchatError."""
    known = read_aliases(paths)
    left = {other: word for other, word in known.aliases.items() if other != name}
    _write(paths, Aliases(left, known.folders))


def add_folder(paths: Paths, folder: Path) -> None:
    """Look for models in this folder from now on. Raises LocalchatError."""
    known = read_aliases(paths)
    folders = dict.fromkeys((*known.folders, str(folder)))
    _write(paths, Aliases(known.aliases, tuple(folders)))


def remove_folder(paths: Paths, folder: Path) -> bool:
    """Look there no longer; whether it was one. Its files stay. Raises LocalchatError."""
    known = read_aliases(paths)
    if str(folder) not in known.folders:
        return False
    left = tuple(other for other in known.folders if other != str(folder))
    _write(paths, Aliases(known.aliases, left))
    return True


def _file(paths: Paths) -> StateFile[Aliases]:
    return StateFile(paths.data_dir / _FILE, Aliases, Aliases())


def _write(paths: Paths, bookmarks: Aliases) -> None:
    ordered = Aliases(dict(sorted(bookmarks.aliases.items())), bookmarks.folders)
    file = _file(paths)
    try:
        file.write(ordered)
    except OSError as problem:
        raise LocalchatError(f"{file.path} cannot be written: {reason(problem)}") from problem
