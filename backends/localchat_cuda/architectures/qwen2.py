"""Qwen2 and Qwen2.5: the Llama layer with biases on queries, keys and values.

Qwen Team, 2024 (arXiv 2407.10671, 2412.15115).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localchat_cuda.architectures import llama
from localchat_cuda.architectures.family import Family, GgufTraits

if TYPE_CHECKING:
    import torch

    from localchat_cuda.layers.dense import Layers, X
    from localchat_cuda.weights.model_weights import ModelWeights

FAMILY = Family(
    name="qwen2",
    classes=("Qwen2ForCausalLM", "Qwen2_5_VLForConditionalGeneration"),
    label="Qwen2, Qwen2.5",
    names=replace(llama.FAMILY.names, biased=frozenset({"qkv"})),
    defaults={"sliding_window": 4096, "num_key_value_heads": 32},
    gguf=GgufTraits(),
    qkv_bias="always",
    windows="late",
    window_switch=True,
)


def forward(ops: Layers[X], weights: ModelWeights) -> torch.Tensor:
    """Return the last states [P, hidden] of one step. Write keys and values to the KV pages."""
    x = ops.embed(weights.embedding, weights.layers[0].norms["attention"])
    last = len(weights.layers) - 1
    for number, layer in enumerate(weights.layers):
        qkv = ops.gemm(x, layer.linears["qkv"])
        x = ops.attend(qkv, number, layer.biases["qkv"], None)
        x = ops.add_norm(ops.gemm(x, layer.linears["o"]), layer.norms["mlp"])
        x = ops.gemm_act_mul(x, layer.linears["gate_up"])
        y = ops.gemm(x, layer.linears["down"])
        if number < last:
            x = ops.add_norm(y, weights.layers[number + 1].norms["attention"])
    return ops.finish(y, weights.last_norm)
