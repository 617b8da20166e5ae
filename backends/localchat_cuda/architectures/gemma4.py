"""Gemma 4 without experts: Gemma 3 with normed values, and wider heads in layers without a window.

Google, 2026 (huggingface.co/docs/transformers/model_doc/gemma4). Each layer scales the residual. The small
models have a second embedding of each token, of which every layer adds a part by a gate, and last layers that
read earlier layers' keys and values. Norms store their weights. Only the text part runs.
"""

from dataclasses import replace

import torch

from localchat_cuda.architectures import gemma3
from localchat_cuda.layers import HeadNorms, Layers, X
from localchat_cuda.weights.loader import LayerWeights, ModelWeights

NAMES = replace(
    gemma3.NAMES,
    norms={**gemma3.NAMES.norms, "post_input": "post_per_layer_input_norm.weight"},
    merged={
        **gemma3.NAMES.merged,
        "input_gate": ("per_layer_input_gate",),
        "input_projection": ("per_layer_projection",),
    },
    norm_offset=0.0,
    scale="layer_scalar",
    inputs=(
        "model.embed_tokens_per_layer.weight",
        "model.per_layer_model_projection",
        "model.per_layer_projection_norm.weight",
    ),
)
"""Checkpoint name of each weight."""


def attend(ops: Layers[X], x: X, layer: LayerWeights, number: int) -> X:
    """Attention of a layer; one without keys of its own has no norm for them, either."""
    q_norm = layer.norms["q_norm"]
    norms = HeadNorms(q_norm, layer.norms.get("k_norm", q_norm), values=True)
    return ops.attend(ops.gemm(x, layer.linears["qkv"]), number, None, norms)


def forward(ops: Layers[X], weights: ModelWeights) -> torch.Tensor:
    """Last states [P, hidden] of one step; writes keys and values to the KV pages."""
    x = ops.embed(weights.embedding, weights.layers[0].norms["attention"])
    inputs = None
    if weights.inputs is not None:
        inputs = ops.embed_inputs(weights.inputs, weights.embedding)
    last = len(weights.layers) - 1
    for number, layer in enumerate(weights.layers):
        x = attend(ops, x, layer, number)
        y, post = ops.gemm(x, layer.linears["o"]), layer.norms["post_attention"]
        x = ops.add_norm(y, layer.norms["mlp"], post)
        x = ops.gemm_act_mul(x, layer.linears["gate_up"])
        y, post = ops.gemm(x, layer.linears["down"]), layer.norms["post_mlp"]
        if inputs is not None:
            x = ops.add_norm(y, None, post)
            x = ops.act_mul(ops.gemm(x, layer.linears["input_gate"]), inputs[:, number])
            y, post = ops.gemm(x, layer.linears["input_projection"]), layer.norms["post_input"]
        if number < last:
            x = ops.add_norm(y, weights.layers[number + 1].norms["attention"], post, layer.scale)
    return ops.finish(y, weights.last_norm, post, layer.scale)
