"""Folders laid out as Ollama, LM Studio, the Hugging Face cache and llama.cpp lay them out."""

import hashlib
import json
import os
from pathlib import Path

from tests.support.gguf_files import Size, Value, write_model

MODEL = "application/vnd.ollama.image.model"
TEMPLATE = "application/vnd.ollama.image.template"
ADAPTER = "application/vnd.ollama.image.adapter"
TENSOR = "application/vnd.ollama.image.tensor"


def gguf(path: Path, seed: int = 1, architecture: str = "llama", **extra: Value) -> Path:
    """A small model at this path; `extra` goes into its metadata, `__` for a dot."""
    path.parent.mkdir(parents=True, exist_ok=True)
    named = {key.replace("__", "."): value for key, value in extra.items()}
    return write_model(path, architecture, Size(extra=named), seed)


class Ollama:
    """`~/.ollama/models`: manifests by name, blobs by digest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "blobs").mkdir(parents=True)

    def blob(self, data: bytes) -> tuple[str, Path]:
        digest = hashlib.sha256(data).hexdigest()
        path = self.folder / "blobs" / f"sha256-{digest}"
        path.write_bytes(data)
        return digest, path

    def manifest(self, name: str, *layers: tuple[str, str]) -> Path:
        """`name`: host/namespace/model/tag. `layers`: media type and digest."""
        path = self.folder / "manifests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
            "config": {
                "mediaType": "application/vnd.docker.container.image.v1+json",
                "digest": f"sha256:{'0' * 64}",
                "size": 487,
            },
            "layers": [
                {"mediaType": kind, "digest": f"sha256:{digest}", "size": 1}
                for kind, digest in layers
            ],
        }
        path.write_text(json.dumps(content))
        return path

    def model(self, name: str, source: Path) -> Path:
        """A model with its template, as `ollama pull` leaves it. Returns the blob."""
        digest, path = self.blob(source.read_bytes())
        template, _ = self.blob(b"{{ .Prompt }}")
        self.manifest(name, (MODEL, digest), (TEMPLATE, template))
        return path


class Hub:
    """`~/.cache/huggingface/hub`: blobs by hash, snapshots of links."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, repository: str, revision: str, name: str, source: Path) -> Path:
        """One file of a revision. Returns the link."""
        top = self.folder / f"models--{repository.replace('/', '--')}"
        blob = top / "blobs" / hashlib.sha256(source.read_bytes()).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(source.read_bytes())
        link = top / "snapshots" / revision / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
        return link

    def main(self, repository: str, revision: str) -> None:
        ref = self.folder / f"models--{repository.replace('/', '--')}" / "refs/main"
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(revision)
