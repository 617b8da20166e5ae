"""Gemma 3: Gemma 2 with queries and keys normalized per head instead of soft caps.

Gemma Team, 2025 (arXiv 2503.19786). Five layers with a window alternate with one without a
window, which has another rotation. Of models that read images, only the text part runs.
"""

from dataclasses import replace

from localchat_cuda.architectures import gemma2
from localchat_cuda.architectures.family import Family, GgufTraits

FAMILY = Family(
    name="gemma3",
    classes=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    label="Gemma 3",
    names=replace(
        gemma2.FAMILY.names,
        norms={
            **gemma2.FAMILY.names.norms,
            "q_norm": "self_attn.q_norm.weight",
            "k_norm": "self_attn.k_norm.weight",
        },
    ),
    defaults={
        **gemma2.GEMMA_DEFAULTS,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
    },
    gguf=GgufTraits(names=gemma2.GGUF_NAMES, largest_layers=62),
    windows="pattern",
    scale_field="query_pre_attn_scalar",
    head_cap_field="final_logit_softcapping",
    scaled_embedding=True,
)
forward = gemma2.forward
