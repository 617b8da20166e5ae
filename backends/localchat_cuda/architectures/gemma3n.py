"""Gemma 3n: several streams of the residual, and the second embedding and shared keys of a small Gemma 4.

Google, 2025 (huggingface.co/docs/transformers/model_doc/gemma3n). Beside attention is a low-rank product, and
MLPs of the first layers leave most of their gates at 0. All heads have one width. Weights that read rows
without a norm, beyond the range of fp16, stay floating, as published 4-bit checkpoints have them. Only the
text part runs.
"""

from dataclasses import replace

import torch

from localchat_cuda.architectures import gemma4
from localchat_cuda.architectures.names import AltUpNames
from localchat_cuda.layers.dense import DenseLayers
from localchat_cuda.layers.streams import Streams
from localchat_cuda.weights.loader import ModelWeights

NAMES = replace(
    gemma4.NAMES,
    norms={**gemma4.NAMES.norms, "post_laurel": "laurel.post_laurel_norm.weight"},
    merged={
        **gemma4.NAMES.merged,
        "laurel_left": ("laurel.linear_left",),
        "laurel_right": ("laurel.linear_right",),
    },
    experts=None,
    floating=frozenset(("laurel_left", "laurel_right", "input_gate", "input_projection")),
    scale="",
    altup=AltUpNames(),
)
"""Checkpoint name of each weight."""


def forward(ops: DenseLayers, weights: ModelWeights) -> torch.Tensor:
    """Last states [P, hidden] of one step; writes keys and values to the KV pages."""
    assert weights.inputs is not None
    assert ops.config.gemma is not None
    assert ops.config.gemma.altup is not None
    streams = Streams(ops, weights)
    altup = ops.config.gemma.altup
    inputs = ops.embed_inputs(weights.inputs, weights.embedding)
    for number, layer in enumerate(weights.layers):
        x = streams.predict(layer)
        y = ops.gemm(gemma4.attend(ops, x, layer, number), layer.linears["o"])
        x = streams.add_laurel(x, y, layer)
        x = ops.gemm_act_mul(x, layer.linears["gate_up"], altup.cutoff(number))
        x = streams.correct(ops.gemm(x, layer.linears["down"]), layer)
        x = ops.act_mul(ops.gemm(x, layer.linears["input_gate"]), inputs[:, number])
        streams.end(ops.gemm(x, layer.linears["input_projection"]), layer)
    return streams.finish(weights.last_norm)
