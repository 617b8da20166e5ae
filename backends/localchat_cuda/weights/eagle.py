"""Loads the checkpoint of an EAGLE-3 head."""

from dataclasses import dataclass

import torch

from localchat_cuda.architectures.names import Names
from localchat_cuda.config.eagle import EagleConfig
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.weights.layer_shapes import linear_shapes
from localchat_cuda.weights.loader import Loader
from localchat_cuda.weights.model_weights import LayerWeights, ModelWeights
from localchat_cuda.weights.source import LoadTarget

_LAYERS = ("midlayer.", "layers.0.")
"""Prefixes of the layer's tensors in the two forms of checkpoints."""


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """Weights of an EAGLE-3 head."""

    config: EagleConfig
    model: ModelWeights
    """Layer, last norm, output head [tokens, hidden], and an embedding that may be the model's."""
    embedding_norm: torch.Tensor
    """[hidden]"""
    state_norm: torch.Tensor
    """[hidden]"""
    fuse: torch.Tensor
    """[hidden, taps * hidden], applied to the model's states."""
    tokens: torch.Tensor
    """Token of the model's vocabulary for each token of the head, int64 [tokens]."""


def load_eagle(
    own: ModelConfig,
    head: EagleConfig,
    names: Names,
    model: ModelWeights,
    target: LoadTarget,
) -> EagleWeights:
    """Load a head for the model with these weights. `names`: of a Llama. Raises ModelInvalid."""
    loader = Loader(own, names, target)
    source = target.source
    hidden = own.hidden
    begin = _LAYERS[1]
    if source.has(f"{_LAYERS[0]}hidden_norm.weight"):
        begin = _LAYERS[0]
    linears = {}
    for field, (parts, k) in linear_shapes(own, 0).items():
        if field == "qkv":
            # Attention reads the embedding and the state, side by side.
            k *= 2
        linears[field] = loader.checked([begin + name for name in names.merged[field]], parts, k)
    norms = {"mlp": loader.norm(begin + names.norms["mlp"], hidden)}
    embedding = model.embedding
    output = model.head
    if source.has("embed_tokens.weight"):
        embedding = loader.tensor("embed_tokens.weight", own.vocabulary, hidden)
        if torch.equal(embedding, model.embedding):
            embedding = model.embedding
    if head.vocabulary != own.vocabulary or source.has(names.head):
        output = loader.tensor(names.head, head.vocabulary, hidden)
    tokens = torch.arange(head.vocabulary, device=target.device)
    if source.has("d2t"):
        # Differences between the model's number of a token and the head's.
        tokens += target.tensor("d2t", (head.vocabulary,), torch.int64)
    return EagleWeights(
        head,
        ModelWeights(
            embedding,
            (LayerWeights(norms, linears, {}),),
            loader.norm("norm.weight", hidden),
            output,
        ),
        loader.norm(f"{begin}input_layernorm.weight", hidden),
        loader.norm(f"{begin}hidden_norm.weight", hidden),
        loader.tensor("fc.weight", hidden, len(head.taps) * hidden),
        tokens,
    )
