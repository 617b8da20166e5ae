"""An EAGLE-3 head: a Llama layer over the embedding of a token and the state of the one before it.

States of known tokens are those of three layers of the model, joined by one linear layer; those of guesses are
its own. Li et al., 2025 (arXiv 2503.01840), form as vLLM's llama_eagle3 reads it.
"""

import torch

from localchat_cuda.architectures.prediction_head import normed_inputs
from localchat_cuda.config.eagle import EagleConfig
from localchat_cuda.layers.dense import DenseLayers
from localchat_cuda.weights.eagle import EagleWeights


def forward(
    ops: DenseLayers, weights: EagleWeights, head: EagleConfig, previous: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Last states [T, hidden] of one step, and those that the next guess goes on from.

    `previous` [T, hidden]: of the tokens before those of the step."""
    model = weights.model
    (layer,) = model.layers
    embedded, states = normed_inputs(ops, weights, previous)
    if head.normed_residual:
        ops.residual.copy_(states)
    qkv = ops.gemm(torch.cat((embedded, states), 1), layer.linears["qkv"])
    y = ops.gemm(ops.attend(qkv, 0, None, None), layer.linears["o"])
    x = ops.add_norm(y, layer.norms["mlp"])
    y = ops.gemm(ops.gemm_act_mul(x, layer.linears["gate_up"]), layer.linears["down"])
    found = ops.finish(y, model.last_norm)
    return found, found if head.normed_output else ops.residual.to(found.dtype)
