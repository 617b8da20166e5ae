"""Models of Ollama: `manifests/<host>/<namespace>/<model>/<tag>` names a blob by its digest.

Only the manifests are read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from localchat.models.external.base import (
    OLLAMA,
    ExternalModel,
    folder_setting,
    home_folder,
    read_small,
    subfolders,
)

_MODEL = "application/vnd.ollama.image.model"
_UNUSED: Final[Mapping[str, str]] = {
    "application/vnd.ollama.image.adapter": "Ollama adds an adapter to it, which is not used here.",
    "application/vnd.ollama.image.projector": "Its part that reads images is not used here.",
    "application/vnd.ollama.image.template": "Ollama's template is not used here; the model's own is.",
    "application/vnd.ollama.image.system": "Ollama's system prompt for it is not used here.",
    "application/vnd.ollama.image.params": "Ollama's parameters for it are not used here.",
}


class _ManifestLayer(msgspec.Struct, frozen=True, rename="camel"):
    media_type: str
    digest: Annotated[str, Meta(pattern=r"^sha256[:-][0-9a-f]{64}$")]


class _Manifest(msgspec.Struct, frozen=True):
    layers: tuple[_ManifestLayer, ...] = ()


def folders(environ: Mapping[str, str], root: Path) -> Iterator[Path]:
    """The user's folder and that of the system service. `root`: where /usr stands."""
    yield folder_setting(environ, "OLLAMA_MODELS") or home_folder(environ) / ".ollama/models"
    yield root / "usr/share/ollama/.ollama/models"


def read_models(folder: Path) -> Iterator[ExternalModel]:
    """Every model with a manifest, also those whose files cannot be used."""
    for host in subfolders(folder / "manifests"):
        for namespace in subfolders(host):
            for model in subfolders(namespace):
                for tag in sorted(model.iterdir()):
                    if tag.is_file() and tag.name[:1] != ".":
                        yield _model(folder, tag)


def _model(folder: Path, manifest: Path) -> ExternalModel:
    host, namespace, model, tag = manifest.parts[-4:]
    short = "/".join(
        (
            "ollama",
            *(() if host == "registry.ollama.ai" else (host,)),
            *(() if (host, namespace) == ("registry.ollama.ai", "library") else (namespace,)),
            f"{model}:{tag}",
        )
    )
    found = ExternalModel(OLLAMA, short, f"{short}@{folder}", None, owner_manifest=manifest)
    try:
        layers = msgspec.json.decode(read_small(manifest), type=_Manifest).layers
    except OSError as problem:
        reason = problem.strerror or str(problem)
        return replace(found, trouble=f"Ollama's manifest cannot be read: {reason}")
    except msgspec.DecodeError:
        return replace(found, trouble="Ollama's manifest is damaged")
    digests = [layer.digest[7:] for layer in layers if layer.media_type == _MODEL]
    if not digests:
        return replace(found, trouble=_without_file(layers))
    if len(digests) > 1:
        return replace(found, trouble="Ollama keeps it in several files, which only Ollama joins")
    # Older versions wrote a colon.
    blobs = [folder / "blobs" / f"sha256{sign}{digests[0]}" for sign in "-:"]
    blob = next((path for path in blobs if path.is_file()), None)
    notes = tuple(
        text for kind, text in _UNUSED.items() if kind in {one.media_type for one in layers}
    )
    if blob is None:
        return replace(found, trouble="Ollama's file of it is missing: the download did not finish")
    return replace(found, path=blob, notes=notes)


def _without_file(layers: Sequence[_ManifestLayer]) -> str:
    if any(layer.media_type.startswith("application/vnd.ollama.image.tensor") for layer in layers):
        return "Ollama keeps it as single tensors, which only Ollama's own engine reads"
    return "its weights are not on this machine (Ollama runs it elsewhere)"
