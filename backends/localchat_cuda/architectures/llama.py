"""Llama 3.x: pre-norm layers, grouped queries, rotary positions, gated SiLU; no biases.

Llama Team, 2024 (arXiv 2407.21783). 3.1 and later stretch slow rotations (config/rope.py: Llama3Scaling).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from localchat_cuda.architectures.family import Family, GgufTraits
from localchat_cuda.architectures.names import Names
from localchat_cuda.layers.head_norms import AttentionWeights, HeadNorms

if TYPE_CHECKING:
    import torch

    from localchat_cuda.layers.dense import Layers, Sums, X
    from localchat_cuda.weights.model_weights import LayerWeights, ModelWeights

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


def mix(ops: Layers[X], x: X, layer: LayerWeights, number: int) -> Sums:
    """Run the attention or the running state of a layer: partial sums [S, T, hidden].

    Qwen2 adds biases of queries, keys and values, Qwen3 norms of heads, and gpt-oss sinks."""
    linears = layer.linears
    if layer.recurrent is not None:
        x = ops.run_recurrent(ops.gemm(x, linears["in"]), layer.recurrent, number)
        return ops.gemm(x, linears["out"])
    qkv = ops.gemm(x, linears["qkv"])
    norms = HeadNorms.of(layer.norms)
    x = ops.attend(qkv, number, AttentionWeights(layer.biases.get("qkv"), norms, layer.sinks))
    return ops.reduce(ops.gemm(x, linears["o"]))


def forward(ops: Layers[X], weights: ModelWeights, mix: Callable[..., Sums] = mix) -> torch.Tensor:
    """Return the last states [P, hidden] of one step. Write KV pages and running states.

    Experts replace the MLP of the layers that have them. `mix`: a family's own attention."""
    x = ops.embed(weights.embedding, weights.layers[0].norms["attention"])
    last = len(weights.layers) - 1
    for number, layer in enumerate(weights.layers):
        y = mix(ops, x, layer, number)
        if layer.experts is not None:
            y = ops.run_experts(y, layer.norms["mlp"], layer.experts, layer.biases.get("o"))
        else:
            x = ops.add_norm(y, layer.norms["mlp"])
            x = ops.gemm_act_mul(x, layer.linears["gate_up"])
            y = ops.reduce(ops.gemm(x, layer.linears["down"]))
        if number < last:
            x = ops.add_norm(y, weights.layers[number + 1].norms["attention"])
    return ops.finish(y, weights.last_norm)
