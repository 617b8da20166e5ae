"""Manifests of pulled models: `localchat.json` in `<models>/<owner>/<repository>`.

One folder can contain several models, because a repository often has every quantization of one. The file
lists them all, readable by a person, with the source of each file.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, Final, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from localchat.atomic import write_text

MANIFEST = "localchat.json"
_VERSION: Final = 1

Format: TypeAlias = Literal["gguf", "safetensors"]


class PulledFile(msgspec.Struct, frozen=True, kw_only=True):
    """A complete file."""

    path: Annotated[str, Meta(min_length=1)]
    """Relative to the folder, with `/`."""
    size: Annotated[int, Meta(ge=0)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A pulled model."""

    name: Annotated[str, Meta(min_length=1)]
    """`qwen2.5:7b-q4_k_m`, `hf.co/user/repo:QUANT`."""
    repository: Annotated[str, Meta(min_length=1)]
    """`owner/name` on the hub."""
    revision: str
    """The commit."""
    quantization: str
    format: Format
    files: Annotated[tuple[PulledFile, ...], Meta(min_length=1)]
    pulled_at: str
    """ISO 8601 in UTC."""


class _File(msgspec.Struct, frozen=True, kw_only=True):
    version: Literal[1]
    models: tuple[Manifest, ...]


class Installed(NamedTuple):
    """A pulled model and the folder with its manifest."""

    manifest: Manifest
    folder: Path

    @property
    def files(self) -> tuple[Path, ...]:
        """Files of the model, split parts in order."""
        return tuple(self.folder / file.path for file in self.manifest.files)

    @property
    def path(self) -> Path:
        """Path for an engine: the first GGUF file, or the safetensors folder."""
        if self.manifest.format == "gguf":
            return self.files[0]
        return self.folder

    @property
    def family(self) -> str:
        """Part of a catalogue name before the colon. Empty for a repository."""
        name = self.manifest.name.lower()
        if "/" in name:
            return ""
        return name.partition(":")[0]

    @property
    def size_bytes(self) -> int:
        """Size of all files, as the hub listed them."""
        return sum(file.size for file in self.manifest.files)

    @property
    def complete(self) -> bool:
        """Whether every file is here with its length. Hashes were checked at the download."""
        return all(
            path.is_file() and path.stat().st_size == file.size
            for path, file in zip(self.files, self.manifest.files, strict=True)
        )


def installed(models_dir: Path) -> list[Installed]:
    """Return every pulled model under the models folder, by name.

    Ignores a manifest that cannot be read or that names a file outside its folder. Its files then count as
    loose ones.
    """
    models = [
        Installed(manifest, folder) for folder in _folders(models_dir) for manifest in read(folder)
    ]
    return sorted(models, key=lambda model: (model.manifest.name.lower(), model.folder))


def read(folder: Path) -> tuple[Manifest, ...]:
    """Return the models in this folder's manifest. Empty if it cannot be read."""
    try:
        file = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=_File)
    except (OSError, msgspec.DecodeError):
        return ()
    return tuple(
        manifest for manifest in file.models if all(_inside(part.path) for part in manifest.files)
    )


def record(folder: Path, manifest: Manifest) -> None:
    """Add a model to the folder's manifest, replacing one of the same name. Raises OSError."""
    others = [entry for entry in read(folder) if entry.name != manifest.name]
    _write(folder, (*others, manifest))


def forget(folder: Path, name: str) -> None:
    """Remove a model from the manifest, and an empty manifest. Files stay. Raises OSError."""
    left = tuple(entry for entry in read(folder) if entry.name != name)
    if left:
        _write(folder, left)
    else:
        (folder / MANIFEST).unlink(missing_ok=True)


def _write(folder: Path, models: tuple[Manifest, ...]) -> None:
    text = msgspec.json.format(msgspec.json.encode(_File(version=_VERSION, models=models)))
    path = folder / MANIFEST
    if path.is_symlink():
        path.unlink()  # never write through a link to another file
    write_text(path, f"{text.decode()}\n")


def _folders(models_dir: Path) -> Iterator[Path]:
    for manifest in models_dir.glob(f"[!.]*/[!.]*/{MANIFEST}"):
        yield manifest.parent


def _inside(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return bool(parts) and ".." not in parts and not path.startswith("/") and "\\" not in path
