"""SmolLM3: the Llama layer, in every fourth layer without rotations.

Hugging Face, 2025 (huggingface.co/blog/smollm3); layers without positions: Yang et al., 2025 (2501.18795).
"""

from localchat_cuda.architectures.llama import NAMES, forward

__all__ = ["NAMES", "forward"]
