"""Qwen3-Next: gated delta nets in three of four layers, gated attention in the others, and experts.

Qwen Team, 2025; gated delta nets: Yang et al., 2024 (arXiv 2412.06464). Norms but those of the delta nets store
their weights minus one. Attention rotates a part of each head's columns. The checkpoint has queries and gates
of attention, and the parts of delta nets, head by head; here each part is in one piece.
"""

from dataclasses import replace

import torch

from localchat_cuda.architectures import qwen2_moe, qwen3
from localchat_cuda.architectures.names import DeltaNetNames, Names
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.layers.dense import DenseLayers, HeadNorms
from localchat_cuda.weights.loader import LayerWeights, ModelWeights


def gates_last(config: ModelConfig) -> torch.Tensor:
    """Rows of the attention's gemm: queries, keys and values, and only then the gates."""
    heads = config.heads
    d = config.head_dim
    queries, gates = torch.arange(2 * heads * d).view(heads, 2, d).unbind(1)
    others = torch.arange(2 * heads * d, 2 * (heads + config.key_heads) * d)
    return torch.cat((queries.reshape(-1), others, gates.reshape(-1)))


def _parts(*widths: int, groups: int) -> torch.Tensor:
    """Rows of a gemm whose parts come group by group, part by part."""
    rows = torch.arange(groups * sum(widths)).view(groups, -1)
    return torch.cat([part.reshape(-1) for part in torch.split(rows, list(widths), 1)])


def _qkvz(config: ModelConfig) -> torch.Tensor:
    net = config.delta_net
    assert net is not None
    values = net.values // net.key_heads
    return _parts(net.key_dim, net.key_dim, values, values, groups=net.key_heads)


def _ba(config: ModelConfig) -> torch.Tensor:
    net = config.delta_net
    assert net is not None
    shared = net.value_heads // net.key_heads
    return _parts(shared, shared, groups=net.key_heads)


HYBRID: Names = replace(
    qwen3.NAMES,
    merged={
        **qwen3.NAMES.merged,
        "qkvz": ("linear_attn.in_proj_qkvz",),
        "out": ("linear_attn.out_proj",),
    },
    norm_offset=1.0,
    delta_net=DeltaNetNames(ba=("linear_attn.in_proj_ba",)),
    orders={"qkv": gates_last},
)
NAMES = replace(
    HYBRID,
    experts=qwen2_moe.NAMES.experts,
    orders={**HYBRID.orders, "qkvz": _qkvz, "ba": _ba},
)
"""Checkpoint name of each weight."""


def mix(ops: DenseLayers, x: torch.Tensor, layer: LayerWeights, number: int) -> torch.Tensor:
    """Attention or the delta net of a layer, with its last gemm: partial sums [S, T, hidden]."""
    if layer.delta_net is not None:
        x = ops.run_delta_net(x, layer.linears, layer.delta_net, number)
        return ops.gemm(x, layer.linears["out"])
    norms = HeadNorms(layer.norms["q_norm"], layer.norms["k_norm"])
    x = ops.attend_gated(ops.gemm(x, layer.linears["qkv"]), number, norms)
    return ops.gemm(x, layer.linears["o"])


def forward(ops: DenseLayers, weights: ModelWeights) -> torch.Tensor:
    """Last states [P, hidden] of one step; writes keys and values to the KV pages, and the states."""
    x = ops.embed(weights.embedding, weights.layers[0].norms["attention"])
    last = len(weights.layers) - 1
    for number, layer in enumerate(weights.layers):
        y = mix(ops, x, layer, number)
        assert layer.experts is not None
        y = ops.run_experts(y, layer.norms["mlp"], layer.experts)
        if number < last:
            x = ops.add_norm(y, weights.layers[number + 1].norms["attention"])
    return ops.finish(y, weights.last_norm)
