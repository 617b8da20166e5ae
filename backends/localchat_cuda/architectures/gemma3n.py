"""Gemma 3n: several streams of the residual, and the second embedding and shared keys of a small Gemma 4.

Google, 2025 (huggingface.co/docs/transformers/model_doc/gemma3n). A low-rank product is added to attention, and
MLPs of the first layers set most of their gates to 0. All heads have one width. Weights that read rows without
a norm, which exceed the range of fp16, stay floating, as in published 4-bit checkpoints. Only the text part
runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localchat_cuda.architectures import gemma2, gemma4
from localchat_cuda.architectures.family import Family
from localchat_cuda.architectures.names import AltUpNames

if TYPE_CHECKING:
    import torch

    from localchat_cuda.layers.dense import DenseLayers
    from localchat_cuda.weights.model_weights import ModelWeights

FAMILY = Family(
    name="gemma3n",
    classes=("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
    label="Gemma 3n",
    names=replace(
        gemma4.FAMILY.names,
        norms={**gemma4.FAMILY.names.norms, "post_laurel": "laurel.post_laurel_norm.weight"},
        merged={
            **gemma4.FAMILY.names.merged,
            "laurel_left": ("laurel.linear_left",),
            "laurel_right": ("laurel.linear_right",),
        },
        experts=None,
        floating=frozenset(("laurel_left", "laurel_right", "input_gate", "input_projection")),
        scale="",
        altup=AltUpNames(),
    ),
    defaults={
        **gemma2.GEMMA_DEFAULTS,
        "num_key_value_heads": 2,
        "vocab_size": 262_400,
        "max_position_embeddings": 32_768,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
        "final_logit_softcapping": 30.0,
        "num_kv_shared_layers": 15,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "altup_num_inputs": 4,
        "laurel_rank": 64,
    },
    windows="pattern",
    attention_scale=1.0,
    head_cap_field="final_logit_softcapping",
    scaled_embedding=True,
)


def forward(ops: DenseLayers, weights: ModelWeights) -> torch.Tensor:
    """Return the last states [P, hidden] of one step. Write keys and values to the KV pages."""
    from localchat_cuda.layers.streams import Streams

    assert weights.inputs is not None
    assert ops.config.gemma is not None
    assert ops.config.gemma.altup is not None
    streams = Streams(ops, weights)
    altup = ops.config.gemma.altup
    inputs = ops.embed_inputs(weights.inputs, weights.embedding)
    for number, layer in enumerate(weights.layers):
        x = streams.predict(layer)
        attended = gemma4.attend(ops, x, layer, number)
        y = ops.reduce(ops.gemm(attended, layer.linears["o"]))
        x = streams.add_laurel(x, y, layer)
        x = ops.gemm_act_mul(x, layer.linears["gate_up"], altup.cutoff(number))
        y = ops.reduce(ops.gemm(x, layer.linears["down"]))
        x = streams.correct(y, layer)
        x = ops.act_mul(ops.gemm(x, layer.linears["input_gate"]), inputs[:, number])
        streams.end(ops.gemm(x, layer.linears["input_projection"]), layer)
    return streams.finish(weights.last_norm)
