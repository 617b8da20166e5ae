"""Safetensors checkpoints before loading: config.json and the headers of the weights.

They are read from a folder, or from any source that answers range requests.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from localchat.errors import ModelInvalid, ModelMissing, reason
from localchat.model_files.architecture import ModelShape, model_shape
from localchat.model_files.byte_source import ByteSource, FileSource, file_errors
from localchat.model_files.open_gguf import read_header
from localchat.model_files.safetensors import SafetensorsHeader, read_safetensors_source

CONFIG: Final = "config.json"
_MAX_CONFIG_BYTES: Final = 4 << 20
SIDECARS: Final = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files with a quantization that config.json lacks, and their methods.

Early quantized checkpoints and ModelOpt's have them.
"""
_OLD_NAMES: Final = {"w_bit": "bits", "q_group_size": "group_size"}
_MAX_JSON_BYTES: Final = 64 << 20
_MAX_FILES: Final = 1024
_DAMAGED: Final = "The file may be incomplete or damaged: download it again."
_SINGLE_FILE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
"""List of the tensors of a split model, with their files."""
_FLOAT_GROUPS: Final[Mapping[object, str]] = {(4, 16): "NVFP4", (4, 32): "MXFP4", (8, 32): "MXFP8"}
"""Formats of floating codes by their bits and the columns that share a scale."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model, described by its config.json and the headers of its weights."""

    name: str
    """Name for messages."""
    config: Mapping[str, Any]
    """Content of config.json."""
    headers: tuple[SafetensorsHeader, ...] = ()
    """Headers of all weight files, empty if only the config is known."""

    @property
    def weights_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(header.weights_bytes for header in self.headers)

    @property
    def file_bytes(self) -> int:
        """Size of all weight files."""
        return sum(header.file_bytes for header in self.headers)

    @property
    def quantization(self) -> str:
        """Quantization method in config.json (AWQ, GPTQ, FP8, …), otherwise the type with the most bytes."""
        quantization = self.config.get("quantization_config")
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        if isinstance(quantization, Mapping) and method == "compressed-tensors":
            return _compressed(quantization)
        if isinstance(quantization, Mapping) and method == "modelopt":
            section = quantization.get("quantization")
            if not isinstance(section, Mapping):
                section = quantization
            return str(section.get("quant_algo") or method).upper()
        if isinstance(method, str) and method:
            return method.upper()
        sizes: dict[str, int] = {}
        for header in self.headers:
            for tensor in header.tensors:
                sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.size_bytes
        return max(sizes, key=lambda name: sizes[name], default="")

    @property
    def architecture(self) -> str:
        """First class that config.json lists, or an empty string."""
        classes = self.config.get("architectures")
        if isinstance(classes, list) and classes:
            return str(classes[0])
        return ""

    @property
    def context_train(self) -> int:
        """Trained context in tokens, 0 if unknown."""
        return self.number("max_position_embeddings")

    def number(self, field: str) -> int:
        """Return an integer of the text part, 0 if it is missing."""
        text = self.config.get("text_config")
        value = self.config.get(field)
        if isinstance(text, Mapping):
            value = text.get(field, value)
        if isinstance(value, int) and value > 0 and value is not True:
            return value
        return 0


def _compressed(quantization: Mapping[str, Any]) -> str:
    """Return the type of the first group of compressed layers, such as INT4 or FP8."""
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping):
        groups = {}
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            bits = weights.get("num_bits", "")
            if weights.get("type") != "float":
                return f"INT{bits}"
            return _FLOAT_GROUPS.get((bits, weights.get("group_size")), f"FP{bits}")
    return "COMPRESSED-TENSORS"


def whole_config(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the quantization of a sidecar file to a config that has none. Raises ModelInvalid."""
    path = next((folder / name for name in SIDECARS if (folder / name).is_file()), None)
    if path is None or config.get("quantization_config"):
        return config
    return _with_sidecar(config, path.name, read_object(path))


def _with_sidecar(
    config: Mapping[str, Any], name: str, sidecar: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Add the quantization of a sidecar file."""
    stated = {_OLD_NAMES.get(key, key): value for key, value in sidecar.items()}
    return {**config, "quantization_config": {"quant_method": SIDECARS[name], **stated}}


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ModelMissing without the file, ModelInvalid."""
    try:
        with FileSource(path) as source:
            return _object(source, _MAX_JSON_BYTES)
    except FileNotFoundError as problem:
        raise ModelMissing(
            f"{path.parent} has no {path.name}.",
            hint="Give the folder of a whole Hugging Face checkpoint.",
            path=str(path),
        ) from problem
    except OSError as problem:
        raise ModelInvalid(
            f"{path} cannot be read: {reason(problem)}.", hint=_DAMAGED, path=str(path)
        ) from problem


def optional_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty without the file. Raises ModelInvalid."""
    return read_object(path) if path.exists() else {}


def _object(source: ByteSource, limit_bytes: int = _MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ModelInvalid."""
    if source.size > limit_bytes:
        raise ModelInvalid(
            f"{source.name} has {source.size:,} bytes; settings are never that long.",
            path=source.name,
        )
    try:
        value = json.loads(source.read(0, source.size))
    except (ValueError, RecursionError) as problem:
        raise ModelInvalid(
            f"{source.name} is not valid JSON: {problem}.", hint=_DAMAGED, path=source.name
        ) from problem
    if not isinstance(value, dict):
        raise ModelInvalid(f"{source.name} is not a JSON object.", hint=_DAMAGED, path=source.name)
    return value


ModelSummary: TypeAlias = ModelShape | Checkpoint
"""Data for planning a load: the shape of a GGUF file, or a checkpoint."""


def read_summary(path: Path, *, dummy_weights: bool = False) -> ModelSummary:
    """Return the shape of a GGUF file, or the checkpoint in a folder.

    dummy_weights: read only the config of a folder. Raises ModelMissing, ModelInvalid.
    """
    if dummy_weights and path.is_dir():
        return read_config(path)
    if is_checkpoint(path):
        return read_checkpoint(path)
    return model_shape(read_header(path))


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is the folder of a Hugging Face checkpoint."""
    return path.is_dir() and (path / CONFIG).is_file() and any(path.glob("*.safetensors"))


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in a folder without reading weights. Raises ModelMissing, ModelInvalid."""
    config = folder / CONFIG
    weights = [path.name for path in weight_paths(folder)]
    if not config.is_file() or not weights:
        missing = "config.json is" if weights else "safetensors files are"
        raise ModelMissing(
            f"{folder} is not a checkpoint: {missing} missing.",
            hint="Give the folder of a Hugging Face checkpoint, or the path of a .gguf file.",
            path=str(folder),
        )
    with file_errors(folder), ExitStack() as files:
        sources = [files.enter_context(FileSource(folder / name)) for name in (CONFIG, *weights)]
        checkpoint = read_checkpoint_sources(str(folder), sources[0], sources[1:])
    return replace(checkpoint, config=whole_config(folder, checkpoint.config))


def read_config(folder: Path) -> Checkpoint:
    """Return a checkpoint with only the config, for dummy weights. Raises ModelMissing, ModelInvalid."""
    with file_errors(folder / CONFIG), FileSource(folder / CONFIG) as config:
        checkpoint = read_checkpoint_sources(str(folder), config, ())
    return replace(checkpoint, config=whole_config(folder, checkpoint.config))


def weight_paths(folder: Path) -> list[Path]:
    """Return the paths of the model's weight files in a folder, sorted by name.

    Raises ModelMissing if parts of a split model are missing.
    """
    present = {path.name for path in folder.glob("*.safetensors")}
    indexed = _indexed(folder)
    missing = sorted(indexed - present)
    if missing and present and _SINGLE_FILE not in present:
        raise ModelMissing(
            f"{len(missing):,} of the {len(indexed):,} parts of {folder} are missing: "
            f"{', '.join(missing[:5])}.",
            hint="Download them into this folder.",
            path=str(folder),
        )
    if indexed and not missing:
        # The folder may also have parts of an earlier download.
        return [folder / name for name in sorted(indexed)]
    return [folder / name for name in weight_files(sorted(present))]


def _indexed(folder: Path) -> frozenset[str]:
    """Return the files that the index of a split model names. Empty without a readable index."""
    try:
        with FileSource(folder / _INDEX) as source:
            files = json.loads(source.read(0, _MAX_JSON_BYTES))["weight_map"].values()
            return frozenset(name for name in files if isinstance(name, str))
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return frozenset()


def weight_files(names: Sequence[str]) -> tuple[str, ...]:
    """Return the model's files among safetensors files.

    If the weights exist in two forms, the files with the usual names count.
    """
    usual = tuple(name for name in names if name.startswith("model"))
    return usual or tuple(names)


def read_checkpoint_sources(
    name: str,
    config: ByteSource,
    weights: Sequence[ByteSource],
    sidecars: Mapping[str, ByteSource] | None = None,
) -> Checkpoint:
    """Return the checkpoint in byte sources. Raises ModelInvalid.

    sidecars: existing files of SIDECARS by name.
    """
    if len(weights) > _MAX_FILES:
        raise ModelInvalid(
            f"{name}: its weights have {len(weights):,} files; at most {_MAX_FILES:,} are accepted."
        )
    fields: Mapping[str, Any] = _object(config)
    if sidecars and not fields.get("quantization_config"):
        for sidecar in SIDECARS:
            if sidecar in sidecars:
                fields = _with_sidecar(fields, sidecar, _object(sidecars[sidecar]))
                break
    return Checkpoint(name, fields, tuple(read_safetensors_source(source) for source in weights))
