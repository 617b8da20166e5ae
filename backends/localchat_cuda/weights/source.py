"""Sources of tensors: the safetensors files of a folder, or random numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from localchat.errors import ModelInvalid, ModelMissing, reason
from localchat.model_files.checkpoint import weight_paths
from localchat.model_files.safetensors import SafetensorsHeader, Tensor, read_safetensors
from localchat_cuda.config.tensor_names import canonical_name, is_text
from localchat_cuda.weights.device_reader import DeviceReader, Extent

_SCALES = (".scales", ".weight_scale", ".weight_scale_inv")
"""Suffixes of names of scales."""
_EXPONENTS = ("_proj_scales", ".weight_scale")
"""Suffixes of names of scales in e8m0, if they are integers."""
_EXPONENT = 119
"""Scale of 2^-8 in e8m0."""
_INVERSE_SCALE = ".weight_global_scale"
"""Suffix of the name of an NVFP4 layer's number, by which scales are divided."""
_ABSENT = (".weight", ".bias", "g_idx", "_proj")
"""Suffixes of tensors that random weights lack. "_proj" is that of a tensor with all experts."""
_SINGLE_FILE = "model.safetensors"
"""File whose tensors take precedence over those of other files."""
_OPTIONAL = (
    *("inv_freq", "input_scale", "output_scale", "k_scale", "v_scale", "q_scale"),
    *("g_idx", "weight_shape", "weight_zero_point", "input_zero_point", "input_global_scale"),
)
"""Suffixes of tensors that may stay unread: redundant ones, and scales for rounding that is not done here."""
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
    "F8_E8M0": torch.uint8,
}
"""Types by their names in a safetensors header. Exponents (e8m0) are read as integers."""
_CODES = (
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz),
    *(torch.float8_e5m2, torch.float8_e5m2fnuz),
)


_RUN_BYTES = 64 << 20
"""Bytes of a tensor that are read at once to get some of its columns."""


class Slices(NamedTuple):
    """Part of a tensor: ranges along one axis."""

    axis: int
    ranges: tuple[tuple[int, int], ...]
    """First index and length of each range, in the order of the part."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a whole tensor, contiguous."""
        parts = [tensor.narrow(self.axis, first, length) for first, length in self.ranges]
        return torch.cat(parts, self.axis)


class WeightSource(Protocol):
    """Tensors by their checkpoint names, on the CPU or the source's device."""

    def has(self, name: str) -> bool:
        """Return True if the source has this tensor. Random weights lack optional tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the stored shape of a tensor; (): it is missing. None: the source makes any shape."""
        ...

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor, floating ones in `dtype`. Raises ModelInvalid if its shape differs."""
        ...

    def unread(self) -> list[str]:
        """Return the tensors of the text part that were never read and are not redundant."""
        ...


class CheckpointWeights:
    """Read the safetensors files of a folder, with names as in tensor_names.py.

    Opening reads only the headers."""

    def __init__(self, folder: Path, device: torch.device, *, in_slices: bool = False) -> None:
        """Read the headers. Raises ModelMissing, ModelInvalid.

        `in_slices`: only slices of tensors will be read, so neighbors in a file are not read together."""
        self.folder = folder
        self.device = device
        self.headers = read_headers(folder)
        self._read_names: set[str] = set()
        self._files: dict[str, tuple[Path, Tensor]] = {}
        for path, header in self.headers.items():
            for tensor in header.tensors:
                name = canonical_name(tensor.name)
                if name not in self._files or path.name == _SINGLE_FILE:
                    self._files[name] = path, tensor
        extents: list[Extent] = []
        if not in_slices:
            extents = [
                Extent(path, stored.offset, stored.size_bytes)
                for name, (path, stored) in self._files.items()
                if is_text(name) and not name.endswith(_OPTIONAL)
            ]
        self._reader = DeviceReader(device, extents)

    def has(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name][1].shape if name in self._files else ()

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        slices: Slices | None = None,
    ) -> torch.Tensor:
        """See WeightSource. `slices`: return only this part of the tensor of the whole `shape`."""
        self._read_names.add(name)
        if name not in self._files:
            raise ModelInvalid(
                f"{self.folder} lacks the tensor {name}.",
                hint="A shard may be missing, or the files belong to another model: download again.",
            )
        path, stored = self._files[name]
        if stored.shape != shape:
            raise ModelInvalid(
                f"{path}: {name} has the shape {stored.shape}, but config.json implies {shape}.",
                hint="config.json and weights belong to different models: download both again.",
            )
        tensor = self._read(path, stored, slices)
        if not _is_convertible(tensor.dtype, dtype):
            stored_as = str(tensor.dtype).removeprefix("torch.")
            expected = str(dtype).removeprefix("torch.")
            raise ModelInvalid(
                f"{path}: {name} is stored as {stored_as}, but config.json implies {expected}.",
                hint="config.json may lack the quantization_config of these weights: download both again.",
            )
        if tensor.is_floating_point():
            return tensor.to(dtype)
        return tensor

    def unread(self) -> list[str]:
        unread = self._files.keys() - self._read_names
        return sorted(name for name in unread if is_text(name) and not name.endswith(_OPTIONAL))

    def _read(self, path: Path, stored: Tensor, slices: Slices | None) -> torch.Tensor:
        try:
            if slices is None:
                return self._read_rows(path, stored, 0, None)
            if slices.axis == 0:
                return torch.cat(
                    [
                        self._read_rows(path, stored, first, length)
                        for first, length in slices.ranges
                    ]
                )
            # Memory has the part and a few rows of the whole tensor at most.
            rows = stored.shape[0]
            step = max(1, _RUN_BYTES * rows // max(1, stored.size_bytes))
            return torch.cat(
                [
                    slices.of(self._read_rows(path, stored, first, min(step, rows - first)))
                    for first in range(0, rows, step)
                ]
            )
        except (OSError, ValueError, KeyError) as error:
            cause = f"unknown type {error}" if isinstance(error, KeyError) else reason(error)
            raise ModelInvalid(
                f"{path}: {stored.name} cannot be read: {cause}.",
                hint="The file may be damaged, or newer than this version of localchat: download it again.",
            ) from error

    def _read_rows(self, path: Path, stored: Tensor, first: int, count: int | None) -> torch.Tensor:
        """Read `count` rows of a tensor from `first` on; None: the whole tensor."""
        if count is None:
            raw = self._reader.read(path, stored.offset, stored.size_bytes)
            return raw.view(_DTYPES[stored.dtype]).reshape(stored.shape)
        row_bytes = stored.size_bytes // stored.shape[0]
        raw = self._reader.read(path, stored.offset + first * row_bytes, count * row_bytes)
        return raw.view(_DTYPES[stored.dtype]).reshape(count, *stored.shape[1:])


def _is_convertible(stored: torch.dtype, expected: torch.dtype) -> bool:
    """Return True if stored numbers can be converted. Codes cannot, because they also need their scale."""
    if stored in _CODES or expected in _CODES:
        return stored == expected
    return stored.is_floating_point == expected.is_floating_point and stored != torch.bool


def read_headers(folder: Path) -> dict[Path, SafetensorsHeader]:
    """Read the headers of all files of weights in a folder. Raises ModelMissing, ModelInvalid."""
    paths = weight_paths(folder)
    if not paths:
        raise ModelMissing(
            f"{folder} contains no safetensors file.",
            hint="Download the model again, or use a GGUF file with llama.cpp.",
        )
    return {path: read_safetensors(path) for path in paths}


def has_imagined(name: str) -> bool:
    """Return True for tensors that a source without files offers: those that the format needs."""
    return ".layers." in name and not name.endswith(_ABSENT)


class RandomWeights:
    """Make random weights, small enough that a deep model stays finite, to measure speed."""

    def __init__(
        self, device: torch.device, seed: int = 0, group: int = 128, bits: int = 4
    ) -> None:
        """`group`: columns of a group, if groups are scattered. `bits`: of a code."""
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
        if name.endswith(_EXPONENTS) and not dtype.is_floating_point:
            return torch.full(shape, _EXPONENT, dtype=dtype, device=self.device)
        if not dtype.is_floating_point:
            limits = torch.iinfo(dtype)
            return self._draw(torch.randint, limits.min, limits.max, shape, dtype=dtype)
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=self.device)
        if name.endswith(_INVERSE_SCALE):
            return torch.full(shape, 1 / self.scale, dtype=dtype, device=self.device)
        numbers = self._draw(torch.randn, shape, dtype=torch.float32)
        if dtype == torch.float8_e4m3fn and name.endswith(_SCALES):
            # Smaller numbers would all round to 0.
            return numbers.abs().to(dtype)
        if name.endswith(_SCALES):
            return numbers.abs().mul_(self.scale).to(dtype)
        return numbers.mul_(0.02).to(dtype)

    def unread(self) -> list[str]:
        return []

    def _groups(self, k: int) -> torch.Tensor:
        """Return scattered groups of columns, equal for all layers of K."""
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
    """Type of floating weights."""
    notify: Callable[[str], None]
    """Function that gets sentences for the user."""

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor on the device. Raises ModelInvalid."""
        return self.source.tensor(name, shape, dtype).to(self.device)
