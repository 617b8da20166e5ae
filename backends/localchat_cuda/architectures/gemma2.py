"""Gemma 2: norms before and after attention and feed-forward, GELU, a window in every second layer.

Gemma Team, 2024 (arXiv 2408.00118). Norms store their weights minus one. The config has the scaled
embedding, the soft caps of attention and head, the windows and the attention's scale.
"""

from dataclasses import replace

import torch

from localchat_cuda.architectures import llama
from localchat_cuda.layers.dense import Layers, X
from localchat_cuda.weights.loader import ModelWeights

NAMES = replace(
    llama.NAMES,
    norms={
        "attention": "input_layernorm.weight",
        "post_attention": "post_attention_layernorm.weight",
        "mlp": "pre_feedforward_layernorm.weight",
        "post_mlp": "post_feedforward_layernorm.weight",
    },
    norm_offset=1.0,
)
"""Checkpoint name of each weight."""


def forward(ops: Layers[X], weights: ModelWeights) -> torch.Tensor:
    """Last states [P, hidden] of one step; writes keys and values to the KV pages."""
    x = ops.embed(weights.embedding, weights.layers[0].norms["attention"])
    last = len(weights.layers) - 1
    for number, layer in enumerate(weights.layers):
        qkv = ops.gemm(x, layer.linears["qkv"])
        x = ops.attend(qkv, number, None, None)
        y = ops.gemm(x, layer.linears["o"])
        post = layer.norms["post_attention"]
        x = ops.add_norm(y, layer.norms["mlp"], post)
        x = ops.gemm_act_mul(x, layer.linears["gate_up"])
        y = ops.gemm(x, layer.linears["down"])
        post = layer.norms["post_mlp"]
        if number < last:
            x = ops.add_norm(y, weights.layers[number + 1].norms["attention"], post)
    return ops.finish(y, weights.last_norm, post)
