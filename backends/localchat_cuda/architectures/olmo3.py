"""OLMo 3: OLMo 2 with a window in three of four layers, whose rotations are not scaled.

OLMo Team, 2025 (arXiv 2512.13961).
"""

from localchat_cuda.architectures import olmo2
from localchat_cuda.architectures.family import Family

FAMILY = Family(
    name="olmo3",
    classes=("Olmo3ForCausalLM",),
    label="OLMo 3",
    names=olmo2.FAMILY.names,
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "rope_local_base_freq": 5e5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    windows="pattern",
)
forward = olmo2.forward
