"""Files of a folder: without hidden ones and build folders, in a stable order."""

import os
from pathlib import Path
from typing import Final

MAX_FILES: Final = 20_000
_SKIPPED: Final = frozenset(
    {"node_modules", "__pycache__", "venv", ".venv", "target", "dist", "build", "site-packages"}
)


def find_files(root: Path, limit: int = MAX_FILES) -> tuple[str, ...]:
    """Paths of files under `root`, relative to it, breadth first.

    Without hidden files and build folders.

    At most `limit`: a home folder may hold millions.
    """
    found: list[str] = []
    level = [root]
    while level and len(found) < limit:
        deeper: list[Path] = []
        for folder in level:
            files, folders = entries(folder)
            found += [os.path.relpath(path, root) for path in files]
            deeper += folders
            if len(found) >= limit:
                break
        level = deeper
    return tuple(found[:limit])


def entries(folder: Path, *, hidden: bool = False) -> tuple[list[Path], list[Path]]:
    """Files and folders of one folder, by name; none if it cannot be read."""
    files: list[Path] = []
    folders: list[Path] = []
    try:
        with os.scandir(folder) as found:
            for entry in sorted(found, key=lambda entry: entry.name):
                if (entry.name.startswith(".") and not hidden) or entry.name in _SKIPPED:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                elif _is_file(entry):
                    files.append(Path(entry.path))
    except OSError:
        return [], []  # an unreadable folder has no completions
    return files, folders


def _is_file(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link to itself
        return False
