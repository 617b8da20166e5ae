"""Layers quantized by rounding, stored as each library stores them: what published checkpoints look like.

Letters: N output and K input features, G groups along K.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from tests.support.awq import to_awq
from tests.support.tiny_models import Layer, save_layers

WIDE = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1}
"""Of a model: more than one group everywhere, so that act-order scatters them."""


@dataclass(frozen=True)
class Rounded:
    """codes [N, K] and groups [K] in the order of the layer; scales fp16 and zeros [N, G]."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor
    bits: int = 4

    @property
    def weight(self) -> torch.Tensor:
        at = self.groups.long()
        return (self.codes - self.zeros[:, at]) * self.scales.float()[:, at]


@dataclass(frozen=True)
class Way:
    """How to round. size: columns of a group, 0: all. ordered: groups are scattered, for layers that read
    the same in the same way. seed: of that. bits: of a code."""

    size: int = 128
    symmetric: bool = False
    ordered: bool = False
    seed: int = 0
    bits: int = 4

    def rounded(self, prefix: str, weight: torch.Tensor) -> Rounded:
        n, k = weight.shape
        size = self.size or k
        order = torch.arange(k)
        if self.ordered:
            kind = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
            name = prefix.split(".")[-1]
            draw = torch.Generator().manual_seed(self.seed + sum(map(ord, kind.get(name, name))))
            order = torch.randperm(k, generator=draw)
        runs = weight[:, order].view(n, k // size, size)
        most = (1 << self.bits) - 1
        low, high = runs.amin(2).clamp(max=0), runs.amax(2).clamp(min=0)
        if self.symmetric:
            scales = (torch.maximum(-low, high) / (most / 2)).half()
            zeros = torch.full_like(low, (most + 1) // 2)
        else:
            scales = ((high - low) / most).half()
            zeros = (-low / scales.float()).round().clamp(0, most)
        codes = (runs / scales.float()[..., None]).round() + zeros[..., None]
        groups = torch.empty(k, dtype=torch.int32)
        groups[order] = torch.arange(k, dtype=torch.int32) // size
        natural = torch.empty(n, k, dtype=torch.int64)
        natural[:, order] = codes.clamp(0, most).long().view(n, k)
        return Rounded(natural, scales, zeros.long(), groups, self.bits)


def words(codes: torch.Tensor, axis: int, bits: int = 4) -> torch.Tensor:
    """Eight codes (of 8 bits: four) in a word along `axis`, the first in the lowest bits."""
    lines, count = codes.movedim(axis, -1), 32 // bits
    found = (lines.reshape(*lines.shape[:-1], -1, count) << (bits * torch.arange(count))).sum(-1)
    return torch.where(found >= 2**31, found - 2**32, found).to(torch.int32).movedim(-1, axis)


def gptq(found: Rounded, version: int, *, borrowed: bool = True) -> Layer:
    """As AutoGPTQ and GPTQModel store it. Version 1 takes one of each zero: of whole words (borrowed), or of
    each code for itself."""
    zeros, bits = found.zeros.t(), found.bits
    if version == 1 and not borrowed:
        zeros = (zeros - 1) & ((1 << bits) - 1)
    stored = words(zeros, 1, bits)
    if version == 1 and borrowed:
        ones = 0x11111111 if bits == 4 else 0x01010101
        stored = (stored.long() - ones).to(torch.int32)
    tensors = {
        "qweight": words(found.codes.t(), 0, bits),
        "qzeros": stored,
        "scales": found.scales.t(),
        "g_idx": found.groups,
    }
    return Layer(tensors, found.weight)


def awq(found: Rounded) -> Layer:
    """As AutoAWQ stores it."""
    names = ("qweight", "qzeros", "scales")
    parts = zip(names, to_awq(found.codes, found.scales, found.zeros), strict=True)
    return Layer(dict(parts), found.weight)


def compressed(found: Rounded, *, symmetric: bool, ordered: bool) -> Layer:
    """As llm-compressor stores it: pack-quantized."""
    n, k = found.codes.shape
    tensors = {
        "weight_packed": words(found.codes, 1, found.bits),
        "weight_scale": found.scales,
        "weight_shape": torch.tensor([n, k]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(found.zeros, 0, found.bits)
    if ordered:
        tensors["weight_g_idx"] = found.groups
    return Layer(tensors, found.weight)


def int8(found: Rounded, *, symmetric: bool) -> Layer:
    """As llm-compressor stores it: int-quantized."""
    tensors = {
        "weight": (found.codes - 128).to(torch.int8),
        "weight_scale": found.scales.bfloat16(),
    }
    if not symmetric:
        tensors["weight_zero_point"] = (found.zeros - 128).to(torch.int8)
    return Layer(tensors, replace(found, scales=tensors["weight_scale"]).weight)


def gptq_config(way: Way, version: int = 1, **changed: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": way.bits, "group_size": way.size or -1, "desc_act": way.ordered,
        "sym": way.symmetric, "checkpoint_format": "gptq" if version == 1 else "gptq_v2", **changed,
    }  # fmt: skip


def awq_config(way: Way) -> dict[str, Any]:
    return {
        "quant_method": "awq", "bits": 4, "group_size": way.size, "version": "gemm", "zero_point": True,
    }  # fmt: skip


def compressed_config(way: Way, layout: str = "pack-quantized") -> dict[str, Any]:
    weights = {
        "num_bits": way.bits, "type": "int", "symmetric": way.symmetric,
        "strategy": "group" if way.size else "channel", "group_size": way.size or None,
        "actorder": "group" if way.ordered else None, "dynamic": False,
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, "quantization_status": "compressed",
    }  # fmt: skip


def save(
    model: Any, folder: Path, way: Way, version: int | Literal["awq", "int8"] = 1,
    stored: int | None = None, floating: str = "-",
) -> None:  # fmt: skip
    """A checkpoint of GPTQ, with version 0 or int8 of compressed-tensors, or of AWQ. stored: the version of
    the zeros, where the label lies. floating: in the names of layers that are not quantized."""

    def layer(prefix: str, weight: torch.Tensor) -> Layer:
        found = way.rounded(prefix, weight)
        if version == "awq":
            return awq(found)
        if version == "int8":
            return int8(found, symmetric=way.symmetric)
        if not version:
            return compressed(found, symmetric=way.symmetric, ordered=way.ordered)
        return gptq(found, stored or version)

    if version == "awq":
        config = awq_config(way)
    elif version == "int8":
        config = compressed_config(way, "int-quantized")
    else:
        config = gptq_config(way, version) if version else compressed_config(way)
    save_layers(model, folder, layer, config, floating)
