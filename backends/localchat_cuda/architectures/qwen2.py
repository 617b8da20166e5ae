"""Qwen2 and Qwen2.5: the Llama layer with biases on queries, keys and values.

Qwen Team, 2024 (arXiv 2407.10671, 2412.15115).
"""

from dataclasses import replace

from localchat_cuda.architectures import llama
from localchat_cuda.architectures.family import Family, GgufTraits

FAMILY = Family(
    name="qwen2",
    classes=("Qwen2ForCausalLM", "Qwen2_5_VLForConditionalGeneration"),
    label="Qwen2, Qwen2.5",
    names=replace(llama.FAMILY.names, biased=frozenset({"qkv"})),
    defaults={"sliding_window": 4096, "num_key_value_heads": 32},
    gguf=GgufTraits(),
    qkv_bias="always",
    windows="late",
    window_switch=True,
)
forward = llama.forward
