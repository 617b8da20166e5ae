"""Names of tensors where a checkpoint holds more than a text model. Imports no torch.

A model that sees images keeps its text part under another prefix, and parts that are left out here beside it.
"""

_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
"""As checkpoints on the hub have them; the last as transformers from 4.52 on has it."""
_LEFT_OUT = ("vision_tower", "multi_modal_projector")


def usual_name(name: str) -> str:
    """What a tensor is called in a checkpoint of text alone."""
    for begin, usual in _PREFIXES:
        if name.startswith(begin):
            return usual + name.removeprefix(begin)
    return name


def is_text(name: str) -> bool:
    """Whether a tensor is of the text part."""
    return name.removeprefix("model.").split(".", 1)[0] not in _LEFT_OUT
