"""Gemma 3: Gemma 2 with queries and keys normalized per head instead of soft caps.

Gemma Team, 2025 (arXiv 2503.19786). Five layers with a window alternate with one without a
window, which has another rotation. Of models that read images, only the text part runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localchat_cuda.architectures import gemma2
from localchat_cuda.architectures.family import Family, GgufTraits
from localchat_cuda.layers.head_norms import HeadNorms

if TYPE_CHECKING:
    import torch

    from localchat_cuda.layers.dense import Layers, X
    from localchat_cuda.weights.model_weights import ModelWeights

FAMILY = Family(
    name="gemma3",
    classes=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    label="Gemma 3",
    names=replace(
        gemma2.FAMILY.names,
        norms={
            **gemma2.FAMILY.names.norms,
            "q_norm": "self_attn.q_norm.weight",
            "k_norm": "self_attn.k_norm.weight",
        },
    ),
    defaults={
        **gemma2.GEMMA_DEFAULTS,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
    },
    gguf=GgufTraits(names=gemma2.GGUF_NAMES, largest_layers=62),
    windows="pattern",
    scale_field="query_pre_attn_scalar",
    head_cap_field="final_logit_softcapping",
    scaled_embedding=True,
)


def forward(ops: Layers[X], weights: ModelWeights) -> torch.Tensor:
    """Return the last states [P, hidden] of one step. Write keys and values to the KV pages."""
    x = ops.embed(weights.embedding, weights.layers[0].norms["attention"])
    last = len(weights.layers) - 1
    for number, layer in enumerate(weights.layers):
        qkv = ops.gemm(x, layer.linears["qkv"])
        norms = HeadNorms(layer.norms["q_norm"], layer.norms["k_norm"])
        x = ops.attend(qkv, number, None, norms)
        y = ops.gemm(x, layer.linears["o"])
        post = layer.norms["post_attention"]
        x = ops.add_norm(y, layer.norms["mlp"], post)
        x = ops.gemm_act_mul(x, layer.linears["gate_up"])
        y = ops.gemm(x, layer.linears["down"])
        post = layer.norms["post_mlp"]
        if number < last:
            x = ops.add_norm(y, weights.layers[number + 1].norms["attention"], post)
    return ops.finish(y, weights.last_norm, post)
