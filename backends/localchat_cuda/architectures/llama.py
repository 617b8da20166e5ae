"""Llama 3.x: pre-norm layers, grouped queries, rotary positions, gated SiLU; no biases.

Llama Team, 2024 (arXiv 2407.21783). 3.1 and later stretch slow rotations (config/rope.py: Llama3Scaling).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localchat_cuda.architectures.family import Family, GgufTraits
from localchat_cuda.architectures.names import Names
from localchat_cuda.layers.head_norms import HeadNorms

if TYPE_CHECKING:
    import torch

    from localchat_cuda.layers.dense import Layers, X
    from localchat_cuda.weights.model_weights import ModelWeights

FAMILY = Family(
    name="llama",
    classes=("LlamaForCausalLM",),
    label="Llama 3.x",
    names=Names(
        embedding="model.embed_tokens.weight",
        last_norm="model.norm.weight",
        head="lm_head.weight",
        layer="model.layers.{}.",
        norms={
            "attention": "input_layernorm.weight",
            "mlp": "post_attention_layernorm.weight",
        },
        merged={
            "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "o": ("self_attn.o_proj",),
            "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
            "down": ("mlp.down_proj",),
        },
    ),
    gguf=GgufTraits(paired_rows=True),
)


def forward(ops: Layers[X], weights: ModelWeights) -> torch.Tensor:
    """Return the last states [P, hidden] of one step. Write keys and values to the KV pages.

    Qwen2 adds biases of queries, keys and values, and Qwen3 norms of heads."""
    x = ops.embed(weights.embedding, weights.layers[0].norms["attention"])
    last = len(weights.layers) - 1
    for number, layer in enumerate(weights.layers):
        qkv = ops.gemm(x, layer.linears["qkv"])
        x = ops.attend(qkv, number, layer.biases.get("qkv"), HeadNorms.of(layer.norms))
        x = ops.add_norm(ops.gemm(x, layer.linears["o"]), layer.norms["mlp"])
        x = ops.gemm_act_mul(x, layer.linears["gate_up"])
        y = ops.gemm(x, layer.linears["down"])
        if number < last:
            x = ops.add_norm(y, weights.layers[number + 1].norms["attention"])
    return ops.finish(y, weights.last_norm)
