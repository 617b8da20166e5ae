"""Mixtral: the Mistral layer with experts in place of each feed-forward layer.

Mistral AI, 2024 (arXiv 2401.04088).
"""

from dataclasses import replace

from localchat_cuda.architectures import llama, mistral
from localchat_cuda.architectures.family import ExpertTraits, Family
from localchat_cuda.architectures.names import ExpertNames

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
forward = llama.forward
