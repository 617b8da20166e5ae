"""Qwen3-MoE: Qwen3 with experts in place of each feed-forward layer.

Qwen Team, 2025 (arXiv 2505.09388).
"""

from dataclasses import replace

import torch

from localchat_cuda.architectures import qwen3
from localchat_cuda.architectures.names import ExpertNames
from localchat_cuda.layers.dense import HeadNorms, Layers, X
from localchat_cuda.weights.loader import ModelWeights

EXPERTS = ExpertNames(
    router="mlp.gate",
    gate_up=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    down="mlp.experts.{}.down_proj",
)
NAMES = replace(qwen3.NAMES, experts=EXPERTS)
"""Checkpoint name of each weight."""


def forward(ops: Layers[X], weights: ModelWeights) -> torch.Tensor:
    """Last states [P, hidden] of one step; writes keys and values to the KV pages."""
    x = ops.embed(weights.embedding, weights.layers[0].norms["attention"])
    last = len(weights.layers) - 1
    for number, layer in enumerate(weights.layers):
        qkv = ops.gemm(x, layer.linears["qkv"])
        norms = HeadNorms(layer.norms["q_norm"], layer.norms["k_norm"])
        x = ops.attend(qkv, number, None, norms)
        assert layer.experts is not None
        y = ops.gemm(x, layer.linears["o"])
        y = ops.run_experts(y, layer.norms["mlp"], layer.experts)
        if number < last:
            x = ops.add_norm(y, weights.layers[number + 1].norms["attention"])
    return ops.finish(y, weights.last_norm)
