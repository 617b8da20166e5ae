"""Sources of tensors: the safetensors files of a folder, or random numbers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from localchat.errors import ModelInvalid, ModelMissing, reason
from localchat.model_files.checkpoint import weight_paths
from localchat.model_files.safetensors import SafetensorsHeader, Tensor, read_safetensors
from localchat_cuda.config.tensor_names import canonical_name, is_text
from localchat_cuda.weights.device_reader import DeviceReader

_SCALES = (".scales", ".weight_scale", ".weight_scale_inv")
"""Names of scales."""
_EXPONENTS = "_proj_scales"
_EXPONENT = 119
"""Names of MXFP4 scales, and what stands for 2^-8."""
_ABSENT = (".weight", ".bias", "g_idx", "_proj")
"""Ends of names that random weights do without; "_proj" is that of all experts at once."""
_SINGLE_FILE = "model.safetensors"
"""A file of this name comes before all others."""
_OPTIONAL = (
    *("inv_freq", "input_scale", "output_scale", "k_scale", "v_scale", "q_scale"),
    *("g_idx", "weight_shape", "weight_zero_point", "input_zero_point"),
)
"""Ends of names of tensors that may stay unread: redundant ones, and scales of roundings that are not done."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Numbers by their names in a safetensors header."""
_CODES = (
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz),
    *(torch.float8_e5m2, torch.float8_e5m2fnuz),
)


class WeightSource(Protocol):
    """Tensors by their checkpoint names, on the CPU or the source's device."""

    def has(self, name: str) -> bool:
        """True if there is such a tensor. Random weights have those that the format needs, and no optional
        ones."""
        ...

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The stored shape of a tensor; None: any shape can be had."""
        ...

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor, a floating one in `dtype`. Raises ModelInvalid if its shape differs."""
        ...

    def unread(self) -> list[str]:
        """Tensors of the text part that were never read, although they would change its results."""
        ...


class CheckpointWeights:
    """The safetensors files of a folder, with names as in tensor_names.py. Opening reads only their headers."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Raises ModelMissing, ModelInvalid."""
        self.folder = folder
        self.device = device
        self.headers = read_headers(folder)
        self._reader = DeviceReader(device)
        self._read_names: set[str] = set()
        self._index = _index(folder)
        self._files: dict[str, tuple[Path, Tensor]] = {}
        for path, header in self.headers.items():
            for tensor in header.tensors:
                name = canonical_name(tensor.name)
                if name not in self._files or path.name in (self._index.get(name), _SINGLE_FILE):
                    self._files[name] = path, tensor

    def has(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name][1].shape if name in self._files else ()

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self._read_names.add(name)
        if name not in self._files:
            file = self._index.get(name, "")
            absent = (
                f": {file} is not there" if file and self.folder / file not in self.headers else ""
            )
            raise ModelInvalid(
                f"{self.folder} lacks the tensor {name}{absent}.",
                hint="A shard may be missing, or the files belong to another model: download again.",
            )
        path, stored = self._files[name]
        if stored.shape != shape:
            raise ModelInvalid(
                f"{path}: {name} has the shape {stored.shape}, and config.json means {shape}.",
                hint="config.json and weights belong to different models: download both again.",
            )
        found = self._read(path, stored)
        if not _is_convertible(found.dtype, dtype):
            kind, expected = (str(each).removeprefix("torch.") for each in (found.dtype, dtype))
            raise ModelInvalid(
                f"{path}: {name} is stored as {kind}, and config.json means numbers that {expected} can hold.",
                hint="config.json may lack the quantization_config of these weights: download both again.",
            )
        return found.to(dtype) if found.is_floating_point() else found

    def unread(self) -> list[str]:
        left = self._files.keys() - self._read_names
        return sorted(name for name in left if is_text(name) and not name.endswith(_OPTIONAL))

    def _read(self, path: Path, stored: Tensor) -> torch.Tensor:
        try:
            raw = self._reader.read(path, stored.offset, stored.size_bytes)
            return raw.view(_DTYPES[stored.dtype]).reshape(stored.shape)
        except (OSError, ValueError, KeyError) as error:
            why = f"{error} is unknown" if isinstance(error, KeyError) else reason(error)
            raise ModelInvalid(
                f"{path}: {stored.name} cannot be read: {why}.",
                hint="The file may be damaged, or newer than this version of localchat: download it again.",
            ) from error


def _is_convertible(found: torch.dtype, expected: torch.dtype) -> bool:
    """True if converting the stored numbers is enough: codes need their scale, too."""
    if found in _CODES or expected in _CODES:
        return found == expected
    return found.is_floating_point == expected.is_floating_point and found != torch.bool


def _index(folder: Path) -> dict[str, str]:
    """By tensor, the file that the index of a sharded checkpoint names; empty if there is no index."""
    try:
        found = json.loads((folder / f"{_SINGLE_FILE}.index.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    placed = found.get("weight_map") if isinstance(found, dict) else None
    held = placed.items() if isinstance(placed, dict) else ()
    return {canonical_name(name): file for name, file in held if isinstance(file, str)}


def read_headers(folder: Path) -> dict[Path, SafetensorsHeader]:
    """Headers of all files of weights in a folder. Raises ModelMissing if there are none, ModelInvalid."""
    paths = weight_paths(folder)
    if not paths:
        raise ModelMissing(
            f"{folder} holds no safetensors file.",
            hint="Download the model again, or take a GGUF of it for llama.cpp.",
        )
    return {path: read_safetensors(path) for path in paths}


def has_imagined(name: str) -> bool:
    """Return True for tensors that a source without files offers: those that the format needs."""
    return ".layers." in name and not name.endswith(_ABSENT)


class RandomWeights:
    """Random weights, small enough that a deep model stays finite: for measuring speed."""

    def __init__(
        self, device: torch.device, seed: int = 0, group: int = 128, bits: int = 4
    ) -> None:
        """group: columns of a group, where groups are scattered. bits: of a code."""
        self.device = device
        self.group = group
        self.scale = 0.02 / (1 << bits)
        self.generator = torch.Generator(device).manual_seed(seed)

    def has(self, name: str) -> bool:
        return has_imagined(name)

    def shape(self, name: str) -> None:
        return None

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if name.endswith("g_idx"):
            return self._groups(shape[0])
        if name.endswith(_EXPONENTS):
            return torch.full(shape, _EXPONENT, dtype=dtype, device=self.device)
        if not dtype.is_floating_point:
            numbers = torch.iinfo(dtype)
            return self._draw(torch.randint, numbers.min, numbers.max, shape, dtype=dtype)
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=self.device)
        found = self._draw(torch.randn, shape, dtype=torch.float32)
        is_scale = name.endswith(_SCALES)
        return (found.abs() if is_scale else found).mul_(self.scale if is_scale else 0.02).to(dtype)

    def unread(self) -> list[str]:
        return []

    def _groups(self, k: int) -> torch.Tensor:
        """Scattered groups of columns, equal for all layers of K: they read the same activations."""
        draw = torch.Generator(self.device).manual_seed(k)
        return torch.randperm(k, device=self.device, generator=draw).to(torch.int32) // self.group

    def _draw(
        self, make: Callable[..., torch.Tensor], *sizes: object, dtype: torch.dtype
    ) -> torch.Tensor:
        return make(*sizes, dtype=dtype, device=self.device, generator=self.generator)


class LoadTarget(NamedTuple):
    """Source of a load, and the device and dtype of its weights."""

    source: WeightSource
    device: torch.device
    dtype: torch.dtype
    """Of floating weights."""
    notify: Callable[[str], None]
    """Gets sentences for the user."""

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor on the device. Raises ModelInvalid."""
        return self.source.tensor(name, shape, dtype).to(self.device)
