"""GGUF files that no program lists: those of the models folder, and of folders that the user named."""

import glob
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from localchat.models.external.base import FOLDER, ExternalModel, gguf_files, plain_stem


def find_loose(word: str, models_dir: Path) -> Path | None:
    """The file of a model by its name in the models folder, or None.

    `NAME` means `NAME.gguf` or the first part of a split model; it may begin with folders.
    """
    name = PurePosixPath(word)
    if name.is_absolute() or ".." in name.parts or not name.name or "\0" in word:
        return None
    whole = models_dir / f"{word}.gguf"
    if whole.is_file():
        return whole
    first_parts = whole.parent.glob(
        f"{glob.escape(name.name)}-00001-of-[0-9][0-9][0-9][0-9][0-9].gguf"
    )
    return next(iter(sorted(first_parts)), None)


def loose_names(models_dir: Path) -> dict[str, Path]:
    """The files of the models folder by name, as `find_loose` takes it."""
    return {
        path.relative_to(models_dir).with_name(plain_stem(path)).as_posix(): path
        for path in gguf_files(models_dir)
    }


def read_models(folder: Path) -> Iterator[ExternalModel]:
    """The models of a folder that the user named."""
    for path in gguf_files(folder):
        inner = path.relative_to(folder).with_name(plain_stem(path)).as_posix()
        short = f"folder/{plain_stem(path)}"
        long = f"folder/{folder.name}/{inner}"
        yield ExternalModel(FOLDER, short, long, path)
