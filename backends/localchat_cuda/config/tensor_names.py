"""Names of a checkpoint's tensors, mapped to those of a text-only checkpoint.

A module of its own because the planner reads it, and planning must not import torch.
"""

_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
"""Prefixes found on the hub; the last one is written by transformers 4.52 and later."""
_OTHER_PARTS = (
    *("vision_tower", "visual", "multi_modal_projector", "mtp"),
    *("embed_vision", "vision_embedder", "audio_tower", "embed_audio"),
)
"""Parts that see images or hear, and heads that predict more than one token."""


def canonical_name(name: str) -> str:
    """Name of the tensor in a text-only checkpoint."""
    for prefix, canonical in _PREFIXES:
        if name.startswith(prefix):
            return canonical + name.removeprefix(prefix)
    return name


def is_in_layers(name: str, layers: int) -> bool:
    """False for tensors of layers after so many: a prediction head may be stored there."""
    begin, _, rest = canonical_name(name).partition("model.layers.")
    number = rest.split(".", 1)[0]
    return bool(begin) or not number.isdigit() or int(number) < layers


def is_text(name: str) -> bool:
    """True for tensors of the text part."""
    return name.removeprefix("model.").split(".", 1)[0] not in _OTHER_PARTS
