"""Inspects a model: reads its header and asks the backend that would run it for objections."""

from pathlib import Path
from typing import NamedTuple

from localchat.backend_api.registry import choose_for_file, choose_for_model
from localchat.errors import LocalchatError, ModelInvalid
from localchat.model_files.architecture import model_shape
from localchat.model_files.checkpoint import read_checkpoint
from localchat.model_files.gguf import Header
from localchat.model_files.open_gguf import read_header
from localchat.models.index import Model
from localchat.models.info.checkpoint_info import describe_checkpoint
from localchat.models.info.gguf_info import VOCABULARY, ModelDescription, describe_gguf


class Inspection(NamedTuple):
    """Result of reading a model's files."""

    header: Header | None
    """Header of a GGUF that could be read."""
    facts: ModelDescription | None
    """Description of the model. None if its files could not be read."""
    trouble: str
    """End of a sentence on why the model cannot be used. Empty if it can."""


def inspect(model: Model, *, vocabulary: bool = False) -> Inspection:
    """Read the header alone: 30 ms for a large vocabulary.

    vocabulary: also read the tokens (0.2 s), to know whether the model fills in the middle. A faulty model is a
    result, not an error.
    """
    if model.path is None or model.trouble:
        return Inspection(None, None, model.trouble)
    try:
        if model.path.is_dir():
            return _checkpoint(model.path, vocabulary=vocabulary)
        header = read_header(model.path, (VOCABULARY,) if vocabulary else ())
        backend = choose_for_file(model.path).backend
    except LocalchatError as problem:
        return Inspection(None, None, _trouble(problem, model))
    return Inspection(header, describe_gguf(header), backend.objection(model_shape(header)))


def _checkpoint(folder: Path, *, vocabulary: bool) -> Inspection:
    """Inspect a folder of safetensors. Raises LocalchatError."""
    checkpoint = read_checkpoint(folder)
    facts = describe_checkpoint(folder, checkpoint, vocabulary=vocabulary)
    backend = choose_for_model(checkpoint, "safetensors").backend
    return Inspection(None, facts, backend.objection(checkpoint))


def _trouble(problem: LocalchatError, model: Model) -> str:
    """Return the reason alone, because the caller's message names the model."""
    reason = ""
    if isinstance(problem, ModelInvalid):
        reason = problem.reason
    message = problem.message.rstrip(".").replace(f"{model.path}/", "")
    return reason or message.replace(str(model.path), "it")
