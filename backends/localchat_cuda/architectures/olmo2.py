"""OLMo 2: norms after attention and feed-forward only, queries and keys normalized over all heads together.

OLMo Team, 2024 (arXiv 2501.00656). What a layer reads is the residual itself.
"""

from dataclasses import replace

import torch

from localchat_cuda.architectures import llama
from localchat_cuda.layers.dense import HeadNorms, Layers, X
from localchat_cuda.weights.loader import ModelWeights

NAMES = replace(
    llama.NAMES,
    norms={
        "post_attention": "post_attention_layernorm.weight",
        "post_mlp": "post_feedforward_layernorm.weight",
        "q_norm": "self_attn.q_norm.weight",
        "k_norm": "self_attn.k_norm.weight",
    },
)
"""Checkpoint name of each weight."""


def forward(ops: Layers[X], weights: ModelWeights) -> torch.Tensor:
    """Last states [P, hidden] of one step; writes keys and values to the KV pages."""
    x = ops.embed(weights.embedding, None)
    last = len(weights.layers) - 1
    for number, layer in enumerate(weights.layers):
        qkv = ops.gemm(x, layer.linears["qkv"])
        norms = HeadNorms(layer.norms["q_norm"], layer.norms["k_norm"])
        x = ops.attend(qkv, number, None, norms)
        x = ops.add_norm(ops.gemm(x, layer.linears["o"]), None, layer.norms["post_attention"])
        x = ops.gemm_act_mul(x, layer.linears["gate_up"])
        y = ops.gemm(x, layer.linears["down"])
        post = layer.norms["post_mlp"]
        if number < last:
            x = ops.add_norm(y, None, post)
    return ops.finish(y, weights.last_norm, post)
