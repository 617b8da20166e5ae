"""Lists the files of a folder in a stable order.

Hidden files and build folders are skipped.
"""

import os
from pathlib import Path
from typing import Final

MAX_FILES: Final = 20_000
SKIPPED: Final = frozenset(
    {"node_modules", "__pycache__", "venv", ".venv", "target", "dist", "build", "site-packages"}
)


def find_files(root: Path, limit: int = MAX_FILES) -> tuple[str, ...]:
    """Return up to `limit` paths of files under `root`, relative to it, breadth first.

    Hidden files and build folders are skipped. The limit matters for home folders, which may have millions of
    files.
    """
    paths: list[str] = []
    level = [root]
    while level and len(paths) < limit:
        deeper: list[Path] = []
        for folder in level:
            files, folders = entries(folder)
            paths += [os.path.relpath(path, root) for path in files]
            deeper += folders
            if len(paths) >= limit:
                break
        level = deeper
    return tuple(paths[:limit])


def entries(folder: Path, *, hidden: bool = False) -> tuple[list[Path], list[Path]]:
    """Return the files and folders of one folder by name. Both are empty if it is unreadable."""
    files: list[Path] = []
    folders: list[Path] = []
    try:
        with os.scandir(folder) as scan:
            for entry in sorted(scan, key=lambda entry: entry.name):
                if (entry.name.startswith(".") and not hidden) or entry.name in SKIPPED:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                elif _is_file(entry):
                    files.append(Path(entry.path))
    except OSError:
        return [], []
    return files, folders


def _is_file(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_file()
    except OSError:
        # The entry is a link to itself.
        return False
