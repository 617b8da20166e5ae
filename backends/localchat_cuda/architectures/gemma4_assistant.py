"""A Gemma 4 assistant: a few Gemma 4 layers that draft over the keys and values of their model.

Google, 2026 (huggingface.co/docs/transformers/model_doc/gemma4_assistant). It reads the embedding of a token
and the model's last state of the token before, side by side. Its layers compute queries only, at the position
of the last token of the text, whichever draft token they compute. The state of a draft token is the
assistant's own.
"""

import torch

from localchat_cuda.architectures import gemma2, gemma4
from localchat_cuda.layers.dense import DenseLayers
from localchat_cuda.weights.assistant import AssistantWeights


def forward(
    ops: DenseLayers, weights: AssistantWeights, previous: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last states [T, hidden], and [T, C] for the next draft token.

    `previous` [T, C]: of the preceding tokens."""
    rows = weights.model.embedding[ops.inputs.ids.long()]
    embedded = (rows.float() * weights.embedding_scale).to(ops.dtype)
    y = ops.gemm(torch.cat((embedded, previous), 1), weights.entry)
    ops.residual.zero_()
    x = ops.add_norm(y, weights.model.layers[0].norms["attention"])
    states = gemma2.run_layers(ops, weights.model, x, gemma4.mix, gemma4.feed)
    return states, ops.gemm(states, weights.exit).sum(0).to(ops.dtype)
