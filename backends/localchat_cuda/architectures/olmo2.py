"""OLMo 2: norms after attention and feed-forward only, queries and keys normalized over all heads together.

OLMo Team, 2024 (arXiv 2501.00656). Layers read the residual itself, without a norm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localchat_cuda.architectures import llama
from localchat_cuda.architectures.family import Family
from localchat_cuda.layers.head_norms import HeadNorms

if TYPE_CHECKING:
    import torch

    from localchat_cuda.layers.dense import Layers, X
    from localchat_cuda.weights.model_weights import ModelWeights

FAMILY = Family(
    name="olmo2",
    classes=("Olmo2ForCausalLM",),
    label="OLMo 2",
    names=replace(
        llama.FAMILY.names,
        norms={
            "post_attention": "post_attention_layernorm.weight",
            "post_mlp": "post_feedforward_layernorm.weight",
            "q_norm": "self_attn.q_norm.weight",
            "k_norm": "self_attn.k_norm.weight",
        },
    ),
    defaults={"rms_norm_eps": 1e-5},
)


def forward(ops: Layers[X], weights: ModelWeights) -> torch.Tensor:
    """Return the last states [P, hidden] of one step. Write keys and values to the KV pages."""
    x = ops.embed(weights.embedding, None)
    last = len(weights.layers) - 1
    for number, layer in enumerate(weights.layers):
        qkv = ops.gemm(x, layer.linears["qkv"])
        norms = HeadNorms(layer.norms["q_norm"], layer.norms["k_norm"])
        x = ops.attend(qkv, number, None, norms)
        y = ops.reduce(ops.gemm(x, layer.linears["o"]))
        x = ops.add_norm(y, None, layer.norms["post_attention"])
        x = ops.gemm_act_mul(x, layer.linears["gate_up"])
        y = ops.reduce(ops.gemm(x, layer.linears["down"]))
        post = layer.norms["post_mlp"]
        if number < last:
            x = ops.add_norm(y, None, post)
    return ops.finish(y, weights.last_norm, post)
