"""Checks by a file's header whether it can be a draft model. Loads no library."""

from pathlib import Path

from localchat.backend_api.drafter import unfit
from localchat.model_files.architecture import ModelShape, model_shape
from localchat.model_files.open_gguf import read_header


def draft_shape(file: str, context_tokens: int = 0) -> ModelShape:
    """Return the shape of the draft model in this file. Raises ModelMissing, ModelInvalid.

    context_tokens: context of the model that answers.
    """
    path = Path(file)
    shape = model_shape(read_header(path))
    why = ""
    if not shape.vocabulary:
        why = "has no vocabulary"
    elif shape.recurrent:
        why = "keeps a running state, which cannot go back where a draft is rejected"
    elif shape.window:
        why = "keeps a sliding window, which cannot always go back where a draft is rejected"
    elif 0 < shape.positions < context_tokens:
        why = f"has {shape.positions:,} positions, and the context is {context_tokens:,}"
    if why:
        raise unfit(path.name, f": it {why}")
    return shape
