"""Qwen3-MoE: Qwen3 with experts in place of each feed-forward layer.

Qwen Team, 2025 (arXiv 2505.09388).
"""

from dataclasses import replace

from localchat_cuda.architectures import llama, qwen3
from localchat_cuda.architectures.family import Family
from localchat_cuda.architectures.names import ExpertNames

EXPERTS = ExpertNames(
    router="mlp.gate",
    gate_up=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    down="mlp.experts.{}.down_proj",
)
FAMILY = Family(
    name="qwen3_moe",
    classes=("Qwen3MoeForCausalLM",),
    label="Qwen3-MoE",
    names=replace(qwen3.FAMILY.names, experts=EXPERTS),
    defaults={
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    intermediate_field="moe_intermediate_size",
    windows="all",
    window_switch=True,
)
forward = llama.forward
