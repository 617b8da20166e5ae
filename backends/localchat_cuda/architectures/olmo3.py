"""OLMo 3: OLMo 2 with a window in three layers of four, whose rotations no scaling stretches.

OLMo Team, 2025 (arXiv 2512.13961).
"""

from localchat_cuda.architectures.olmo2 import NAMES, forward

__all__ = ["NAMES", "forward"]
