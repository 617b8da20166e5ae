"""OLMo 2: norms after attention and feed-forward only, queries and keys normalized over all heads together.

OLMo Team, 2024 (arXiv 2501.00656). Layers read the residual itself, without a norm.
"""

from dataclasses import replace

from localchat_cuda.architectures import gemma2, llama
from localchat_cuda.architectures.family import Family

FAMILY = Family(
    name="olmo2",
    classes=("Olmo2ForCausalLM",),
    label="OLMo 2",
    names=replace(
        llama.FAMILY.names,
        norms={
            "post_attention": "post_attention_layernorm.weight",
            "post_mlp": "post_feedforward_layernorm.weight",
            "q_norm": "self_attn.q_norm.weight",
            "k_norm": "self_attn.k_norm.weight",
        },
    ),
    defaults={"rms_norm_eps": 1e-5},
)
forward = gemma2.forward
