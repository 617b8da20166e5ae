"""Weights of a model as the layers read them, by their part in a layer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias

import torch

from localchat_cuda.kernels import ggml, int4
from localchat_cuda.kernels.delta_net import DeltaNetWeights
from localchat_cuda.kernels.experts import Experts
from localchat_cuda.kernels.fp8_int8.bounded_head import BoundedHead
from localchat_cuda.kernels.ggml import GgmlWeight
from localchat_cuda.kernels.int4 import gemm_dequant, gemm_e4m3
from localchat_cuda.kernels.int4 import pack as w4_pack
from localchat_cuda.kernels.launch import traits
from localchat_cuda.weights.formats.weight import Weight, bytes_of

RecurrentWeights: TypeAlias = DeltaNetWeights | torch.Tensor
"""Weights of a layer with a running state besides its linear layers: a delta net's or a Mamba 2's, or the taps
[C, L] of a short convolution."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of a layer by their field in Names.

    Shapes: norms [K] or [D], linears [N, K], biases [N]."""

    norms: Mapping[str, torch.Tensor]
    linears: Mapping[str, Weight]
    biases: Mapping[str, torch.Tensor]
    experts: Experts | None = None
    sinks: torch.Tensor | None = None
    """[heads]; None: attention has no sinks."""
    recurrent: RecurrentWeights | None = None
    kv: torch.Tensor | None = None
    """[heads, N + V, D], floating: makes each head's unrotated key columns and its values of a latent.

    None: not multi-head latent attention."""
    scale: float = 1.0
    """Factor of the residual after the layer."""


class LayerInputs(NamedTuple):
    """Second embedding of a Gemma 4. Each of L layers reads P columns."""

    table: torch.Tensor
    """[vocabulary, L*P]"""
    projection: torch.Tensor
    """[L*P, hidden], applied to the first embedding."""
    norm: torch.Tensor
    """[P], applied to the projection."""


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of a model.

    Embedding and head [vocabulary, hidden] are one tensor if they are tied and the head is floating."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    last_norm: torch.Tensor
    head: torch.Tensor | GgmlWeight
    bounded_head: BoundedHead | None = None
    """Int8 copy of a floating head."""
    inputs: LayerInputs | None = None

    @property
    def bytes(self) -> int:
        """Bytes on the device."""
        return bytes_of(self)

    @property
    def copy_type(self) -> type | None:
        """Type of the unpacked copies of packed layers. None: memory contains none."""
        for weight in self.layers[0].linears.values():
            if isinstance(weight, w4_pack.W4 | GgmlWeight) and weight.unpacked is not None:
                return type(weight.unpacked)
        return None

    @property
    def packed(self) -> bool:
        """True if all linear layers are packed, so that steps of few rows use PackedLayers."""
        return all(
            (isinstance(weight, w4_pack.W4) and not weight.padding)
            or (isinstance(weight, GgmlWeight) and weight.features_in % w4_pack.BLOCK_K == 0)
            for layer in self.layers
            for weight in layer.linears.values()
        )

    def packed_rows(self, device: torch.device, *, prompts: bool = False) -> int:
        """Return the largest number of rows of a step for PackedLayers; 0: they cannot be used.

        `prompts`: the step has some."""
        if not self.packed:
            return 0
        linears = [weight for layer in self.layers for weight in layer.linears.values()]
        if any(isinstance(weight, GgmlWeight) for weight in linears):
            return ggml.FEW_ROWS
        limit = int4.packed_rows(device, self.copy_type, prompts=prompts)
        packed = (weight for weight in linears if isinstance(weight, w4_pack.W4))
        return min((int4.rows_for(weight, limit) for weight in packed), default=limit)


def with_unpacked(weights: ModelWeights, dtype: torch.dtype) -> ModelWeights:
    """Add an unpacked copy in `dtype` of every packed linear layer; see W4.unpacked.

    Int4 weights in groups of 128 get one in e4m3 on Hopper GPUs, which multiply it."""
    device = weights.embedding.device
    takes_e4m3 = traits(device).capability[0] == gemm_e4m3.CAPABILITY
    serves_e4m3 = takes_e4m3 and gemm_e4m3.serves(device)

    def with_copy(weight: Weight) -> Weight:
        if isinstance(weight, w4_pack.W4):
            if takes_e4m3 and weight.group == w4_pack.BLOCK_K:
                # The memory plan has no room for a larger copy.
                return weight._replace(unpacked=gemm_e4m3.unpack(weight)) if serves_e4m3 else weight
            write = partial(gemm_dequant.dequantize, weight)
            reference = partial(w4_pack.dense, weight)
        elif isinstance(weight, GgmlWeight):
            write = partial(ggml.dequantize, weight)
            reference = partial(ggml.dense, weight)
        else:
            return weight
        if device.type == "cpu":
            return weight._replace(unpacked=reference(dtype))
        out = torch.empty(weight.features_out, weight.features_in, dtype=dtype, device=device)
        write(out)
        return weight._replace(unpacked=out)

    layers = tuple(
        replace(layer, linears={name: with_copy(weight) for name, weight in layer.linears.items()})
        for layer in weights.layers
    )
    return replace(weights, layers=layers)
