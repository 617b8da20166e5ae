"""Where tensors come from: safetensors files of a folder, or a random draw."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open

from localchat.errors import ModelInvalid, ModelMissing, reason
from localchat.model_files.checkpoint import weight_paths
from localchat.model_files.safetensors import SafetensorsHeader, read_safetensors
from localchat_cuda.weights.tensor_names import canonical_name, is_text

_STEPS = (".scales", ".weight_scale", ".weight_scale_inv")
"""Names of what codes are multiplied by."""
_WHOLE = "model.safetensors"
"""A file by this name holds all, whatever lies beside it."""
_HARMLESS = (
    *("inv_freq", "input_scale", "output_scale", "k_scale", "v_scale", "q_scale"),
    *("g_idx", "weight_shape", "weight_zero_point", "input_zero_point"),
)
"""Ends of names that may go unread: what is known without them, and scales for a rounding that is not done."""
_GROUP = 128
_CODES = (
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz),
    *(torch.float8_e5m2, torch.float8_e5m2fnuz),
)


class WeightSource(Protocol):
    """Tensors by their checkpoint names, on the CPU or the device asked for at the opening."""

    def has(self, name: str) -> bool:
        """Whether there is such a tensor. A random draw has those that a checkpoint must have in the format
        at hand, and none that it may lack."""
        ...

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of a tensor, for those that come in several; None: any that is asked for."""
        ...

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor, of this shape or ModelInvalid; a floating one in `dtype`."""
        ...

    def unread(self) -> list[str]:
        """Tensors of the text part that nobody asked for, and that would have changed its numbers."""
        ...


class CheckpointWeights:
    """The safetensors files of a folder, names as tensor_names.py has them. Nothing but their headers is read
    at the opening."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Raises ModelMissing, ModelInvalid."""
        self.folder, self.device = folder, device
        self.headers = read_headers(folder)
        self._open: dict[Path, Any] = {}
        self._read_names: set[str] = set()
        self._index = _index(folder)
        self._files: dict[str, tuple[Path, str]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path, header in self.headers.items():
            for tensor in header.tensors:
                name = canonical_name(tensor.name)
                if name not in self._files or path.name in (self._index.get(name), _WHOLE):
                    self._files[name] = path, tensor.name
                    self._shapes[name] = tensor.shape

    def has(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes.get(name, ())

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self._read_names.add(name)
        path, stored = self._files.get(name, (None, name))
        if path is None:
            file = self._index.get(name, "")
            absent = (
                f": {file} is not there" if file and self.folder / file not in self.headers else ""
            )
            raise ModelInvalid(
                f"{self.folder} lacks the tensor {name}{absent}.",
                hint="A shard may be missing, or the files belong to another model: download again.",
            )
        found = self._read(path, stored)
        if tuple(found.shape) != shape:
            raise ModelInvalid(
                f"{path}: {name} has the shape {tuple(found.shape)}, and config.json means {shape}.",
                hint="config.json and weights belong to different models: download both again.",
            )
        if not _stands_for(found.dtype, dtype):
            kind, wanted = (str(each).removeprefix("torch.") for each in (found.dtype, dtype))
            raise ModelInvalid(
                f"{path}: {name} is stored as {kind}, and config.json means numbers that {wanted} can hold.",
                hint="config.json may lack the quantization_config of these weights: download both again.",
            )
        return found.to(dtype) if found.is_floating_point() else found

    def unread(self) -> list[str]:
        left = self._files.keys() - self._read_names
        return sorted(name for name in left if is_text(name) and not name.endswith(_HARMLESS))

    def _read(self, path: Path, stored: str) -> torch.Tensor:
        try:
            if path not in self._open:
                self._open = {path: safe_open(path, "pt", device=str(self.device))}
            found: torch.Tensor = self._open[path].get_tensor(stored)
        except (SafetensorError, OSError) as error:
            raise ModelInvalid(
                f"{path}: {stored} cannot be read: {reason(error)}.",
                hint="The file may be damaged, or newer than the safetensors library: download it again.",
            ) from error
        return found


def _stands_for(found: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether stored numbers are what is wanted once they are converted: codes are not, without their scale."""
    if found in _CODES or wanted in _CODES:
        return found == wanted
    return found.is_floating_point == wanted.is_floating_point and found != torch.bool


def _index(folder: Path) -> dict[str, str]:
    """By tensor the file where it should be, as a checkpoint of several files says; empty where it does not."""
    try:
        found = json.loads((folder / f"{_WHOLE}.index.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    placed = found.get("weight_map") if isinstance(found, dict) else None
    held = placed.items() if isinstance(placed, dict) else ()
    return {canonical_name(name): file for name, file in held if isinstance(file, str)}


def read_headers(folder: Path) -> dict[Path, SafetensorsHeader]:
    """Of every file of weights in a folder. Raises ModelMissing where there is none, ModelInvalid."""
    paths = weight_paths(folder)
    if not paths:
        raise ModelMissing(
            f"{folder} holds no safetensors file.",
            hint="Download the model again, or take a GGUF of it for llama.cpp.",
        )
    return {path: read_safetensors(path) for path in paths}


class RandomWeights:
    """Weights drawn at random, small enough that a deep model stays finite: for measuring speed."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def has(self, name: str) -> bool:
        return ".layers." in name and not name.endswith((".weight", ".bias", "g_idx"))

    def shape(self, name: str) -> None:
        return None

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if name.endswith("g_idx"):
            return self._groups(shape[0])
        if not dtype.is_floating_point:
            return self._draw(torch.randint, -(2**31), 2**31 - 1, shape, dtype=dtype)
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=self.device)
        found = self._draw(torch.randn, shape, dtype=torch.float32)
        step = name.endswith(_STEPS)
        return (found.abs() if step else found).mul_(0.02 / 16 if step else 0.02).to(dtype)

    def unread(self) -> list[str]:
        return []

    def _groups(self, k: int) -> torch.Tensor:
        """Scattered groups of 128 columns, the same for all layers with as many: they read the same."""
        draw = torch.Generator(self.device).manual_seed(k)
        return torch.randperm(k, device=self.device, generator=draw).to(torch.int32) // _GROUP

    def _draw(
        self, make: Callable[..., torch.Tensor], *sizes: object, dtype: torch.dtype
    ) -> torch.Tensor:
        return make(*sizes, dtype=dtype, device=self.device, generator=self.generator)


class LoadTarget(NamedTuple):
    """dtype: of floating weights. say: takes a sentence that the user should read."""

    source: WeightSource
    device: torch.device
    dtype: torch.dtype
    notify: Callable[[str], None]

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor on the device. Raises ModelInvalid."""
        return self.source.tensor(name, shape, dtype).to(self.device)
