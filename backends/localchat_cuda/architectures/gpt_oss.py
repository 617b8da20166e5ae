"""gpt-oss: layers of experts, with biases, sinks in attention, and a window in every second layer.

OpenAI, 2025 (arXiv 2508.10925). Experts are stored in MXFP4, and their gates are clamped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localchat_cuda.architectures import llama
from localchat_cuda.architectures.family import ExpertTraits, Family
from localchat_cuda.architectures.names import ExpertNames

if TYPE_CHECKING:
    import torch

    from localchat_cuda.layers.dense import Layers, X
    from localchat_cuda.weights.model_weights import ModelWeights

FAMILY = Family(
    name="gpt_oss",
    classes=("GptOssForCausalLM",),
    label="gpt-oss",
    names=replace(
        llama.FAMILY.names,
        biased=frozenset({"qkv", "o"}),
        sinks="self_attn.sinks",
        experts=ExpertNames(
            router="mlp.router",
            gate_up=("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj"),
            down="mlp.experts.down_proj",
            interleaved="mlp.experts.",
        ),
    ),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "attention_bias": True,
    },
    qkv_bias="required",
    windows="pattern",
    experts=ExpertTraits(clamped=True, fixed_formats="its experts support bf16 and MXFP4"),
)


def forward(ops: Layers[X], weights: ModelWeights) -> torch.Tensor:
    """Return the last states [P, hidden] of one step. Write keys and values to the KV pages."""
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
