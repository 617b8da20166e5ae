"""File names for `@` in a message: search, completion, and mentions."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from textual.fuzzy import FuzzySearch

_MAX_FILES: Final = 20_000
_SKIPPED: Final = frozenset(
    {"node_modules", "__pycache__", "venv", ".venv", "target", "dist", "build", "site-packages"}
)


def find_files(root: Path, limit: int = _MAX_FILES) -> tuple[str, ...]:
    """Paths of files under `root`, relative to it, breadth first.

    Without hidden files and build folders.

    At most `limit`: a home folder may hold millions.
    """
    found: list[str] = []
    level = [root]
    while level and len(found) < limit:
        deeper: list[Path] = []
        for folder in level:
            files, folders = _entries(folder)
            found += [os.path.relpath(path, root) for path in files]
            deeper += folders
            if len(found) >= limit:
                break
        level = deeper
    return tuple(found[:limit])


def list_folder(word: str) -> tuple[str, ...]:
    """Entries of the folder of a path that is being typed (`~/Doc`, `/etc/`, `../x`)."""
    parent, _, rest = word.rpartition("/")
    folder = Path(f"{parent}/").expanduser()
    files, folders = _entries(folder, hidden=rest.startswith("."))
    names = [f"{parent}/{path.name}" for path in files]
    return tuple(sorted((*names, *(f"{parent}/{path.name}/" for path in folders))))


def is_path(word: str) -> bool:
    """Whether a word after `@` is a path, not a search."""
    return word.startswith(("/", "~/", "./", "../"))


def path_of(name: str, root: Path) -> Path:
    """Path of the file that a word after `@` names."""
    return Path(name).expanduser() if is_path(name) else root / name


def mentioned_files(text: str, root: Path) -> list[str]:
    """The words after `@` that name files. `@@` is a plain @."""
    found = (next(_files_of(word, root), None) for word in _words(text))
    return list(dict.fromkeys(name for name in found if name is not None))


def missing_paths(text: str, root: Path) -> list[str]:
    """The words after `@` that are paths of no file. Words that are not paths may be people or decorators."""
    missing = (word for word in _words(text) if is_path(word) and not any(_files_of(word, root)))
    return list(dict.fromkeys(missing))


def rank_names(word: str, names: Sequence[str]) -> list[str]:
    """The names that contain the letters of a word in order, best match first."""
    if not word:
        return list(names)
    search = FuzzySearch(case_sensitive=False)
    scored = [(search.match(word, name)[0], name) for name in names]
    return [
        name for score, name in sorted(scored, key=lambda each: (-each[0], each[1])) if score > 0
    ]


def _words(text: str) -> list[str]:
    return re.findall(r"(?<!\S)@([^\s@]\S*)", text)


def _files_of(word: str, root: Path) -> Iterator[str]:
    """The word, and the word without punctuation at its end, if they are files."""
    return (each for each in (word, word.rstrip(".,;:!?)")) if _is_file(path_of(each, root)))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False  # the name is too long, or its folder is not accessible


def _entries(folder: Path, *, hidden: bool = False) -> tuple[list[Path], list[Path]]:
    files: list[Path] = []
    folders: list[Path] = []
    try:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if (entry.name.startswith(".") and not hidden) or entry.name in _SKIPPED:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                elif entry.is_file():
                    files.append(Path(entry.path))
    except OSError:
        return [], []  # an unreadable folder has no completions
    return files, folders
