"""Qwen3: the Llama layer with queries and keys normalized per head before their rotation.

Qwen Team, 2025 (arXiv 2505.09388).
"""

import torch

from localchat_cuda.layers import HeadNorms, Layers, X
from localchat_cuda.weights.loader import ModelWeights, Names

NAMES = Names(
    embedding="model.embed_tokens.weight",
    last_norm="model.norm.weight",
    head="lm_head.weight",
    layer="model.layers.{}.",
    norms={
        "attention": "input_layernorm.weight",
        "q_norm": "self_attn.q_norm.weight",
        "k_norm": "self_attn.k_norm.weight",
        "feed": "post_attention_layernorm.weight",
    },
    merged={
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    },
)
"""Where a checkpoint keeps each weight."""


def forward(flow: Layers[X], weights: ModelWeights) -> torch.Tensor:
    """Last states [P, hidden] of one step, for the head; keys and values go into the pages of the flow."""
    x = flow.embed(weights.embedding, weights.layers[0].norms["attention"])
    last = len(weights.layers) - 1
    for number, layer in enumerate(weights.layers):
        qkv = flow.product(x, layer.products["qkv"])
        norms = HeadNorms(layer.norms["q_norm"], layer.norms["k_norm"])
        x = flow.attend(qkv, number, None, norms)
        x = flow.add_norm(flow.product(x, layer.products["o"]), layer.norms["feed"])
        x = flow.gated(x, layer.products["gate_up"])
        y = flow.product(x, layer.products["down"])
        if number < last:
            x = flow.add_norm(y, weights.layers[number + 1].norms["attention"])
    return flow.finish(y, weights.last_norm)
