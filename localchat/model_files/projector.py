"""Finds the file with which a GGUF model sees pictures or hears sound, and reads its header.

llama.cpp calls it the multimodal projector (mmproj). Hubs place it beside the model, with names such as
`mmproj-F16.gguf` or `mmproj-SmolVLM-500M-Instruct-Q8_0.gguf`. Ollama stores it as a blob that the model's
manifest names.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from localchat.errors import ModelInvalid, ModelMissing
from localchat.model_files.byte_source import FileSource, file_errors
from localchat.model_files.gguf import Header
from localchat.model_files.ollama_manifest import read_manifest
from localchat.model_files.open_gguf import read_source

NO_PROJECTOR: Final = "none"
"""Value of the load option that leaves the projector out."""
_NAME: Final = re.compile(r"mmproj", re.IGNORECASE)
_ACCESSORY: Final = re.compile(r"mmproj|imatrix|^mtp-|dflash|eagle-?3", re.IGNORECASE)
_QUANTIZATION: Final = re.compile(
    r"[-._](?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|NVFP4|BF16|FP?16|FP?32)$", re.IGNORECASE
)
_PART: Final = re.compile(r"-\d{5}-of-\d{5}$")
_PREFERRED: Final = ("F16", "Q8_0", "BF16", "F32")
"""Types of the weights, best first. bf16 is slow on most CPUs, and f32 takes twice the memory."""
_OLLAMA_LAYER: Final = "application/vnd.ollama.image.projector"
_MAX_FILES: Final = 2000
_QWEN_TOKENS: Final = 4096
"""Longest picture of Qwen's encoders in llama.cpp."""
_GEMMA4_TOKENS: Final = 1120
"""Longest picture of Gemma 4 in llama.cpp."""


@dataclass(frozen=True, slots=True)
class Projector:
    """A projector with a readable header."""

    path: Path
    kinds: tuple[str, ...]
    """Kinds of attachments: `image`, `audio`."""
    header: Header

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return self.header.file_bytes

    @property
    def embedding(self) -> int:
        """Width of the vectors that it gives to the model. 0 if the file does not state it."""
        widths = (self.number(kind, "projection_dim") for kind in ("vision", "audio"))
        return next(filter(None, widths), 0)

    @property
    def whole_tokens(self) -> int:
        """Tokens of the longest picture whose tokens attend to each other, and so need one step. 0: none."""
        match self.vision_type:
            case "gemma3":
                side = self.number("vision", "image_size") // max(
                    1, self.number("vision", "patch_size")
                )
                merged = side // (self.number("vision", "projector.scale_factor") or 4)
                return merged * merged
            case "gemma4v" | "gemma4uv":
                return _GEMMA4_TOKENS
        return 0

    @property
    def max_patches(self) -> int:
        """Patches of the largest picture that is encoded at once. 0 without pictures."""
        if self.vision_type.startswith("qwen"):
            # A photo of a phone has that many. llama.cpp reserves half of it at the load.
            merge = self.number("vision", "spatial_merge_size") or 2
            return _QWEN_TOKENS * merge * merge
        patch = max(1, self.number("vision", "patch_size"))
        return int((self.number("vision", "image_size") // patch) ** 2)

    @property
    def vision_type(self) -> str:
        """llama.cpp's name for the type of the vision encoder. Empty: unknown."""
        metadata = self.header.metadata
        for key in ("clip.vision.projector_type", "clip.projector_type"):
            if isinstance(kind := metadata.get(key), str):
                return kind
        return ""

    def number(self, encoder: str, key: str) -> int:
        """Return a number of an encoder, 0 if it is missing. encoder: `vision` or `audio`."""
        value = self.header.metadata.get(f"clip.{encoder}.{key}")
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        return 0


def read_projector(path: Path) -> Projector:
    """Read a projector's header. Raises ModelMissing, ModelInvalid."""
    with file_errors(path), FileSource(path) as source:
        return projector_of(path, read_source(source))


def projector_of(path: Path, header: Header) -> Projector:
    """Return the projector with this header. Raises ModelInvalid for a file of another kind."""
    kinds = tuple(
        kind
        for kind, key in (("image", "vision"), ("audio", "audio"))
        if header.metadata.get(f"clip.has_{key}_encoder") is True
    )
    if header.architecture != "clip" or not kinds:
        raise ModelInvalid(
            f"{path} is not the encoder of pictures or sound that --mmproj needs.",
            hint="Hubs name such a file mmproj-*.gguf, beside the model.",
            path=str(path),
        )
    return Projector(path, kinds, header)


def find_projector(model: Header, requested: str | None = None) -> Projector | None:
    """Return the projector of a model: the requested file, or the best one beside the model.

    requested: a path, or `none`. Raises ModelMissing, ModelInvalid for a requested file that does not fit.
    """
    if requested == NO_PROJECTOR:
        return None
    width = model.number("embedding_length")
    if requested is not None:
        projector = read_projector(Path(requested))
        if not _fits(projector, width):
            raise ModelInvalid(
                f"{projector.path.name} belongs to another model: it gives vectors of "
                f"{projector.embedding:,} numbers, and {model.name} needs {width:,}.",
                hint="Download the mmproj file of the same repository as the model.",
                path=str(projector.path),
            )
        return projector
    if model.encoder is not None:
        return projector_of(Path(model.encoder.name), model.encoder)
    if not model.parts:
        return None
    for path in projector_files(model.parts[0]):
        try:
            projector = read_projector(path)
        except (ModelInvalid, ModelMissing):
            continue
        if _fits(projector, width):
            return projector
    return None


def projector_files(model: Path) -> list[Path]:
    """Return the files beside a model that are named as its projector, best first. Opens only manifests.

    A repository may have its quantizations in folders of their own, and the projector above them.
    """
    if model.name.startswith("sha256") and model.parent.name == "blobs":
        return list(_ollama_blobs(model))
    folders = [model.parent]
    if _QUANTIZATION.fullmatch(f"-{model.parent.name}"):
        folders.append(model.parent.parent)
    for folder in folders:
        try:
            names = sorted(path.name for path in folder.glob("*.[gG][gG][uU][fF]"))[:_MAX_FILES]
        except OSError:
            continue
        if files := projector_names(model.name, names):
            return [folder / name for name in files]
    return []


def projector_names(model: str, names: Sequence[str]) -> list[str]:
    """Return the names of a model's projector among those of a folder, best first. model: a file name."""
    files = [name for name in names if _NAME.search(name)]
    if not files or _NAME.search(model):
        return []
    own = _base(model)
    named = [name for name in files if _is_named(_base(name), own)]
    models = {_base(name) for name in (*names, model) if not _ACCESSORY.search(name)}
    if not named and len(models) > 1:
        # Only its name would show which model a projector belongs to.
        return []
    return sorted(named or files, key=_rank)


def _fits(projector: Projector, width: int) -> bool:
    return projector.embedding in (0, width)


def _base(name: str) -> str:
    """Return the name of the model in a file name: without `mmproj`, quantization, part number and suffix."""
    stem = _PART.sub("", name[: -len(".gguf")])
    stem = re.sub(r"[-._]?mmproj[-._]?(?:model)?", "-", stem, flags=re.IGNORECASE)
    stem = _QUANTIZATION.sub("", f"-{stem}")
    return re.sub(r"[-._ ]+", "-", stem).strip("-").lower()


def _is_named(projector: str, model: str) -> bool:
    return bool(projector) and (model.startswith(projector) or projector.startswith(model))


def _rank(name: str) -> int:
    upper = name.upper()
    return next(
        (index for index, kind in enumerate(_PREFERRED) if re.search(rf"[-._]{kind}\b", upper)),
        len(_PREFERRED),
    )


def _ollama_blobs(model: Path) -> Iterator[Path]:
    """Yield the projectors of the manifests that name a model's blob."""
    blobs = model.parent
    manifests = sorted((blobs.parent / "manifests").glob("*/*/*/*"))
    for manifest in manifests[:_MAX_FILES]:
        try:
            layers = read_manifest(manifest)
        except (OSError, msgspec.DecodeError):
            continue
        projectors = [layer for layer in layers if layer.media_type == _OLLAMA_LAYER]
        names_model = any(layer.digest[7:] == model.name[7:] for layer in layers)
        if names_model and projectors:
            yield from filter(None, (layer.file(blobs) for layer in projectors))
            return
