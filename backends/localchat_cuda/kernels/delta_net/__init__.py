"""Gated delta nets and Mamba 2: a short convolution, and a state that each token of a sequence changes.

A layer takes three steps over the products of its input: `prepare` (convolution, norms, gates), the rule
(`recurrent` for few tokens of a sequence and for narrow heads, `chunked` for many), and `gated_norm`.
"""

import torch

from localchat_cuda.kernels.attention.reference import AttentionBatch
from localchat_cuda.kernels.delta_net import chunked, prepare, recurrent
from localchat_cuda.kernels.delta_net.shapes import (
    CHUNK,
    TAPS,
    ChunkedPart,
    DeltaNetWeights,
    LayerStates,
    Prepared,
    Projection,
    Tokens,
)

__all__ = [
    "CHUNK",
    "TAPS",
    "ChunkedPart",
    "DeltaNetWeights",
    "LayerStates",
    "Prepared",
    "Projection",
    "Tokens",
    "apply",
    "reference",
]


def reference(
    projection: Projection,
    weights: DeltaNetWeights,
    states: LayerStates,
    tokens: Tokens,
    batch: AttentionBatch,
    out: torch.Tensor,
) -> None:
    """Run a layer up to its norm over all sequences with plain torch. Returns out [T, H, V]."""
    prepared = _prepared(states, out)
    prepare.reference(projection, weights, states, tokens, prepared)
    recurrent.reference(prepared, projection, states, batch, out, weights.skip)


def apply(
    projection: Projection,
    weights: DeltaNetWeights,
    states: LayerStates,
    tokens: Tokens,
    few: AttentionBatch | None,
    many: ChunkedPart | None,
    out: torch.Tensor,
) -> None:
    """Run a layer like `reference`. `few` has sequences of a few tokens, and `many` may be None."""
    prepared = _prepared(states, out)
    prepare.prepare(projection, weights, states, tokens, prepared)
    if few is not None:
        recurrent.apply(prepared, projection, states, few, out, weights.skip)
    if many is not None and chunked.takes(states):
        chunked.apply(prepared, projection, states, many, out, weights.skip)
    elif many is not None:
        recurrent.apply(prepared, projection, states, many.batch, out, weights.skip)


def _prepared(states: LayerStates, out: torch.Tensor) -> Prepared:
    return Prepared.empty(
        out.shape[0], states.inputs.shape[2], out.shape[1], states.inputs.dtype, out.device
    )
