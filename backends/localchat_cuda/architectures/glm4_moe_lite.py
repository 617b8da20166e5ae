"""GLM-4.7-Flash: DeepSeek-V2 with experts weighed by sigmoids, and a correction by which they are chosen.

Z.ai, 2026 (huggingface.co/docs/transformers/model_doc/glm4_moe_lite). Its prediction head, a layer after the
last one, is not loaded.
"""

from dataclasses import replace

from localchat_cuda.architectures import deepseek_v2
from localchat_cuda.architectures.deepseek_v2 import forward

NAMES = replace(
    deepseek_v2.NAMES,
    experts=replace(deepseek_v2.EXPERTS, correction="mlp.gate.e_score_correction_bias"),
)
"""Checkpoint name of each weight."""

__all__ = ["NAMES", "forward"]
