"""gpt-oss: layers of experts, with biases, sinks in attention, and a window in every second layer.

OpenAI, 2025 (arXiv 2508.10925). The experts are stored in MXFP4, and their gates are clamped.
"""

from dataclasses import replace

import torch

from localchat_cuda.architectures import llama
from localchat_cuda.architectures.names import ExpertNames
from localchat_cuda.layers.dense import Layers, X
from localchat_cuda.weights.loader import ModelWeights

NAMES = replace(
    llama.NAMES,
    biased=frozenset({"qkv", "o"}),
    sinks="self_attn.sinks",
    experts=ExpertNames(
        router="mlp.router",
        gate_up=("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj"),
        down="mlp.experts.down_proj",
        interleaved="mlp.experts.",
    ),
)
"""Checkpoint name of each weight."""


def forward(ops: Layers[X], weights: ModelWeights) -> torch.Tensor:
    """Last states [P, hidden] of one step; writes keys and values to the KV pages."""
    x = ops.embed(weights.embedding, weights.layers[0].norms["attention"])
    last = len(weights.layers) - 1
    for number, layer in enumerate(weights.layers):
        qkv = ops.gemm(x, layer.linears["qkv"])
        x = ops.attend(qkv, number, layer.biases["qkv"], None, layer.sinks)
        assert layer.experts is not None
        y = ops.gemm(x, layer.linears["o"])
        y = ops.run_experts(y, layer.norms["mlp"], layer.experts, layer.biases["o"])
        if number < last:
            x = ops.add_norm(y, weights.layers[number + 1].norms["attention"])
    return ops.finish(y, weights.last_norm)
