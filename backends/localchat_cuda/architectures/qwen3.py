"""Qwen3: the Llama layer with queries and keys normalized per head before their rotation.

Qwen Team, 2025 (arXiv 2505.09388).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localchat_cuda.architectures import llama
from localchat_cuda.architectures.family import Family, GgufTraits
from localchat_cuda.layers.head_norms import HeadNorms

if TYPE_CHECKING:
    import torch

    from localchat_cuda.layers.dense import Layers, X
    from localchat_cuda.weights.model_weights import ModelWeights

FAMILY = Family(
    name="qwen3",
    classes=("Qwen3ForCausalLM", "Qwen3VLForConditionalGeneration"),
    label="Qwen3",
    names=replace(
        llama.FAMILY.names,
        norms={
            **llama.FAMILY.names.norms,
            "q_norm": "self_attn.q_norm.weight",
            "k_norm": "self_attn.k_norm.weight",
        },
    ),
    defaults={"sliding_window": 4096, "num_key_value_heads": 32, "head_dim": 128},
    gguf=GgufTraits(),
    windows="late",
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
        x = ops.add_norm(ops.gemm(x, layer.linears["o"]), layer.norms["mlp"])
        x = ops.gemm_act_mul(x, layer.linears["gate_up"])
        y = ops.gemm(x, layer.linears["down"])
        if number < last:
            x = ops.add_norm(y, weights.layers[number + 1].norms["attention"])
    return ops.finish(y, weights.last_norm)
