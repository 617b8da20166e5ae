"""GGUF files of a folder, and the names that they have as models.

Other programs wrote these folders: reads are bounded, and links to folders are never followed.
"""

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

MAX_FILES = 20_000
"""Files visited in one folder tree. Stops the walk of a home folder that was named by mistake."""
_MAX_DEPTH = 6
_MAX_PARTS = 1024
PART_NUMBER = re.compile(r"-(?P<number>\d{5})-of-(?P<count>\d{5})$")
_NO_MODELS = re.compile(r"mmproj|imatrix", re.IGNORECASE)


def gguf_files(folder: Path, max_depth: int = _MAX_DEPTH) -> Iterator[Path]:
    """Yield the GGUF models under a folder, and the first part of split ones.

    Skips vision projectors and importance matrices, which are not models. Follows links to files, but not to
    folders.
    """
    visited = 0
    for top, folders, names in os.walk(folder):
        depth = len(Path(top).relative_to(folder).parts)
        folders[:] = sorted(name for name in folders if name[:1] != ".")
        if depth >= max_depth:
            folders.clear()
        for name in sorted(names):
            visited += 1
            if visited > MAX_FILES:
                return
            path = Path(top, name)
            if _is_model(path):
                yield path


def _is_model(path: Path) -> bool:
    if path.suffix.lower() != ".gguf" or path.name[:1] == "." or _NO_MODELS.search(path.name):
        return False
    part = PART_NUMBER.search(path.stem)
    is_first = part is None or int(part["number"]) == 1
    return is_first and os.path.isfile(path)  # noqa: PTH113  never raises


def split_parts(path: Path) -> tuple[Path, ...]:
    """Return all files of a model by the name of its first part."""
    match = PART_NUMBER.search(path.stem)
    if match is None or int(match["count"]) > _MAX_PARTS:
        return (path,)
    stem = path.stem[: match.start()]
    count = match["count"]
    return tuple(
        path.with_name(f"{stem}-{number:05}-of-{count}{path.suffix}")
        for number in range(1, int(count) + 1)
    )


def plain_stem(path: Path) -> str:
    """Return the name of a file without suffix and part number."""
    return without_part_number(path.stem)


def without_part_number(stem: str) -> str:
    """Return `model` for `model-00001-of-00002`."""
    return PART_NUMBER.sub("", stem)


def relative_name(path: Path, folder: Path) -> str:
    """Return a file's path relative to a folder, without suffix and part number."""
    return path.relative_to(folder).with_name(plain_stem(path)).as_posix()


def find_in_folder(name: str, models_dir: Path) -> Path | None:
    """Find the file of a model by its name in the models folder.

    `NAME` means `NAME.gguf` or the first part of a split model. It may begin with folders.
    """
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts or not relative.name or "\0" in name:
        return None
    file = models_dir / f"{name}.gguf"
    if file.is_file():
        return file
    digits = "[0-9]" * 5
    first_parts = file.parent.glob(f"{glob.escape(relative.name)}-00001-of-{digits}.gguf")
    return min(first_parts, default=None)


def models_in_folder(models_dir: Path) -> dict[str, Path]:
    """Return the files of the models folder by the names that `find_in_folder` takes."""
    return {relative_name(path, models_dir): path for path in gguf_files(models_dir)}
