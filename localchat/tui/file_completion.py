"""File names for `@` in a message: completion and mentions."""

import re
from collections.abc import Iterator, Sequence
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
"""Endings of files that people ask about; a word with one is certainly meant as a file."""


def list_folder(word: str) -> tuple[str, ...]:
    """Entries of the folder of a path that is being typed (`~/Doc`, `/etc/`, `../x`)."""
    parent, _, rest = word.rpartition("/")
    folder = expand_home(f"{parent}/")
    files, folders = entries(folder, hidden=rest.startswith("."))
    names = [f"{parent}/{path.name}" for path in files]
    return tuple(sorted((*names, *(f"{parent}/{path.name}/" for path in folders))))


def is_path(word: str) -> bool:
    """Whether a word after `@` is a path, not a search."""
    return word.startswith(("/", "~/", "./", "../"))


def path_of(name: str, root: Path) -> Path:
    """Path of the file that a word after `@` names."""
    return expand_home(name) if is_path(name) else root / name


def mentioned_files(text: str, root: Path) -> list[str]:
    """The words after `@` that name files. `@@` is a plain @."""
    found = (next(_files_of(word, root), None) for word in _words(text))
    return list(dict.fromkeys(name for name in found if name is not None))


def missing_paths(text: str, root: Path) -> list[str]:
    """The words after `@` that are paths, or have the ending of a file, and are none.

    Others may be people or decorators."""
    named = (word for word in _words(text) if is_path(word) or _has_ending(word))
    missing = (word for word in named if not any(_files_of(word, root)))
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


def _has_ending(word: str) -> bool:
    return word.rstrip(_PUNCTUATION).lower().endswith(_ENDINGS)


def _files_of(word: str, root: Path) -> Iterator[str]:
    """The word, and the word without punctuation at its end, if they are files."""
    return (each for each in (word, word.rstrip(_PUNCTUATION)) if _is_file(path_of(each, root)))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False  # the name is too long, or its folder is not accessible
