"""Granite 4 without experts: Granite 3 with merged gate and up, with or without rotations and Mamba layers.

IBM, 2025 (github.com/ibm-granite/granite-4.0-language-models). The models with Mamba 2 are called h.
"""

from dataclasses import replace

from localchat_cuda.architectures import llama
from localchat_cuda.architectures.family import Family, GgufTraits
from localchat_cuda.architectures.names import RecurrentNames

MAMBA = {"in": ("mamba.in_proj",), "out": ("mamba.out_proj",)}
"""Gemms of a layer with a Mamba 2."""
FAMILY = Family(
    name="granite4",
    classes=("GraniteMoeHybridForCausalLM",),
    label="Granite 4",
    names=replace(
        llama.FAMILY.names,
        merged={
            **llama.FAMILY.names.merged,
            **MAMBA,
            "gate_up": ("shared_mlp.input_linear",),
            "down": ("shared_mlp.output_linear",),
        },
        recurrent=RecurrentNames.mamba("mamba."),
    ),
    defaults={"shared_intermediate_size": 1024},
    with_experts="granite4_moe",
    intermediate_field="shared_intermediate_size",
    multipliers=True,
    unrotated_by="position_embedding_type",
    gguf=GgufTraits(
        architecture="granitehybrid",
        names=RecurrentNames.mamba_in_gguf("mamba."),
        merged={"gate_up": ("mlp.gate_proj", "mlp.up_proj"), "down": ("mlp.down_proj",)},
        paired_rows=True,
    ),
)
forward = llama.forward
