"""Granite 4 with experts and without Mamba: Granite 3 with experts, with or without rotations.

IBM, 2025 (github.com/ibm-granite/granite-4.0-language-models).
"""

from dataclasses import replace

from localchat_cuda.architectures import granite_moe
from localchat_cuda.architectures.granite_moe import forward

FAMILY = replace(
    granite_moe.FAMILY,
    name="granite4_moe",
    # config.json names the same class as for a Granite 4 without experts (granite4.py).
    classes=(),
    defaults={**granite_moe.FAMILY.defaults, "shared_intermediate_size": 1024},
    unrotated_by="position_embedding_type",
    mamba_relatives=True,
)

__all__ = ["FAMILY", "forward"]
