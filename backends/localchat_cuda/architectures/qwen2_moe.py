"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, and a gated shared expert.

Qwen Team, 2024 (arXiv 2407.10671).
"""

from dataclasses import replace

from localchat_cuda.architectures import llama, qwen2, qwen3_moe
from localchat_cuda.architectures.family import Family

EXPERTS = replace(
    qwen3_moe.EXPERTS,
    shared=(
        ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        "mlp.shared_expert.down_proj",
    ),
    shared_gate="mlp.shared_expert_gate",
)
FAMILY = Family(
    name="qwen2_moe",
    classes=("Qwen2MoeForCausalLM",),
    label="Qwen2-MoE",
    names=replace(qwen2.FAMILY.names, experts=EXPERTS),
    defaults={
        "num_key_value_heads": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    intermediate_field="moe_intermediate_size",
    qkv_bias="always",
    windows="all",
    window_switch=True,
)
forward = llama.forward
