"""File names for `@` in a message: completion and mentions."""

import re
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Final

from textual.fuzzy import FuzzySearch

from localchat.config.paths import expand_home
from localchat.documents.folder import entries

_PUNCTUATION: Final = ".,;:!?)"
_ENDINGS: Final = tuple(
    f".{ending}"
    for ending in (
        *("c", "cpp", "csv", "docx", "go", "h", "html", "ini", "java", "js", "json", "log", "md"),
        *("pdf", "py", "rs", "sh", "sql", "tex", "toml", "ts", "tsx", "txt", "xml", "yaml", "yml"),
    )
)
"""Endings of files that people ask about. A word with such an ending certainly names a file."""


def list_folder(typed: str) -> tuple[str, ...]:
    """List the folder of a partly typed path, such as `~/Doc`, `/etc/` or `../x`."""
    parent, _, name = typed.rpartition("/")
    folder = expand_home(f"{parent}/")
    files, folders = entries(folder, hidden=name.startswith("."))
    names = [f"{parent}/{path.name}" for path in files]
    return tuple(sorted((*names, *(f"{parent}/{path.name}/" for path in folders))))


def is_path(name: str) -> bool:
    """Return True if a name after `@` is a path, not a search."""
    return name.startswith(("/", "~/", "./", "../"))


def path_of(name: str, root: Path) -> Path:
    """Return the path of the file that a name after `@` means."""
    if is_path(name):
        return expand_home(name)
    return root / name


def mentioned_files(text: str, root: Path) -> list[str]:
    """Return the names after `@` that are files. `@@` is a plain @."""
    files = (_existing_file(name, root) for name in _names(text))
    return list(dict.fromkeys(name for name in files if name is not None))


def missing_paths(text: str, root: Path) -> list[str]:
    """Return the names after `@` that look like files but do not exist.

    A path or a name with a file's ending looks like a file. Other names may be people or decorators.
    """
    names = (name for name in _names(text) if is_path(name) or _has_ending(name))
    return list(dict.fromkeys(name for name in names if _existing_file(name, root) is None))


def rank_names(letters: str, names: Sequence[str]) -> list[str]:
    """Return the names that contain the letters in order, best match first."""
    if not letters:
        return list(names)
    search = FuzzySearch(case_sensitive=False)
    scored = [(-search.match(letters, name)[0], name) for name in names]
    # A sort keeps the order of names that match equally well.
    return [name for score, name in sorted(scored, key=itemgetter(0)) if score < 0]


def _names(text: str) -> list[str]:
    return re.findall(r"(?<!\S)@([^\s@]\S*)", text)


def _has_ending(name: str) -> bool:
    return name.rstrip(_PUNCTUATION).lower().endswith(_ENDINGS)


def _existing_file(name: str, root: Path) -> str | None:
    """Return the name, with or without punctuation at its end, if it is a file."""
    for candidate in (name, name.rstrip(_PUNCTUATION)):
        if _is_file(path_of(candidate, root)):
            return candidate
    return None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False  # The name is too long, or its folder is not accessible.
