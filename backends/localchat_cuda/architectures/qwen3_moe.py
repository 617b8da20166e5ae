"""Qwen3-MoE: Qwen3 with experts in place of each feed-forward layer.

Qwen Team, 2025 (arXiv 2505.09388).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localchat_cuda.architectures import qwen3
from localchat_cuda.architectures.family import Family
from localchat_cuda.architectures.names import ExpertNames
from localchat_cuda.layers.head_norms import HeadNorms

if TYPE_CHECKING:
    import torch

    from localchat_cuda.layers.dense import Layers, X
    from localchat_cuda.weights.model_weights import ModelWeights

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


def forward(ops: Layers[X], weights: ModelWeights) -> torch.Tensor:
    """Return the last states [P, hidden] of one step. Write keys and values to the KV pages."""
    x = ops.embed(weights.embedding, weights.layers[0].norms["attention"])
    last = len(weights.layers) - 1
    for number, layer in enumerate(weights.layers):
        qkv = ops.gemm(x, layer.linears["qkv"])
        norms = HeadNorms(layer.norms["q_norm"], layer.norms["k_norm"])
        x = ops.attend(qkv, number, None, norms)
        assert layer.experts is not None
        y = ops.gemm(x, layer.linears["o"])
        y = ops.run_experts(y, layer.norms["mlp"], layer.experts)
        if number < last:
            x = ops.add_norm(y, weights.layers[number + 1].norms["attention"])
    return ops.finish(y, weights.last_norm)
