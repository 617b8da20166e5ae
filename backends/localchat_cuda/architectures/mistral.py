"""Mistral: the Llama layer; its first versions have a sliding window, which the config states.

Mistral AI, 2023 (arXiv 2310.06825). Of models that see images, only the text part runs.
"""

from localchat_cuda.architectures.llama import NAMES, forward

__all__ = ["NAMES", "forward"]
