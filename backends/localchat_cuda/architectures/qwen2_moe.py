"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, and a gated shared expert.

Qwen Team, 2024 (arXiv 2407.10671).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localchat_cuda.architectures import qwen2, qwen3_moe
from localchat_cuda.architectures.family import Family

if TYPE_CHECKING:
    import torch

    from localchat_cuda.layers.dense import Layers, X
    from localchat_cuda.weights.model_weights import ModelWeights

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


def forward(ops: Layers[X], weights: ModelWeights) -> torch.Tensor:
    """Return the last states [P, hidden] of one step. Write keys and values to the KV pages."""
    x = ops.embed(weights.embedding, weights.layers[0].norms["attention"])
    last = len(weights.layers) - 1
    for number, layer in enumerate(weights.layers):
        qkv = ops.gemm(x, layer.linears["qkv"])
        x = ops.attend(qkv, number, layer.biases["qkv"], None)
        assert layer.experts is not None
        y = ops.gemm(x, layer.linears["o"])
        y = ops.run_experts(y, layer.norms["mlp"], layer.experts)
        if number < last:
            x = ops.add_norm(y, weights.layers[number + 1].norms["attention"])
    return ops.finish(y, weights.last_norm)
