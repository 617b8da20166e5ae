"""An EAGLE-3 head: a Llama layer over the embedding of a token and the state of the previous one.

The state of an accepted token joins those of three layers of the model by one linear layer. The state of a
draft token is the head's own. Li et al., 2025 (arXiv 2503.01840); layout of vLLM's llama_eagle3.
"""

import torch

from localchat_cuda.architectures.prediction_head import normed_inputs
from localchat_cuda.layers.dense import DenseLayers
from localchat_cuda.layers.head_norms import AttentionWeights
from localchat_cuda.weights.eagle import EagleWeights


def forward(
    ops: DenseLayers, weights: EagleWeights, previous: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last states [T, hidden], and the states for the next draft token.

    `previous` [T, hidden]: of the preceding tokens."""
    model = weights.model
    (layer,) = model.layers
    embedded, states = normed_inputs(ops, weights, previous)
    if weights.config.normed_residual:
        ops.residual.copy_(states)
    qkv = ops.gemm(torch.cat((embedded, states), 1), layer.linears["qkv"])
    y = ops.gemm(ops.attend(qkv, 0, AttentionWeights()), layer.linears["o"])
    x = ops.add_norm(y, layer.norms["mlp"])
    y = ops.gemm(ops.gemm_act_mul(x, layer.linears["gate_up"]), layer.linears["down"])
    states = ops.finish(y, model.last_norm)
    if weights.config.normed_output:
        return states, states
    return states, ops.residual.to(states.dtype)
