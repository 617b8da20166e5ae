"""Granite 4 without experts and Mamba: Granite 3 with merged gate and up, with or without rotations.

IBM, 2025 (github.com/ibm-granite/granite-4.0-language-models).
"""

from dataclasses import replace

from localchat_cuda.architectures import llama
from localchat_cuda.architectures.llama import forward

NAMES = replace(
    llama.NAMES,
    merged={
        **llama.NAMES.merged,
        "gate_up": ("shared_mlp.input_linear",),
        "down": ("shared_mlp.output_linear",),
    },
)
"""Checkpoint name of each weight."""

__all__ = ["NAMES", "forward"]
