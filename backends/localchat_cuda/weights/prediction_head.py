"""Loads the prediction head of a checkpoint."""

from dataclasses import dataclass, replace

import torch

from localchat_cuda.config.model import ModelConfig
from localchat_cuda.config.prediction import PREFIX, head_config
from localchat_cuda.weights.formats.weight import Weight
from localchat_cuda.weights.loader import Loader
from localchat_cuda.weights.model_weights import ModelWeights
from localchat_cuda.weights.source import LoadTarget


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """Weights of a prediction head."""

    model: ModelWeights
    """Layer and last norm, with the model's embedding and output head."""
    embedding_norm: torch.Tensor
    """[hidden]"""
    state_norm: torch.Tensor
    """[hidden]"""
    join: Weight
    """[hidden, 2 * hidden], applied to embedding and state, side by side."""


def load_head(config: ModelConfig, model: ModelWeights, target: LoadTarget) -> HeadWeights:
    """Load the prediction head of the model with these weights. Raises ModelInvalid."""
    own = head_config(config)
    names = config.family.names
    names = replace(names, layer=f"{PREFIX}layers.{{}}.", last_norm=f"{PREFIX}norm.weight")
    loader = Loader(own, names, target)
    embedding_norm, state_norm, last_norm = (
        loader.norm(f"{PREFIX}{name}.weight", own.hidden)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    )
    return HeadWeights(
        replace(model, layers=(loader.layer(0),), last_norm=last_norm),
        embedding_norm,
        state_norm,
        loader.linear([f"{PREFIX}fc"], (own.hidden,), 2 * own.hidden),
    )
