"""Gemma 4: Gemma 3 with normed values, and wider heads in layers without a window.

Google, 2026 (huggingface.co/docs/transformers/model_doc/gemma4). Each layer scales the residual. The small
models have a second embedding of each token, of which every layer adds a gated part. Their last layers read the
keys and values of earlier layers. 26B-A4B has experts beside the MLP. Both read the same residual, and the
router has a scale instead of a norm's weight. Norms store their weights. Only the text part runs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from localchat_cuda.architectures import gemma2, gemma3
from localchat_cuda.architectures.family import ExpertTraits, Family
from localchat_cuda.architectures.names import ExpertNames
from localchat_cuda.layers.head_norms import AttentionWeights, HeadNorms

if TYPE_CHECKING:
    from localchat_cuda.layers.dense import Layers, Sums, X
    from localchat_cuda.weights.model_weights import LayerWeights

BESIDE_DENSE_FORMATS = "experts beside a dense layer support bf16 and fp16"
FAMILY = Family(
    name="gemma4",
    classes=(
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForCausalLM",
        "Gemma4UnifiedForConditionalGeneration",
    ),
    label="Gemma 4",
    names=replace(
        gemma3.FAMILY.names,
        norms={
            **gemma3.FAMILY.names.norms,
            "post_input": "post_per_layer_input_norm.weight",
            "experts": "pre_feedforward_layernorm_2.weight",
            "post_experts": "post_feedforward_layernorm_2.weight",
            "post_dense": "post_feedforward_layernorm_1.weight",
        },
        merged={
            **gemma3.FAMILY.names.merged,
            "input_gate": ("per_layer_input_gate",),
            "input_projection": ("per_layer_projection",),
        },
        norm_offset=0.0,
        experts=ExpertNames(
            router="router.proj",
            gate_up=("experts.{}.gate_proj", "experts.{}.up_proj"),
            down="experts.{}.down_proj",
            stacked=("experts.gate_up_proj", "experts.down_proj"),
            scales=("router.scale", "router.per_expert_scale"),
        ),
        scale="layer_scalar",
        inputs=(
            "model.embed_tokens_per_layer.weight",
            "model.per_layer_model_projection",
            "model.per_layer_projection_norm.weight",
        ),
    ),
    defaults={
        **gemma2.GEMMA_DEFAULTS,
        "vocab_size": 262_144,
        "max_position_embeddings": 131_072,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
        },
    },
    intermediate_field="moe_intermediate_size",
    windows="pattern",
    attention_scale=1.0,
    head_cap_field="final_logit_softcapping",
    scaled_embedding=True,
    experts=ExpertTraits(
        beside_dense=True,
        switch="enable_moe_block",
        fixed_formats=BESIDE_DENSE_FORMATS,
    ),
)


def mix(ops: Layers[X], x: X, layer: LayerWeights, number: int) -> Sums:
    """Run the attention of a layer: partial sums [S, T, hidden]."""
    # A layer without keys of its own has no norm for them.
    q_norm = layer.norms["q_norm"]
    norms = HeadNorms(q_norm, layer.norms.get("k_norm", q_norm), values=True)
    qkv = ops.gemm(x, layer.linears["qkv"])
    attended = ops.attend(qkv, number, AttentionWeights(norms=norms))
    return ops.reduce(ops.gemm(attended, layer.linears["o"]))


def feed(ops: Layers[X], x: X, layer: LayerWeights) -> Sums:
    """Return the partial sums of the MLP, or the sum of MLP and experts."""
    y = gemma2.feed(ops, x, layer)
    if layer.experts is None:
        return y
    expert_sums = ops.run_experts(None, layer.norms["experts"], layer.experts)
    return ops.add_normed(
        (y, layer.norms["post_dense"]), (expert_sums, layer.norms["post_experts"])
    )


forward = partial(gemma2.forward, mix=mix, feed=feed)
"""Return the last states [P, hidden] of one step. Write keys and values to the KV pages."""
