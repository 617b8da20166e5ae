"""Seed-OSS: the Llama layer with biases on queries, keys and values, as in Qwen2.

ByteDance Seed, 2025 (github.com/ByteDance-Seed/seed-oss).
"""

from localchat_cuda.architectures import qwen2
from localchat_cuda.architectures.family import Family, GgufTraits

FAMILY = Family(
    name="seed_oss",
    classes=("SeedOssForCausalLM",),
    label="Seed-OSS",
    names=qwen2.FAMILY.names,
    defaults={"head_dim": 128, "attention_bias": True},
    gguf=GgufTraits(names={"post_attention_norm": "post_attention_layernorm"}),
    qkv_bias="required",
)
forward = qwen2.forward
