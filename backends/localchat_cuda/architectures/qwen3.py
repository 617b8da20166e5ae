"""Qwen3: the Llama layer with queries and keys normalized per head before their rotation.

Qwen Team, 2025 (arXiv 2505.09388).
"""

from dataclasses import replace

import torch

from localchat_cuda.architectures import llama
from localchat_cuda.layers.dense import HeadNorms, Layers, X
from localchat_cuda.weights.loader import ModelWeights

NAMES = replace(
    llama.NAMES,
    norms={
        **llama.NAMES.norms,
        "q_norm": "self_attn.q_norm.weight",
        "k_norm": "self_attn.k_norm.weight",
    },
)
"""Checkpoint name of each weight."""


def forward(ops: Layers[X], weights: ModelWeights) -> torch.Tensor:
    """Last states [P, hidden] of one step; writes keys and values to the KV pages."""
    x = ops.embed(weights.embedding, weights.layers[0].norms["attention"])
    last = len(weights.layers) - 1
    for number, layer in enumerate(weights.layers):
        qkv = ops.gemm(x, layer.linears["qkv"])
        norms = HeadNorms(layer.norms["q_norm"], layer.norms["k_norm"])
        x = ops.attend(qkv, number, None, norms)
        x = ops.add_norm(ops.gemm(x, layer.linears["o"]), layer.norms["mlp"])
        x = ops.gemm_act_mul(x, layer.linears["gate_up"])
        y = ops.gemm(x, layer.linears["down"])
        if number < last:
            x = ops.add_norm(y, weights.layers[number + 1].norms["attention"])
    return ops.finish(y, weights.last_norm)
