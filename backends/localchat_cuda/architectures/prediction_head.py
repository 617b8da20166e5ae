"""The prediction head of Qwen3-Next and Qwen3.5: one decoder layer that predicts the token after the next.

It reads the last state of a token and the embedding of the next one, each normed, side by side through one
linear layer. It shares the model's embedding and output head. Layout and names are those of vLLM's
qwen3_next_mtp. The objective is DeepSeek-V3's multi-token prediction (arXiv 2412.19437).
"""

import torch

from localchat_cuda.architectures import qwen3_next
from localchat_cuda.layers.dense import DenseLayers, Sums
from localchat_cuda.weights.eagle import EagleWeights
from localchat_cuda.weights.prediction_head import HeadWeights


def normed_inputs(
    ops: DenseLayers, weights: HeadWeights | EagleWeights, previous: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return normed embeddings of a step's tokens and normed states `previous`, each [T, hidden].

    The residual then contains `previous`."""
    ops.residual.copy_(weights.model.embedding[ops.inputs.ids.long()])
    embedded = ops.normed(None, ops.residual, weights.embedding_norm)
    ops.residual.copy_(previous)
    return embedded, ops.normed(None, ops.residual, weights.state_norm)


def forward(ops: DenseLayers, weights: HeadWeights, previous: torch.Tensor) -> torch.Tensor:
    """Return the last states [T, hidden] of one step. `previous` [T, hidden]: of the preceding tokens."""
    model = weights.model
    (layer,) = model.layers
    y: Sums = ops.gemm(torch.cat(normed_inputs(ops, weights, previous), 1), weights.join)
    ops.residual.zero_()
    x = ops.add_norm(y, layer.norms["attention"])
    y = qwen3_next.mix(ops, x, layer, 0)
    if layer.experts is not None:
        y = ops.run_experts(y, layer.norms["mlp"], layer.experts)
    else:
        x = ops.add_norm(y, layer.norms["mlp"])
        y = ops.gemm(ops.gemm_act_mul(x, layer.linears["gate_up"]), layer.linears["down"])
    return ops.finish(y, model.last_norm)
