"""Qwen2 and Qwen2.5: the Llama layer with biases on queries, keys and values.

Qwen Team, 2024 (arXiv 2407.10671, 2412.15115).
"""

import torch

from localchat_cuda.layers import Layers, X
from localchat_cuda.weights.loader import ModelWeights, Names

NAMES = Names(
    embedding="model.embed_tokens.weight",
    last_norm="model.norm.weight",
    head="lm_head.weight",
    layer="model.layers.{}.",
    norms={
        "attention": "input_layernorm.weight",
        "feed": "post_attention_layernorm.weight",
    },
    merged={
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    },
    biased=frozenset({"qkv"}),
)
"""Where a checkpoint keeps each weight."""


def forward(flow: Layers[X], weights: ModelWeights) -> torch.Tensor:
    """Last states [P, hidden] of one step, for the head; keys and values go into the pages of the flow."""
    x = flow.embed(weights.embedding, weights.layers[0].norms["attention"])
    last = len(weights.layers) - 1
    for number, layer in enumerate(weights.layers):
        qkv = flow.product(x, layer.products["qkv"])
        x = flow.attend(qkv, number, layer.biases["qkv"], None)
        x = flow.add_norm(flow.product(x, layer.products["o"]), layer.norms["feed"])
        x = flow.gated(x, layer.products["gate_up"])
        y = flow.product(x, layer.products["down"])
        if number < last:
            x = flow.add_norm(y, weights.layers[number + 1].norms["attention"])
    return flow.finish(y, weights.last_norm)
