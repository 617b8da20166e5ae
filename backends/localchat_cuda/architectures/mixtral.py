"""Mixtral: the Mistral layer with experts in place of each feed-forward layer.

Mistral AI, 2024 (arXiv 2401.04088).
"""

from dataclasses import replace

import torch

from localchat_cuda.architectures import mistral
from localchat_cuda.architectures.names import ExpertNames
from localchat_cuda.layers.dense import Layers, X
from localchat_cuda.weights.loader import ModelWeights

NAMES = replace(
    mistral.NAMES,
    experts=ExpertNames(
        router="block_sparse_moe.gate",
        gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        down="block_sparse_moe.experts.{}.w2",
    ),
)
"""Checkpoint name of each weight."""


def forward(ops: Layers[X], weights: ModelWeights) -> torch.Tensor:
    """Last states [P, hidden] of one step; writes keys and values to the KV pages."""
    x = ops.embed(weights.embedding, weights.layers[0].norms["attention"])
    last = len(weights.layers) - 1
    for number, layer in enumerate(weights.layers):
        qkv = ops.gemm(x, layer.linears["qkv"])
        x = ops.attend(qkv, number, None, None)
        assert layer.experts is not None
        y = ops.gemm(x, layer.linears["o"])
        y = ops.run_experts(y, layer.norms["mlp"], layer.experts)
        if number < last:
            x = ops.add_norm(y, weights.layers[number + 1].norms["attention"])
    return ops.finish(y, weights.last_norm)
