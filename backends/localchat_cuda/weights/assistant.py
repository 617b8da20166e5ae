"""Loads the checkpoint of a Gemma 4 assistant."""

from dataclasses import dataclass

import torch

from localchat.errors import ModelInvalid
from localchat_cuda.config.assistant import AssistantConfig
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.weights.loader import Loader
from localchat_cuda.weights.model_weights import ModelWeights
from localchat_cuda.weights.source import LoadTarget


@dataclass(frozen=True, slots=True)
class AssistantWeights:
    """Weights of a Gemma 4 assistant. C are the columns of its model's residual."""

    model: ModelWeights
    """Layers, last norm and output head [tokens, hidden], with the model's embedding [tokens, C]."""
    embedding_scale: float
    """Factor of the model's embedding."""
    entry: torch.Tensor
    """[hidden, 2 * C], applied to the embedding and the state, side by side."""
    exit: torch.Tensor
    """[C, hidden], applied to the last state."""
    centroids: torch.Tensor | None = None
    """[groups, hidden]. None: the head computes the logits of all tokens."""
    ordering: torch.Tensor | None = None
    """Tokens of each group, int64 [groups, tokens of a group]."""


def load_assistant(
    own: ModelConfig,
    assistant: AssistantConfig,
    config: ModelConfig,
    model: ModelWeights,
    target: LoadTarget,
) -> AssistantWeights:
    """Load an assistant for the model with this config and weights. Raises ModelInvalid."""
    names = own.family.names
    loader = Loader(own, names, target)
    hidden = own.hidden
    stored_head = names.head if target.source.has(names.head) else names.embedding
    centroids: torch.Tensor | None = None
    ordering: torch.Tensor | None = None
    if assistant.centroids:
        centroids = loader.tensor("masked_embedding.centroids.weight", assistant.centroids, hidden)
        name = "masked_embedding.token_ordering"
        ordering = target.tensor(name, (own.vocabulary,), torch.int64)
        # A token outside the head would end the GPU's process.
        if int(ordering.min()) < 0 or int(ordering.max()) >= own.vocabulary:
            raise ModelInvalid(
                f"The assistant's {name} names tokens outside its vocabulary of {own.vocabulary:,}.",
                hint="The checkpoint may be damaged: download it again.",
            )
        ordering = ordering.view(assistant.centroids, -1)
    return AssistantWeights(
        ModelWeights(
            model.embedding,
            tuple(map(loader.layer, range(own.layers))),
            loader.norm(names.last_norm, hidden),
            loader.tensor(stored_head, own.vocabulary, hidden),
        ),
        float(torch.tensor(config.embedding_scale, dtype=target.dtype)),
        loader.tensor("pre_projection.weight", hidden, 2 * assistant.columns),
        loader.tensor("post_projection.weight", assistant.columns, hidden),
        centroids,
        ordering,
    )
