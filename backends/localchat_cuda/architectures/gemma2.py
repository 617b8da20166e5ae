"""Gemma 2: norms before and after attention and feed-forward, GELU, a window in every second layer.

Gemma Team, 2024 (arXiv 2408.00118). Norms store their weights minus one. The config contains the
scale of the embedding, the soft caps of attention and head, the windows and the scale of attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from localchat_cuda.architectures import llama
from localchat_cuda.architectures.family import Family, GgufTraits

if TYPE_CHECKING:
    import torch

    from localchat_cuda.layers.dense import Layers, Sums, X
    from localchat_cuda.weights.model_weights import LayerWeights, ModelWeights

GEMMA_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
GGUF_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FAMILY = Family(
    name="gemma2",
    classes=("Gemma2ForCausalLM",),
    label="Gemma 2",
    names=replace(
        llama.FAMILY.names,
        norms={
            "attention": "input_layernorm.weight",
            "post_attention": "post_attention_layernorm.weight",
            "mlp": "pre_feedforward_layernorm.weight",
            "post_mlp": "post_feedforward_layernorm.weight",
        },
        norm_offset=1.0,
    ),
    defaults={
        **GEMMA_DEFAULTS,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window_pattern": 2,
    },
    gguf=GgufTraits(names=GGUF_NAMES, largest_layers=46),
    windows="pattern",
    scale_field="query_pre_attn_scalar",
    attention_cap_field="attn_logit_softcapping",
    head_cap_field="final_logit_softcapping",
    scaled_embedding=True,
)


def feed(ops: Layers[X], x: X, layer: LayerWeights) -> Sums:
    """Return the partial sums of a layer's MLP."""
    x = ops.gemm_act_mul(x, layer.linears["gate_up"])
    return ops.reduce(ops.gemm(x, layer.linears["down"]))


def forward(
    ops: Layers[X],
    weights: ModelWeights,
    mix: Callable[..., Sums] = llama.mix,
    feed: Callable[..., Sums] = feed,
) -> torch.Tensor:
    """Return the last states [P, hidden] of one step. Write keys and values to the KV pages.

    OLMo 2 has no norms before its parts. Small Gemma 4 models add a gated part of a second embedding.
    `mix`, `feed`: a family's own attention and MLP."""
    x = ops.embed(weights.embedding, weights.layers[0].norms.get("attention"))
    inputs = None
    if weights.inputs is not None:
        inputs = ops.embed_inputs(weights.inputs, weights.embedding)
    return run_layers(ops, weights, x, mix, feed, inputs)


def run_layers(
    ops: Layers[X],
    weights: ModelWeights,
    x: X,
    mix: Callable[..., Sums],
    feed: Callable[..., Sums],
    inputs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run all layers on x, the normed residual, and return the last states [P, hidden].

    `inputs`: second embeddings of the tokens, see Layers.embed_inputs."""
    last = len(weights.layers) - 1
    for number, layer in enumerate(weights.layers):
        y = mix(ops, x, layer, number)
        x = ops.add_norm(y, layer.norms.get("mlp"), layer.norms["post_attention"])
        y = feed(ops, x, layer)
        post = layer.norms["post_mlp"]
        if inputs is not None:
            x = ops.add_norm(y, None, post)
            x = ops.act_mul(ops.gemm(x, layer.linears["input_gate"]), inputs[:, number])
            y = ops.gemm(x, layer.linears["input_projection"])
            post = layer.norms["post_input"]
        if number < last:
            gain = weights.layers[number + 1].norms.get("attention")
            x = ops.add_norm(y, gain, post, layer.scale)
    return ops.finish(y, weights.last_norm, post, layer.scale)
