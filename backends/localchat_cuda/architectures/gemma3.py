"""Gemma 3: Gemma 2 with queries and keys normalized per head instead of soft caps.

Gemma Team, 2025 (arXiv 2503.19786). Five layers with a window and one rotation, then one without
a window and with another rotation; the config has both. Of models that see images, only the text part runs.
"""

from dataclasses import replace

import torch

from localchat_cuda.architectures import gemma2
from localchat_cuda.layers.dense import HeadNorms, Layers, X
from localchat_cuda.weights.loader import ModelWeights

NAMES = replace(
    gemma2.NAMES,
    norms={
        **gemma2.NAMES.norms,
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
        y = ops.gemm(x, layer.linears["o"])
        post = layer.norms["post_attention"]
        x = ops.add_norm(y, layer.norms["mlp"], post)
        x = ops.gemm_act_mul(x, layer.linears["gate_up"])
        y = ops.gemm(x, layer.linears["down"])
        post = layer.norms["post_mlp"]
        if number < last:
            x = ops.add_norm(y, weights.layers[number + 1].norms["attention"], post)
    return ops.finish(y, weights.last_norm, post)
