"""Manifests of Ollama, which name the blobs that a model consists of."""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from localchat.model_files.byte_source import read_small


class OllamaLayer(msgspec.Struct, frozen=True, rename="camel"):
    """A blob of a model."""

    media_type: str
    digest: Annotated[str, Meta(pattern=r"^sha256[:-][0-9a-f]{64}$")]

    def file(self, blobs: Path) -> Path | None:
        """Return its file in Ollama's folder of blobs; None if it is missing."""
        # Older versions wrote a colon.
        paths = (blobs / f"sha256{sign}{self.digest[7:]}" for sign in "-:")
        return next((path for path in paths if path.is_file()), None)


class _Manifest(msgspec.Struct, frozen=True):
    layers: tuple[OllamaLayer, ...] = ()


def read_manifest(path: Path) -> tuple[OllamaLayer, ...]:
    """Return the layers of a manifest. Raises OSError, msgspec.DecodeError."""
    return msgspec.json.decode(read_small(path), type=_Manifest).layers
