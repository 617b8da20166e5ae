"""Reads the shape of a checkpoint's prediction head. Imports no torch."""

from collections.abc import Iterable
from dataclasses import replace

from localchat.model_files.safetensors import SafetensorsHeader
from localchat_cuda.config.model import ModelConfig

PREFIX = "mtp."
"""Prefix of the tensors of a prediction head."""


def has_head(config: ModelConfig, headers: Iterable[SafetensorsHeader]) -> bool:
    """Return True for a prediction head of one layer with its model's embedding and head."""
    names = {tensor.name for header in headers for tensor in header.tensors}
    others = (f"{PREFIX}layers.1.", f"{PREFIX}embed_tokens.")
    return (
        config.family.has_delta_nets
        and any(name.startswith(f"{PREFIX}fc.") for name in names)
        and not any(name.startswith(others) for name in names)
    )


def head_config(config: ModelConfig) -> ModelConfig:
    """Return the prediction head as a model of one layer with attention."""
    return replace(config, layers=1, windows=(), unrotated=(), recurrent=None)


def head_bytes(config: ModelConfig, headers: Iterable[SafetensorsHeader]) -> int:
    """Return the bytes of a prediction head's tensors once loaded, without those it shares."""
    return sum(
        config.loaded_bytes(tensor)
        for header in headers
        for tensor in header.tensors
        if tensor.name.startswith(PREFIX)
    )
