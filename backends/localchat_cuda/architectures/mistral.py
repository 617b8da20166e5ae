"""Mistral: the Llama layer. The first versions have a sliding window, which the config states.

Mistral AI, 2023 (arXiv 2310.06825). Of models that read images, only the text part runs.
"""

from localchat_cuda.architectures import llama
from localchat_cuda.architectures.family import Family

FAMILY = Family(
    name="mistral",
    classes=(
        "MistralForCausalLM",
        "MinistralForCausalLM",
        "Ministral3ForCausalLM",
        "Mistral3ForConditionalGeneration",
    ),
    label="Mistral, Ministral",
    names=llama.FAMILY.names,
    defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    windows="all",
)
forward = llama.forward
