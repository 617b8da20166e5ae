"""Shape of a model's own prediction head, as its memory is planned. Loads no library.

A head (NextN, multi-token prediction) is a decoder layer after the last one, which predicts the token after the
next (DeepSeek-V3, arXiv 2412.19437). llama.cpp runs it in a context of its own. Its graph of other
architectures would be the whole model's, and it ends the process at a second layer that it does not expect.
"""

from dataclasses import replace
from typing import Final

from localchat.model_files.architecture import ModelShape

_SINGLE: Final = frozenset(
    {
        *("bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa"),
        *("glm4moe", "glm5-next", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next"),
    }
)
"""Architectures whose head has one layer (llama.cpp 0.5.0 and 0.6.0)."""
_SEVERAL: Final = frozenset({"hy_v3", "mimo2", "step35"})
"""Architectures that may have a layer for each drafted token. The first one drafts them all."""


def has_head(shape: ModelShape) -> bool:
    """Return whether llama.cpp can draft with a prediction head in this file."""
    count = shape.all_layers - len(shape.layers)
    runs = shape.architecture in _SEVERAL or (shape.architecture in _SINGLE and count == 1)
    if not runs or not shape.head or shape.header is None:
        return False
    joint = f"blk.{len(shape.layers)}.nextn.eh_proj.weight"
    return any(tensor.name == joint for tensor in shape.header.tensors)


def head_shape(shape: ModelShape) -> ModelShape:
    """Return the prediction head as a model of its own, without what it shares with its model."""
    count = shape.all_layers - len(shape.layers)
    widest = max(shape.layers, key=lambda layer: layer.keys + layer.values)
    weights = tuple(
        weight._replace(layer=weight.layer - len(shape.layers)) for weight in shape.head
    )
    return replace(
        shape,
        layers=(widest._replace(sliding=False, state=0),) * count,
        all_layers=count,
        weights=weights,
        head=(),
        inner=0,
        window=0,
    )
