"""Mixtral: the Mistral layer with experts in place of each feed-forward layer.

Mistral AI, 2024 (arXiv 2401.04088).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localchat_cuda.architectures import mistral
from localchat_cuda.architectures.family import ExpertTraits, Family
from localchat_cuda.architectures.names import ExpertNames
from localchat_cuda.layers.head_norms import HeadNorms

if TYPE_CHECKING:
    import torch

    from localchat_cuda.layers.dense import Layers, X
    from localchat_cuda.weights.model_weights import ModelWeights

FAMILY = Family(
    name="mixtral",
    classes=("MixtralForCausalLM",),
    label="Mixtral",
    names=replace(
        mistral.FAMILY.names,
        experts=ExpertNames(
            router="block_sparse_moe.gate",
            gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
            down="block_sparse_moe.experts.{}.w2",
        ),
    ),
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    windows="all",
    experts=ExpertTraits(normalized=True, windowed=True),
)


def forward(ops: Layers[X], weights: ModelWeights) -> torch.Tensor:
    """Return the last states [P, hidden] of one step. Write keys and values to the KV pages.

    Other mixtures add biases, norms of heads, or sinks."""
    x = ops.embed(weights.embedding, weights.layers[0].norms["attention"])
    last = len(weights.layers) - 1
    for number, layer in enumerate(weights.layers):
        qkv = ops.gemm(x, layer.linears["qkv"])
        norms = HeadNorms.of(layer.norms)
        x = ops.attend(qkv, number, layer.biases.get("qkv"), norms, layer.sinks)
        assert layer.experts is not None
        y = ops.gemm(x, layer.linears["o"])
        y = ops.run_experts(y, layer.norms["mlp"], layer.experts, layer.biases.get("o"))
        if number < last:
            x = ops.add_norm(y, weights.layers[number + 1].norms["attention"])
    return ops.finish(y, weights.last_norm)
