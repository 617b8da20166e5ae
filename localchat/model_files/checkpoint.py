"""Safetensors checkpoints before they are loaded: config.json and the headers of the weights.

Read from a folder, or from anything else that answers range requests.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from localchat.errors import ModelInvalid, ModelMissing
from localchat.model_files.architecture import ModelShape, model_shape
from localchat.model_files.byte_source import ByteSource, FileSource
from localchat.model_files.open_gguf import read_header
from localchat.model_files.safetensors import SafetensorsHeader, read_safetensors_source

CONFIG: Final = "config.json"
_LONGEST_CONFIG: Final = 4 << 20
SIDECARS: Final = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files whose quantization config.json does not repeat (early quantized checkpoints, ModelOpt's), and their
methods."""
_EARLY_WORDS: Final = {"w_bit": "bits", "q_group_size": "group_size"}
_MOST_FILES: Final = 1024


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model as its config.json and the headers of its weights describe it."""

    name: str
    """For messages."""
    config: Mapping[str, Any]
    """config.json as it is."""
    headers: tuple[SafetensorsHeader, ...] = ()
    """Of every file of weights; none where only the config is known."""

    @property
    def weights_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(header.weights_bytes for header in self.headers)

    @property
    def file_bytes(self) -> int:
        """Bytes of all files of weights."""
        return sum(header.file_bytes for header in self.headers)

    @property
    def quantization(self) -> str:
        """AWQ, GPTQ, FP8, … as config.json states it; else the type of most bytes."""
        found = self.config.get("quantization_config")
        method = found.get("quant_method") if isinstance(found, Mapping) else None
        if isinstance(found, Mapping) and method == "compressed-tensors":
            return _compressed(found)
        if isinstance(method, str) and method:
            return method.upper()
        sizes: dict[str, int] = {}
        for header in self.headers:
            for tensor in header.tensors:
                sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.size_bytes
        return max(sizes, key=lambda name: sizes[name], default="")

    @property
    def architecture(self) -> str:
        """First class that config.json names; empty: none."""
        named = self.config.get("architectures")
        if isinstance(named, list) and named:
            return str(named[0])
        return ""

    @property
    def context_train(self) -> int:
        """Tokens; 0: not stated."""
        return self.number("max_position_embeddings")

    def number(self, field: str) -> int:
        """A whole number of the text part; 0: not stated."""
        text = self.config.get("text_config")
        held = {**self.config, **text} if isinstance(text, Mapping) else self.config
        found = held.get(field)
        if isinstance(found, int) and found > 0 and found is not True:
            return found
        return 0


def _compressed(found: Mapping[str, Any]) -> str:
    """INT4 or FP8, from the first group of compressed layers."""
    groups = found.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            kind = "FP" if weights.get("type") == "float" else "INT"
            return f"{kind}{weights.get('num_bits', '')}"
    return "COMPRESSED-TENSORS"


def whole_config(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json with the quantization of a sidecar file, if it states none itself. Raises ModelInvalid."""
    path = next((folder / name for name in SIDECARS if (folder / name).is_file()), None)
    if path is None or config.get("quantization_config"):
        return config
    try:
        with FileSource(path) as source:
            return _with_sidecar(config, path.name, source)
    except OSError as problem:
        raise ModelInvalid(f"{path} cannot be read: {problem}.", path=str(path)) from problem


def _with_sidecar(config: Mapping[str, Any], name: str, source: ByteSource) -> Mapping[str, Any]:
    """The config with the quantization of the sidecar file of this name. Raises ModelInvalid."""
    stated = {_EARLY_WORDS.get(key, key): value for key, value in _object(source).items()}
    return {**config, "quantization_config": {"quant_method": SIDECARS[name], **stated}}


def _object(source: ByteSource) -> dict[str, Any]:
    """The settings in a JSON file. Raises ModelInvalid."""
    if source.size > _LONGEST_CONFIG:
        raise ModelInvalid(
            f"{source.name} has {source.size:,} bytes; settings are never that long.",
            path=source.name,
        )
    try:
        found = json.loads(source.read(0, source.size))
    except (ValueError, RecursionError) as problem:
        raise ModelInvalid(
            f"{source.name} is not valid JSON: {problem}.", path=source.name
        ) from problem
    if not isinstance(found, dict):
        raise ModelInvalid(f"{source.name} is not a JSON object.", path=source.name)
    return found


ModelSummary: TypeAlias = ModelShape | Checkpoint
"""A model that is not loaded, as far as planning a load needs: of a GGUF its shape, else the checkpoint."""


def read_summary(path: Path, *, dummy_weights: bool = False) -> ModelSummary:
    """The shape of a GGUF, or the checkpoint in a folder. dummy_weights: of a folder nothing is read but its
    config. Raises ModelMissing, ModelInvalid."""
    if dummy_weights and path.is_dir():
        return read_config(path)
    if is_checkpoint(path):
        return read_checkpoint(path)
    return model_shape(read_header(path))


def is_checkpoint(path: Path) -> bool:
    """True if this is the folder of a Hugging Face checkpoint."""
    return path.is_dir() and (path / CONFIG).is_file() and any(path.glob("*.safetensors"))


def read_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a folder, no weights read. Raises ModelMissing, ModelInvalid."""
    config = folder / CONFIG
    weights = [path.name for path in weight_paths(folder)]
    if not config.is_file() or not weights:
        missing = "config.json is" if weights else "safetensors files are"
        raise ModelMissing(
            f"{folder} is not a checkpoint: {missing} missing.",
            hint="Give the folder of a Hugging Face checkpoint, or the path of a .gguf file.",
            path=str(folder),
        )
    try:
        sources = [FileSource(folder / name) for name in (CONFIG, *weights)]
    except OSError as problem:
        raise ModelInvalid(f"{folder} cannot be read: {problem}.", path=str(folder)) from problem
    try:
        found = read_checkpoint_sources(str(folder), sources[0], sources[1:])
        return replace(found, config=whole_config(folder, found.config))
    finally:
        for source in sources:
            source.close()


def read_config(folder: Path) -> Checkpoint:
    """The checkpoint by its config.json alone, for dummy weights. Raises ModelMissing, ModelInvalid."""
    try:
        with FileSource(folder / CONFIG) as config:
            found = read_checkpoint_sources(str(folder), config, ())
        return replace(found, config=whole_config(folder, found.config))
    except OSError as problem:
        raise ModelMissing(
            f"{folder / CONFIG} cannot be read: {problem}.",
            hint="Give the folder of a Hugging Face checkpoint.",
            path=str(folder),
        ) from problem


def weight_paths(folder: Path) -> list[Path]:
    """Files of the model's weights in a folder, by name."""
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    return [folder / name for name in weight_files(names)]


def weight_files(names: Sequence[str]) -> tuple[str, ...]:
    """The files of the model among safetensors files: the usual ones where weights exist in two forms."""
    usual = tuple(name for name in names if name.startswith("model"))
    return usual or tuple(names)


def read_checkpoint_sources(
    name: str,
    config: ByteSource,
    weights: Sequence[ByteSource],
    sidecars: Mapping[str, ByteSource] | None = None,
) -> Checkpoint:
    """The checkpoint in sources of bytes. sidecars: those of SIDECARS that exist, by name.

    Raises ModelInvalid.
    """
    if len(weights) > _MOST_FILES:
        raise ModelInvalid(
            f"{name}: its weights have {len(weights):,} files; at most {_MOST_FILES:,} are accepted."
        )
    found: Mapping[str, Any] = _object(config)
    early = next((file for file in SIDECARS if file in (sidecars or {})), None)
    if early is not None and sidecars is not None and not found.get("quantization_config"):
        found = _with_sidecar(found, early, sidecars[early])
    return Checkpoint(name, found, tuple(read_safetensors_source(source) for source in weights))
