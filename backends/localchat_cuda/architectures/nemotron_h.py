"""Nemotron-H, Nemotron Nano 2 and Nemotron 3 Nano: layers of one part each, most of them a Mamba 2 or an MLP.

NVIDIA, 2025 (arXiv 2504.03624). Attention does not rotate queries and keys. MLP and experts have no gate. Their
activation is the square of a ReLU. The prediction head of Nemotron 3 is not loaded.

`time_step_min` is for the initialization. transformers 5 also raises the time steps of prompts to it, which the
model's own code, vLLM and llama.cpp do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from localchat_cuda.architectures.family import ExpertTraits, Family, GgufTraits
from localchat_cuda.architectures.llama import mix
from localchat_cuda.architectures.names import ExpertNames, Names, RecurrentNames

if TYPE_CHECKING:
    import torch

    from localchat_cuda.layers.dense import Layers, Sums, X
    from localchat_cuda.weights.model_weights import ModelWeights

_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Layers by their letter in `hybrid_override_pattern`."""
_RENAMED = {
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "mlp_hidden_act",
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_head": "mamba_head_dim",
    "mamba_d_state": "ssm_state_size",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
}
"""Names of the reader, and those of the config."""


def canonical(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config with the names that the reader knows."""
    renamed = {name: fields[own] for name, own in _RENAMED.items() if own in fields}
    kinds = fields.get("layers_block_type") or fields.get("layer_types")
    pattern = fields.get("hybrid_override_pattern")
    if kinds is None and isinstance(pattern, str):
        kinds = [_PATTERN.get(letter, letter) for letter in pattern]
    if isinstance(kinds, list):
        renamed |= {
            "layer_types": kinds,
            "num_hidden_layers": len(kinds),
            "mlp_layer_types": ["sparse" if kind == "moe" else "dense" for kind in kinds],
            "has_experts": "moe" in kinds,
        }
    if "head_dim" not in fields:
        renamed["head_dim"] = fields.get("attention_head_dim", 128)
    if not renamed.get("has_experts"):
        # Configs without experts may have the default width of experts.
        renamed["moe_intermediate_size"] = fields.get("intermediate_size")
    renamed["mamba_proj_bias"] = fields.get("mamba_proj_bias") or fields.get("use_bias")
    return fields | renamed


FAMILY = Family(
    name="nemotron_h",
    classes=("NemotronHForCausalLM",),
    label="Nemotron-H",
    names=Names(
        embedding="model.embeddings.weight",
        last_norm="model.norm_f.weight",
        head="lm_head.weight",
        layer="model.layers.{}.",
        norms={"attention": "norm.weight"},
        merged={
            "qkv": ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
            "o": ("mixer.o_proj",),
            "in": ("mixer.in_proj",),
            "out": ("mixer.out_proj",),
            "up": ("mixer.up_proj",),
            "down": ("mixer.down_proj",),
        },
        experts=ExpertNames(
            router="mixer.gate",
            gate_up=("mixer.experts.{}.up_proj",),
            down="mixer.experts.{}.down_proj",
            shared=(("mixer.shared_experts.up_proj",), "mixer.shared_experts.down_proj"),
            correction="mixer.gate.e_score_correction_bias",
        ),
        recurrent=RecurrentNames.mamba("mixer."),
    ),
    defaults={
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "layer_norm_epsilon": 1e-5,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
    },
    intermediate_field="moe_intermediate_size",
    unrotated_by="class",
    single_parts=True,
    gated_feed=False,
    experts=ExpertTraits(
        switch="has_experts", fixed_formats="experts without a gate support bf16 and fp16"
    ),
    canonical=canonical,
    gguf=GgufTraits(
        names={
            "token_embd": "model.embeddings",
            "output_norm": "model.norm_f",
            "attn_norm": "norm",
            "attn_q": "mixer.q_proj",
            "attn_k": "mixer.k_proj",
            "attn_v": "mixer.v_proj",
            "attn_output": "mixer.o_proj",
            "ffn_up": "mixer.up_proj",
            "ffn_down": "mixer.down_proj",
            **RecurrentNames.mamba_in_gguf("mixer."),
        },
    ),
)


def forward(ops: Layers[X], weights: ModelWeights) -> torch.Tensor:
    """Return the last states [P, hidden] of one step. Write KV pages and running states."""
    layers = weights.layers
    y: Sums | None = None
    x = ops.embed(weights.embedding, layers[0].norms["attention"])
    for number, layer in enumerate(layers):
        if layer.experts is not None:
            # The experts add the output of the layer before, and norm the sum.
            y = ops.run_experts(y, layer.norms["attention"], layer.experts)
            continue
        if y is not None:
            x = ops.add_norm(y, layer.norms["attention"])
        if "up" in layer.linears:
            x = ops.square_relu(ops.gemm(x, layer.linears["up"]))
            y = ops.reduce(ops.gemm(x, layer.linears["down"]))
        else:
            y = mix(ops, x, layer, number)
    assert y is not None
    return ops.finish(y, weights.last_norm)
