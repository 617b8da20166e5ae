"""Qwen3: the Llama layer with queries and keys normalized per head before their rotation.

Qwen Team, 2025 (arXiv 2505.09388).
"""

from dataclasses import replace

from localchat_cuda.architectures import llama
from localchat_cuda.architectures.family import Family, GgufTraits

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
forward = llama.forward
