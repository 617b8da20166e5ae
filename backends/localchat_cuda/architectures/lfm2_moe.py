"""LFM2 with experts after the first layers, weighted by sigmoids, and a correction that chooses them.

Liquid AI, 2025 (huggingface.co/docs/transformers/model_doc/lfm2_moe).
"""

from dataclasses import replace
from typing import Any

from localchat_cuda.architectures import lfm2, llama
from localchat_cuda.architectures.family import Family
from localchat_cuda.architectures.names import ExpertNames


def canonical(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config with the names that the reader knows."""
    # Only the dense class adjusts the inner width of its feed-forward blocks.
    return lfm2.canonical({**fields, "block_auto_adjust_ff_dim": False}) | {
        "n_routed_experts": fields.get("num_experts"),
        "first_k_dense_replace": fields.get("num_dense_layers"),
    }


FAMILY = Family(
    name="lfm2_moe",
    classes=("Lfm2MoeForCausalLM",),
    names=replace(
        lfm2.FAMILY.names,
        experts=ExpertNames(
            router="feed_forward.gate",
            gate_up=("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"),
            down="feed_forward.experts.{}.w2",
            correction="feed_forward.expert_bias",
        ),
    ),
    defaults={
        **lfm2.FAMILY.defaults,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_dense_layers": 2,
        "moe_intermediate_size": 1792,
        "norm_topk_prob": True,
    },
    intermediate_field="moe_intermediate_size",
    canonical=canonical,
)
forward = llama.forward
