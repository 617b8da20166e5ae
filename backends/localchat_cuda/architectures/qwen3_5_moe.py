"""Qwen3.5-MoE and Qwen3.6-MoE: Qwen3.5 with the experts of Qwen3-Next.

Qwen Team, 2026. Checkpoints have each expert apart, or all of a layer in one tensor.
"""

from dataclasses import replace

from localchat_cuda.architectures import qwen3_5, qwen3_next
from localchat_cuda.architectures.qwen3_next import forward

assert qwen3_next.NAMES.experts is not None
NAMES = replace(
    qwen3_5.NAMES,
    experts=replace(
        qwen3_next.NAMES.experts, stacked=("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    ),
)
"""Checkpoint name of each weight."""

__all__ = ["NAMES", "forward"]
