"""Qwen3.5-MoE and Qwen3.6-MoE: Qwen3.5 with the experts of Qwen3-Next.

Qwen Team, 2026. Checkpoints store each expert apart, or all of a layer in one tensor.
"""

from dataclasses import replace

from localchat_cuda.architectures import qwen2_moe, qwen3_5, qwen3_next
from localchat_cuda.architectures.family import ExpertTraits, Family

FAMILY = Family(
    name="qwen3_5_moe",
    classes=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    names=replace(
        qwen3_5.FAMILY.names,
        experts=replace(
            qwen2_moe.EXPERTS, stacked=("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
        ),
    ),
    defaults={
        **qwen3_next.HYBRID_DEFAULTS,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    intermediate_field="moe_intermediate_size",
    windows="all",
    experts=ExpertTraits(normalized=True),
)
forward = qwen3_next.forward
