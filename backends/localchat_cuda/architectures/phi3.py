"""Phi-3, Phi-4 and Phi-4-mini: the Llama layer, stored with its products merged.

Microsoft, 2024 and 2025 (arXiv 2404.14219, 2412.08905, 2503.01743). The minis turn a part of each head's
columns and slow them by LongRoPE's factors; all of that stands in the config's rotation.
"""

from localchat_cuda.architectures.llama import forward
from localchat_cuda.weights.loader import Names

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
        "qkv": ("self_attn.qkv_proj",),
        "o": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_up_proj",),
        "down": ("mlp.down_proj",),
    },
)
"""Where a checkpoint keeps each weight."""

__all__ = ["NAMES", "forward"]
