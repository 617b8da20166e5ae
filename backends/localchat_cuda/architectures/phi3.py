"""Phi-3, Phi-4 and Phi-4-mini: the Llama layer, stored with merged weights.

Microsoft, 2024 and 2025 (arXiv 2404.14219, 2412.08905, 2503.01743). The minis rotate a part of
each head's columns and slow them by LongRoPE's factors. The config's rotation contains both.
"""

from dataclasses import replace

from localchat_cuda.architectures import llama
from localchat_cuda.architectures.family import Family, GgufTraits

FAMILY = Family(
    name="phi3",
    classes=("Phi3ForCausalLM",),
    label="Phi-3, Phi-4",
    names=replace(
        llama.FAMILY.names,
        merged={
            "qkv": ("self_attn.qkv_proj",),
            "o": ("self_attn.o_proj",),
            "gate_up": ("mlp.gate_up_proj",),
            "down": ("mlp.down_proj",),
        },
    ),
    defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    gguf=GgufTraits(
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        partial_rotation=True,
        space_kept_after=("<unk>", "<s>", "<|endoftext|>"),
    ),
    windows="all",
)
forward = llama.forward
