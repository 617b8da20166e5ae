"""Granite 4 with experts: Granite 3 with experts, with or without rotations and Mamba layers.

IBM, 2025 (github.com/ibm-granite/granite-4.0-language-models).
"""

from dataclasses import replace

from localchat_cuda.architectures import granite4, granite_moe, llama

FAMILY = replace(
    granite_moe.FAMILY,
    name="granite4_moe",
    # config.json names the same class as for a Granite 4 without experts (granite4.py).
    classes=(),
    names=replace(
        granite_moe.FAMILY.names,
        merged={**granite_moe.FAMILY.names.merged, **granite4.MAMBA},
        recurrent=granite4.FAMILY.names.recurrent,
    ),
    defaults={**granite_moe.FAMILY.defaults, "shared_intermediate_size": 1024},
    unrotated_by="position_embedding_type",
)
forward = llama.forward
