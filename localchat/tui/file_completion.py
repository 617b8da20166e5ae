"""Files near at hand, for `@`: found once per word, never more than a second's walk."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from textual.fuzzy import FuzzySearch

_MOST: Final = 20_000
_SKIPPED: Final = frozenset(
    {"node_modules", "__pycache__", "venv", ".venv", "target", "dist", "build", "site-packages"}
)


def find_files(root: Path, most: int = _MOST) -> tuple[str, ...]:
    """Paths of files under `root`, relative to it, nearest first; hidden ones and those of build folders are
    left out. At most `most`: a home folder may hold millions."""
    found: list[str] = []
    level = [root]
    while level and len(found) < most:
        deeper: list[Path] = []
        for folder in level:
            files, folders = _entries(folder)
            found += [os.path.relpath(path, root) for path in files]
            deeper += folders
            if len(found) >= most:
                break
        level = deeper
    return tuple(found[:most])


def list_folder(word: str) -> tuple[str, ...]:
    """The entries of the folder that a written path leads into (`~/Doc`, `/etc/`, `../x`)."""
    written, _, rest = word.rpartition("/")
    folder = Path(f"{written}/").expanduser()
    files, folders = _entries(folder, hidden=rest.startswith("."))
    names = [f"{written}/{path.name}" for path in files]
    return tuple(sorted((*names, *(f"{written}/{path.name}/" for path in folders))))


def is_path(word: str) -> bool:
    """Whether a word after `@` is a path of its own and no search."""
    return word.startswith(("/", "~/", "./", "../"))


def path_of(name: str, root: Path) -> Path:
    """Where the file of a word after `@` lies."""
    return Path(name).expanduser() if is_path(name) else root / name


def mentioned_files(text: str, root: Path) -> list[str]:
    """The words after `@` that are files; `@@` stands for an @ that includes nothing."""
    found = (next(_files_of(word, root), None) for word in _words(text))
    return list(dict.fromkeys(name for name in found if name is not None))


def missing_paths(text: str, root: Path) -> list[str]:
    """The words after `@` that are written as paths and lead to no file. Others may be anything: people, parts
    of programs."""
    lost = (word for word in _words(text) if is_path(word) and not any(_files_of(word, root)))
    return list(dict.fromkeys(lost))


def rank_names(word: str, names: Sequence[str]) -> list[str]:
    """The names that hold the letters of a word in order, best first."""
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
    """The word where it is a file, and the same without what ends a sentence."""
    return (each for each in (word, word.rstrip(".,;:!?)")) if _is_file(path_of(each, root)))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False  # too long a name, or a folder that may not be entered


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
        return [], []  # a folder that cannot be read has nothing to offer
    return files, folders
