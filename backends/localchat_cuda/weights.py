"""Weights from safetensors files (or drawn at random) to the device, one tensor at a time.

Letters: N output and K input features of a product y = x w^T.

What a model needs is named by its architecture in a `Names` table; `load` walks it, merges the parts that
one product computes (q, k and v; gate and up) along N, and repacks AWQ layers (kernels/w4_pack.py). A
merged weight is allocated whole and filled part by part, so the peak is the model and one tensor.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from safetensors import safe_open

from localchat.errors import EngineClosed, ModelInvalid, ModelMissing
from localchat.fit.safetensors_header import SafetensorsHeader, read_safetensors
from localchat_cuda.config import AWQ_GROUP, ModelConfig
from localchat_cuda.kernels import w4_pack

Weight: TypeAlias = torch.Tensor | w4_pack.W4
Progress: TypeAlias = Callable[[int, int], bool]
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass(frozen=True, slots=True)
class Names:
    """Where an architecture keeps its tensors. In a layer, names follow `layer` with its number in place
    of the braces; `merged` lists the linear layers (without `.weight`) of one product, in the order of
    its output. Those in `biased` have a bias."""

    embedding: str
    last_norm: str
    head: str
    layer: str
    norms: Mapping[str, str]
    merged: Mapping[str, tuple[str, ...]]
    biased: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer: `norms` by their field in Names, [K] or [D] each; `products` [N, K]; `biases` [N]."""

    norms: Mapping[str, torch.Tensor]
    products: Mapping[str, Weight]
    biases: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights. embedding and head [vocabulary, hidden], one tensor where they are tied."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    last_norm: torch.Tensor
    head: torch.Tensor

    @property
    def bytes(self) -> int:
        """What is held on the device."""
        held = {id(t): t for t in (self.embedding, self.head, self.last_norm)}
        total = sum(t.numel() * t.element_size() for t in held.values())
        for layer in self.layers:
            plain = (*layer.norms.values(), *layer.biases.values())
            total += sum(t.numel() * t.element_size() for t in plain)
            for weight in layer.products.values():
                if isinstance(weight, w4_pack.W4):
                    total += weight.bytes
                else:
                    total += weight.numel() * weight.element_size()
        return total


class Source(Protocol):
    """Tensors by their checkpoint names, on the CPU or the device asked for at the opening."""

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor, of this shape or ModelInvalid; a floating one in `dtype`."""
        ...


class Checkpoint:
    """The safetensors files of a folder. Nothing but their headers is read at the opening."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Raises ModelMissing, ModelInvalid."""
        self.folder, self.device = folder, device
        self.headers = read_headers(folder)
        self._open: dict[Path, Any] = {}
        self._files = {
            tensor.name: path for path, header in self.headers.items() for tensor in header.tensors
        }

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        path = self._files.get(name)
        if path is None:
            raise ModelInvalid(
                f"{self.folder} lacks the tensor {name}.",
                hint="A shard may be missing, or the files belong to another model: download again.",
            )
        if path not in self._open:
            self._open = {path: safe_open(path, "pt", device=str(self.device))}
        found: torch.Tensor = self._open[path].get_tensor(name)
        if tuple(found.shape) != shape:
            raise ModelInvalid(
                f"{path}: {name} has the shape {tuple(found.shape)}, and config.json means {shape}.",
                hint="config.json and weights belong to different models: download both again.",
            )
        return found.to(dtype) if found.is_floating_point() else found


def read_headers(folder: Path) -> dict[Path, SafetensorsHeader]:
    """Every safetensors file of a folder. Raises ModelMissing where there is none, ModelInvalid."""
    paths = sorted(folder.glob("*.safetensors"))
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

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if not dtype.is_floating_point:
            return self._draw(torch.randint, -(2**31), 2**31 - 1, shape, dtype=dtype)
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=self.device)
        found = self._draw(torch.randn, *shape, dtype=torch.float32)
        scale = 0.02 / 16 if name.endswith(".scales") else 0.02
        return (found.abs() if name.endswith(".scales") else found).mul_(scale).to(dtype)

    def _draw(
        self, make: Callable[..., torch.Tensor], *sizes: object, dtype: torch.dtype
    ) -> torch.Tensor:
        return make(*sizes, dtype=dtype, device=self.device, generator=self.generator)


def product_shapes(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], int]]:
    """By field of `Names.merged`: output features of each part, and input features."""
    d = config.head_dim
    return {
        "qkv": ((config.heads * d, config.key_heads * d, config.key_heads * d), config.hidden),
        "o": ((config.hidden,), config.heads * d),
        "gate_up": ((config.feed, config.feed), config.hidden),
        "down": ((config.hidden,), config.feed),
    }


class _Loader:
    def __init__(
        self, config: ModelConfig, names: Names, source: Source, device: torch.device,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.config, self.names, self.source = config, names, source
        self.device, self.dtype = device, dtype

    def plain(self, name: str, *shape: int) -> torch.Tensor:
        return self.source.tensor(name, shape, self.dtype).to(self.device)

    def layer(self, number: int) -> LayerWeights:
        begin = self.names.layer.format(number)
        widths = {"q_norm": self.config.head_dim, "k_norm": self.config.head_dim}
        norms = {
            field: self.plain(begin + name, widths.get(field, self.config.hidden))
            for field, name in self.names.norms.items()
        }
        products: dict[str, Weight] = {}
        biases = {}
        for field, (parts, k) in product_shapes(self.config).items():
            prefixes = [begin + name for name in self.names.merged[field]]
            products[field] = (self.packed if self.config.awq else self.dense)(prefixes, parts, k)
            if field in self.names.biased:
                held = [self.plain(f"{p}.bias", n) for p, n in zip(prefixes, parts, strict=True)]
                biases[field] = torch.cat(held)
        return LayerWeights(norms, products, biases)

    def dense(self, prefixes: list[str], parts: tuple[int, ...], k: int) -> torch.Tensor:
        whole = torch.empty(sum(parts), k, dtype=self.dtype, device=self.device)
        first = 0
        for prefix, n in zip(prefixes, parts, strict=True):
            whole[first : first + n] = self.source.tensor(f"{prefix}.weight", (n, k), self.dtype)
            first += n
        return whole

    def packed(self, prefixes: list[str], parts: tuple[int, ...], k: int) -> w4_pack.W4:
        """One part after the other is repacked: a row block of 16 features never spans two parts."""
        groups, found = k // AWQ_GROUP, []
        for prefix, n in zip(prefixes, parts, strict=True):
            codes = self.source.tensor(f"{prefix}.qweight", (k, n // 8), torch.int32)
            zeros = self.source.tensor(f"{prefix}.qzeros", (groups, n // 8), torch.int32)
            scales = self.source.tensor(f"{prefix}.scales", (groups, n), torch.float16)
            held = (each.to(self.device) for each in (codes, zeros, scales))
            try:
                found.append(w4_pack.from_awq(*held))
            except ValueError as trouble:
                raise ModelInvalid(
                    f"{prefix} cannot be packed: {trouble}.",
                    hint="AWQ layers need inputs in groups of 128 and outputs in 16s here.",
                ) from trouble
        if len(found) == 1:
            return found[0]
        return w4_pack.W4(
            torch.cat([each.codes for each in found]), torch.cat([each.steps for each in found])
        )


def load(
    config: ModelConfig,
    names: Names,
    source: Source,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    progress: Progress = lambda done, total: True,
) -> ModelWeights:
    """All weights on `device` in `dtype` (None: the checkpoint's; AWQ codes stay 4 bits). `progress` is
    called after each layer with (layers done, layers in all); False raises EngineClosed. Raises
    ModelInvalid."""
    loader = _Loader(config, names, source, device, dtype or _DTYPES[config.dtype])
    embedding = loader.plain(names.embedding, config.vocabulary, config.hidden)
    layers = []
    for number in range(config.layers):
        layers.append(loader.layer(number))
        if not progress(number + 1, config.layers):
            raise EngineClosed("The load was stopped.")
    head = embedding
    if not config.tied:
        head = loader.plain(names.head, config.vocabulary, config.hidden)
    return ModelWeights(
        embedding, tuple(layers), loader.plain(names.last_norm, config.hidden), head
    )
