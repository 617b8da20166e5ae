"""Files that a message names after `@`, such as `@notes.txt` or `@"my notes.txt"`. `@@` is a plain @."""

import re
from pathlib import Path
from typing import Final

from localchat.config.paths import expand_home

_NAME: Final = re.compile(r"""(?<!\S)@("[^"\n]+"|'[^'\n]+'|[^\s@"'](?:\\ |\S)*)""")
_PUNCTUATION: Final = ".,;:!?)"
_ENDINGS: Final = tuple(
    f".{ending}"
    for ending in (
        *("c", "cpp", "csv", "docx", "go", "h", "html", "ini", "java", "js", "json", "log", "md"),
        *("pdf", "py", "rs", "sh", "sql", "tex", "toml", "ts", "tsx", "txt", "xml", "yaml", "yml"),
    )
)
"""Endings of files that people ask about. A word with such an ending certainly names a file."""


def is_path(name: str) -> bool:
    """Return True if a name after `@` is a path, not a search."""
    return name.startswith(("/", "~/", "./", "../"))


def unquoted(name: str) -> str:
    """Return a name without its quotes, or without backslashes before characters."""
    if name.startswith(("'", '"')):
        return name[1:-1]
    return re.sub(r"\\(.)", r"\1", name)


def path_of(name: str, root: Path) -> Path:
    """Return the path of the file that a name after `@` means, without its quotes."""
    if is_path(name):
        return expand_home(name)
    return root / name


def mentioned_files(text: str, root: Path) -> list[str]:
    """Return the names after `@` that are files, as they are written."""
    files = (_existing_file(name, root) for name in _names(text))
    return list(dict.fromkeys(name for name in files if name is not None))


def missing_paths(text: str, root: Path) -> list[str]:
    """Return the names after `@` that look like files but do not exist.

    A path or a name with a file's ending looks like a file. Other names may be people or decorators.
    """
    names = (name for name in _names(text) if _looks_like_file(unquoted(name)))
    missing = (name for name in names if _existing_file(name, root) is None)
    return list(dict.fromkeys(name.rstrip(_PUNCTUATION) for name in missing))


def _names(text: str) -> list[str]:
    return _NAME.findall(text)


def _looks_like_file(name: str) -> bool:
    return is_path(name) or name.rstrip(_PUNCTUATION).lower().endswith(_ENDINGS)


def _existing_file(name: str, root: Path) -> str | None:
    """Return the name, with or without punctuation at its end, if it is a file."""
    for candidate in (name, name.rstrip(_PUNCTUATION)):
        if _is_file(path_of(unquoted(candidate), root)):
            return candidate
    return None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False  # The name is too long, or its folder is not accessible.
