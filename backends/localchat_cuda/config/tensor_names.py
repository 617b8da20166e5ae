"""Maps names of a checkpoint's tensors to those of a text-only checkpoint. Imports no torch."""

_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("backbone.", "model."),
)
"""Prefixes of checkpoints on the hub. transformers 4.52 and later write the third one."""
_OTHER_PARTS = (
    *("vision_tower", "visual", "multi_modal_projector", "mtp"),
    *("embed_vision", "vision_embedder", "audio_tower", "embed_audio"),
)
"""Parts for images and sound, and heads that predict more than one token."""


def canonical_name(name: str) -> str:
    """Return the name of a tensor in a text-only checkpoint."""
    for prefix, canonical in _PREFIXES:
        if name.startswith(prefix):
            return canonical + name.removeprefix(prefix)
    return name


def is_in_layers(name: str, layers: int) -> bool:
    """Return False for tensors of layers beyond the last one, such as a prediction head's."""
    before, _, after = canonical_name(name).partition("model.layers.")
    number = after.split(".", 1)[0]
    return bool(before) or not number.isdigit() or int(number) < layers


def is_text(name: str) -> bool:
    """Return True for tensors of the text part."""
    return name.removeprefix("model.").split(".", 1)[0] not in _OTHER_PARTS
