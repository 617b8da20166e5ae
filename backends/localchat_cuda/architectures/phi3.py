"""Phi-3, Phi-4 and Phi-4-mini: the Llama layer, stored with merged weights.

Microsoft, 2024 and 2025 (arXiv 2404.14219, 2412.08905, 2503.01743). The minis rotate a part of
each head's columns and slow them by LongRoPE's factors; the config's rotation has both.
"""

from dataclasses import replace

from localchat_cuda.architectures import llama
from localchat_cuda.architectures.llama import forward

NAMES = replace(
    llama.NAMES,
    merged={
        "qkv": ("self_attn.qkv_proj",),
        "o": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_up_proj",),
        "down": ("mlp.down_proj",),
    },
)
"""Checkpoint name of each weight."""

__all__ = ["NAMES", "forward"]
