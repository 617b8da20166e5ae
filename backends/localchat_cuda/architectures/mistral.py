"""Mistral: the Llama layer, in its first versions with a sliding window, which stands in the config.

Mistral AI, 2023 (arXiv 2310.06825). Of the ones that see images, the text part.
"""

from localchat_cuda.architectures.llama import NAMES, forward

__all__ = ["NAMES", "forward"]
