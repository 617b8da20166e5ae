"""Shared parts of the readers of other programs' model folders: names, GGUF files of a folder, bounded reads.

All of it was written by others: reads are bounded, and links to folders are never followed.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

OLLAMA: Final = "Ollama"
LM_STUDIO: Final = "LM Studio"
HUGGING_FACE: Final = "Hugging Face cache"
LLAMA_CPP: Final = "llama.cpp cache"
FOLDER: Final = "folder"

PREFIXES: Final[Mapping[str, str]] = {
    "ollama": OLLAMA,
    "lmstudio": LM_STUDIO,
    "hf": HUGGING_FACE,
    "llamacpp": LLAMA_CPP,
    "folder": FOLDER,
}
"""First part of an external model's name, and the store that it stands for."""

MOST_FILES = 20_000
"""Most files visited in one folder tree: a home folder given by mistake ends there."""
_MAX_DEPTH = 6
_SMALL_FILE_BYTES = 1 << 20
_PART = re.compile(r"-(?P<number>\d{5})-of-(?P<count>\d{5})$")
_NO_MODELS = re.compile(r"mmproj|imatrix", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ExternalModel:
    """A model that another program, or a folder of the user, holds."""

    origin: str
    """The store, one of the values of `PREFIXES`."""
    name: str
    """The name to use. Readers give the short form; discovery lengthens it where it is not unique."""
    long: str
    """A longer name that finds it too."""
    path: Path | None
    """The GGUF file, of a split model the first; None where there is none."""
    trouble: str = ""
    """Why it cannot be used, as far as that shows without opening the file."""
    owner_manifest: Path | None = None
    """The file by which its owner lists it (Ollama)."""
    notes: tuple[str, ...] = ()
    """Sentences on what its owner adds to the model and localchat does not."""


def gguf_files(folder: Path, max_depth: int = _MAX_DEPTH) -> Iterator[Path]:
    """GGUF models under a folder, in order; of a split model the first part.

    Vision projectors and importance matrices are no models. Links to files count, links to folders are not
    followed.
    """
    seen = 0
    for top, folders, names in os.walk(folder):
        depth = len(Path(top).relative_to(folder).parts)
        folders[:] = (
            sorted(name for name in folders if name[:1] != ".") if depth < max_depth else []
        )
        for name in sorted(names):
            seen += 1
            if seen > MOST_FILES:
                return
            path = Path(top, name)
            if _is_model(path):
                yield path


def _is_model(path: Path) -> bool:
    if path.suffix.lower() != ".gguf" or path.name[:1] == "." or _NO_MODELS.search(path.name):
        return False
    part = _PART.search(path.stem)
    return (part is None or int(part["number"]) == 1) and os.path.isfile(path)  # noqa: PTH113  never raises


def split_parts(path: Path) -> tuple[Path, ...]:
    """All files of a model, by the name of its first: one, or the parts of a split one."""
    match = _PART.search(path.stem)
    if match is None or int(match["count"]) > 1024:
        return (path,)
    stem = path.stem[: match.start()]
    count = match["count"]
    return tuple(
        path.with_name(f"{stem}-{number:05}-of-{count}{path.suffix}")
        for number in range(1, int(count) + 1)
    )


def plain_stem(path: Path) -> str:
    """The name of a file without suffix and part number."""
    return without_part_number(path.stem)


def without_part_number(stem: str) -> str:
    """`model` of `model-00001-of-00002`."""
    return _PART.sub("", stem)


def subfolders(folder: Path) -> list[Path]:
    """Visible folders in a folder, sorted; none where it does not exist."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name[:1] != ".")


def read_small(path: Path) -> bytes:
    """The bytes of a file that is expected to be small; empty above 1 MiB. Raises OSError."""
    with path.open("rb") as file:
        data = file.read(_SMALL_FILE_BYTES + 1)
    return data if len(data) <= _SMALL_FILE_BYTES else b""


def first_line(path: Path) -> str:
    """The first line of a small text file; empty where it cannot be read."""
    try:
        return read_small(path).decode().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError):
        return ""


def home_folder(environ: Mapping[str, str]) -> Path:
    """HOME, else the home folder of the user of this process."""
    return Path(environ.get("HOME") or Path.home())


def folder_setting(environ: Mapping[str, str], variable: str) -> Path | None:
    """The folder that an environment variable names, with `~/` for the home folder."""
    text = environ.get(variable)
    if not text:
        return None
    if text.startswith("~/"):
        return home_folder(environ) / text[2:]
    return Path(text).absolute()


def cache_folder(environ: Mapping[str, str]) -> Path:
    """The user's cache folder."""
    return folder_setting(environ, "XDG_CACHE_HOME") or home_folder(environ) / ".cache"
