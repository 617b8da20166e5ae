"""Granite 3: the Llama layer with factors for embeddings, attention, what joins the residual, and logits.

IBM, 2024 (github.com/ibm-granite/granite-3.0-language-models). The config divides the residual by its factor,
which no norm notices, and the logits' divisor is in the last norm: no layer here knows them.
"""

from localchat_cuda.architectures.llama import NAMES, forward

__all__ = ["NAMES", "forward"]
