"""Qwen3.5 and 3.6, dense: the layers of Qwen3-Next without experts, with separate gemms of delta nets.

Qwen Team, 2026. Of models that read images, only the text part runs. In text, the three positions of a token
are equal, so rotations are those of Qwen3-Next.
"""

from dataclasses import replace

from localchat_cuda.architectures import qwen3_next
from localchat_cuda.architectures.family import Family
from localchat_cuda.architectures.names import RecurrentNames

FAMILY = Family(
    name="qwen3_5",
    classes=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    label="Qwen3.5",
    names=replace(
        qwen3_next.HYBRID_NAMES,
        merged={
            **qwen3_next.HYBRID_NAMES.merged,
            "in": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
        },
        recurrent=RecurrentNames.delta_net("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    ),
    defaults={**qwen3_next.HYBRID_DEFAULTS, "num_key_value_heads": 4},
    windows="all",
)
forward = qwen3_next.forward
