"""Qwen3-Next: gated delta nets in three of four layers, gated attention in the others, and experts.

Qwen Team, 2025; gated delta nets: Yang et al., 2024 (arXiv 2412.06464). All norms except those of the delta
nets store their weights minus one. Attention rotates a part of each head's columns. The checkpoint stores
queries and gates of attention, and the parts of delta nets, head by head. Here each part is contiguous.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from localchat_cuda.architectures import llama, qwen2_moe, qwen3
from localchat_cuda.architectures.family import Family
from localchat_cuda.architectures.names import RecurrentNames
from localchat_cuda.layers.head_norms import HeadNorms

if TYPE_CHECKING:
    import torch

    from localchat_cuda.config.model import ModelConfig
    from localchat_cuda.layers.dense import DenseLayers, Sums
    from localchat_cuda.weights.model_weights import LayerWeights

HYBRID_DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}


def gates_last(config: ModelConfig) -> torch.Tensor:
    """Return the rows of attention's gemm with the gates after queries, keys and values."""
    import torch

    heads = config.heads
    d = config.head_dim
    queries, gates = torch.arange(2 * heads * d).view(heads, 2, d).unbind(1)
    others = torch.arange(2 * heads * d, 2 * (heads + config.key_heads) * d)
    return torch.cat((queries.reshape(-1), others, gates.reshape(-1)))


def _parts(*widths: int, groups: int) -> torch.Tensor:
    """Return the rows of a gemm part by part. The checkpoint stores them group by group."""
    import torch

    rows = torch.arange(groups * sum(widths)).view(groups, -1)
    return torch.cat([part.reshape(-1) for part in torch.split(rows, list(widths), 1)])


def _qkvz(config: ModelConfig) -> torch.Tensor:
    net = config.recurrent
    assert net is not None
    values = net.values // net.key_heads
    return _parts(net.key_dim, net.key_dim, values, values, groups=net.key_heads)


def _ba(config: ModelConfig) -> torch.Tensor:
    net = config.recurrent
    assert net is not None
    shared = net.value_heads // net.key_heads
    return _parts(shared, shared, groups=net.key_heads)


HYBRID_NAMES = replace(
    qwen3.FAMILY.names,
    merged={
        **qwen3.FAMILY.names.merged,
        "in": ("linear_attn.in_proj_qkvz",),
        "out": ("linear_attn.out_proj",),
    },
    norm_offset=1.0,
    recurrent=RecurrentNames.delta_net("linear_attn.in_proj_ba"),
    orders={"qkv": gates_last},
)
FAMILY = Family(
    name="qwen3_next",
    classes=("Qwen3NextForCausalLM",),
    label="Qwen3-Next",
    names=replace(
        HYBRID_NAMES,
        experts=qwen2_moe.EXPERTS,
        orders={**HYBRID_NAMES.orders, "in": _qkvz, "ba": _ba},
    ),
    defaults={
        **HYBRID_DEFAULTS,
        "num_key_value_heads": 2,
        "num_experts": 512,
        "num_experts_per_tok": 10,
    },
    intermediate_field="moe_intermediate_size",
    windows="all",
)


def mix(ops: DenseLayers, x: torch.Tensor, layer: LayerWeights, number: int) -> Sums:
    """Run the attention or the delta net of a layer: partial sums [S, T, hidden]."""
    if layer.recurrent is not None:
        gates = ops.gemm(x, layer.linears["ba"]) if "ba" in layer.linears else None
        x = ops.run_recurrent(ops.gemm(x, layer.linears["in"]), layer.recurrent, number, gates)
        return ops.gemm(x, layer.linears["out"])
    norms = HeadNorms(layer.norms["q_norm"], layer.norms["k_norm"])
    x = ops.attend_gated(ops.gemm(x, layer.linears["qkv"]), number, norms)
    return ops.reduce(ops.gemm(x, layer.linears["o"]))


forward = partial(llama.forward, mix=mix)
"""Return the last states [P, hidden] of one step. Write KV pages and delta-net states."""
