"""Granite 4 without experts and Mamba: Granite 3 with merged gate and up, with or without rotations.

IBM, 2025 (github.com/ibm-granite/granite-4.0-language-models).
"""

from dataclasses import replace

from localchat_cuda.architectures import llama
from localchat_cuda.architectures.family import Family
from localchat_cuda.architectures.llama import forward

FAMILY = Family(
    name="granite4",
    classes=("GraniteMoeHybridForCausalLM",),
    label="Granite 4 without Mamba",
    names=replace(
        llama.FAMILY.names,
        merged={
            **llama.FAMILY.names.merged,
            "gate_up": ("shared_mlp.input_linear",),
            "down": ("shared_mlp.output_linear",),
        },
    ),
    defaults={"shared_intermediate_size": 1024},
    with_experts="granite4_moe",
    intermediate_field="shared_intermediate_size",
    multipliers=True,
    unrotated_by="position_embedding_type",
    mamba_relatives=True,
)

__all__ = ["FAMILY", "forward"]
