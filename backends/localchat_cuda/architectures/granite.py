"""Granite 3: the Llama layer with factors for embeddings, attention, residual and logits.

IBM, 2024 (github.com/ibm-granite/granite-3.0-language-models). The config divides the residual by its factor,
which no norm notices, and the last norm contains the divisor of the logits, so layers need neither.
"""

from localchat_cuda.architectures import llama
from localchat_cuda.architectures.family import Family, GgufTraits

FAMILY = Family(
    name="granite",
    classes=("GraniteForCausalLM",),
    label="Granite 3",
    names=llama.FAMILY.names,
    gguf=GgufTraits(paired_rows=True),
    multipliers=True,
)
forward = llama.forward
