"""Gemma 3: Gemma 2 with queries and keys normalized per head in place of soft caps.

Gemma Team, 2025 (arXiv 2503.19786). Five layers with a window and one rotation, then one without and
another rotation; both stand in the config. Of the ones that see images, the text part.
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
        "post_attention": "post_attention_layernorm.weight",
        "feed": "pre_feedforward_layernorm.weight",
        "post_feed": "post_feedforward_layernorm.weight",
    },
    merged={
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    },
    norm_offset=1.0,
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
        y, post = flow.product(x, layer.products["o"]), layer.norms["post_attention"]
        x = flow.add_norm(y, layer.norms["feed"], post)
        x = flow.gated(x, layer.products["gate_up"])
        y, post = flow.product(x, layer.products["down"]), layer.norms["post_feed"]
        if number < last:
            x = flow.add_norm(y, weights.layers[number + 1].norms["attention"], post)
    return flow.finish(y, weights.last_norm, post)
