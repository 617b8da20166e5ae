"""Qwen2 and Qwen2.5: the Llama layer with biases on queries, keys and values.

Qwen Team, 2024 (arXiv 2407.10671, 2412.15115).
"""

from dataclasses import replace

import torch

from localchat_cuda.architectures import llama
from localchat_cuda.layers.dense import Layers, X
from localchat_cuda.weights.loader import ModelWeights

NAMES = replace(llama.NAMES, biased=frozenset({"qkv"}))
"""Checkpoint name of each weight."""


def forward(ops: Layers[X], weights: ModelWeights) -> torch.Tensor:
    """Last states [P, hidden] of one step; writes keys and values to the KV pages."""
    x = ops.embed(weights.embedding, weights.layers[0].norms["attention"])
    last = len(weights.layers) - 1
    for number, layer in enumerate(weights.layers):
        qkv = ops.gemm(x, layer.linears["qkv"])
        x = ops.attend(qkv, number, layer.biases["qkv"], None)
        x = ops.add_norm(ops.gemm(x, layer.linears["o"]), layer.norms["mlp"])
        x = ops.gemm_act_mul(x, layer.linears["gate_up"])
        y = ops.gemm(x, layer.linears["down"])
        if number < last:
            x = ops.add_norm(y, weights.layers[number + 1].norms["attention"])
    return ops.finish(y, weights.last_norm)
