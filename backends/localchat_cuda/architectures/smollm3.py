"""SmolLM3: the Llama layer, without rotations in every fourth layer.

Hugging Face, 2025 (huggingface.co/blog/smollm3); layers without positions: Yang et al., 2025 (2501.18795).
"""

from localchat_cuda.architectures import llama
from localchat_cuda.architectures.family import Family, GgufTraits

FAMILY = Family(
    name="smollm3",
    classes=("SmolLM3ForCausalLM",),
    label="SmolLM3",
    names=llama.FAMILY.names,
    defaults={"rope_theta": 2e6, "num_key_value_heads": 4, "tie_word_embeddings": True},
    gguf=GgufTraits(paired_rows=True),
    windows="all",
    window_switch=True,
    unrotated_by="no_rope_layers",
)
forward = llama.forward
