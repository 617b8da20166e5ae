"""GLM-4-0414: Gemma 2's two norms around each part, merged gate and up, and rotations of neighbouring columns.

Zhipu AI, 2025 (arXiv 2406.12793). Half of a head's columns rotate, in pairs of neighbors. Kernels rotate pairs
that are half of those columns apart, so the rows of queries and keys are loaded in that order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localchat_cuda.architectures import gemma2, phi3
from localchat_cuda.architectures.family import Family

if TYPE_CHECKING:
    import torch

    from localchat_cuda.config.model import ModelConfig


def pairs_apart(config: ModelConfig) -> torch.Tensor:
    """Return rows of queries, keys and values with rotated pairs half the rotated columns apart."""
    import torch

    heads = config.heads
    keys = config.key_heads
    d = config.head_dim
    rotated = config.rotation.columns or d
    rows = torch.arange((heads + 2 * keys) * d).view(-1, d)
    pairs = rows[: heads + keys, :rotated].view(-1, rotated // 2, 2).transpose(1, 2)
    rows[: heads + keys, :rotated] = pairs.reshape(-1, rotated)
    return rows.flatten()


FAMILY = Family(
    name="glm4",
    classes=("Glm4ForCausalLM",),
    label="GLM-4-0414",
    names=replace(
        phi3.FAMILY.names,
        norms={
            "attention": "input_layernorm.weight",
            "post_attention": "post_self_attn_layernorm.weight",
            "mlp": "post_attention_layernorm.weight",
            "post_mlp": "post_mlp_layernorm.weight",
        },
        merged={
            **phi3.FAMILY.names.merged,
            "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        },
        biased=frozenset({"qkv"}),
        orders={"qkv": pairs_apart},
    ),
    defaults={"head_dim": 128, "num_key_value_heads": 2, "partial_rotary_factor": 0.5},
    qkv_bias="optional",
)
forward = gemma2.forward
