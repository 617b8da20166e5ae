"""Qwen3.5 and 3.6, dense: the layers of Qwen3-Next without experts, with separate gemms of delta nets.

Qwen Team, 2026. Of models that read images, only the text part runs. In text, the three positions of a token
are equal, so rotations are those of Qwen3-Next.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localchat_cuda.architectures import qwen3_next
from localchat_cuda.architectures.family import Family
from localchat_cuda.architectures.names import RecurrentNames

if TYPE_CHECKING:
    import torch

    from localchat_cuda.layers.dense import DenseLayers
    from localchat_cuda.weights.model_weights import ModelWeights

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


def forward(ops: DenseLayers, weights: ModelWeights) -> torch.Tensor:
    """Return the last states [P, hidden] of one step. Write KV pages and delta-net states."""
    x = ops.embed(weights.embedding, weights.layers[0].norms["attention"])
    last = len(weights.layers) - 1
    for number, layer in enumerate(weights.layers):
        x = ops.add_norm(qwen3_next.mix(ops, x, layer, number), layer.norms["mlp"])
        x = ops.gemm_act_mul(x, layer.linears["gate_up"])
        y = ops.gemm(x, layer.linears["down"])
        if number < last:
            x = ops.add_norm(y, weights.layers[number + 1].norms["attention"])
    return ops.finish(y, weights.last_norm)
