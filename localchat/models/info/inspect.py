"""A model looked into: its header read, and every installed backend asked whether it could run it."""

from pathlib import Path
from typing import NamedTuple

from localchat.backend_api.registry import choose_for_file, choose_for_model
from localchat.errors import LocalchatError
from localchat.model_files.architecture import model_shape
from localchat.model_files.checkpoint import read_checkpoint
from localchat.model_files.gguf import Header
from localchat.model_files.open_gguf import read_header
from localchat.models.index import Model
from localchat.models.info.checkpoint_info import describe_checkpoint
from localchat.models.info.gguf_info import VOCABULARY, ModelDescription, describe_gguf


class Inspection(NamedTuple):
    """`header`: None where there is none that could be read, or none of GGUF. `facts`: None where the files
    tell none. `trouble`: why the model cannot be used, the end of a sentence; empty where nothing speaks
    against it."""

    header: Header | None
    facts: ModelDescription | None
    trouble: str


def inspect(model: Model, *, vocabulary: bool = False) -> Inspection:
    """Read the header alone (30 ms for a large vocabulary; with `vocabulary` 0.2 s, to know whether it fills
    in the middle). Never raises for the model's sake: trouble is a finding."""
    if model.path is None or model.trouble:
        return Inspection(None, None, model.trouble)
    try:
        if model.path.is_dir():
            return _checkpoint(model.path, vocabulary=vocabulary)
        header = read_header(model.path, (VOCABULARY,) if vocabulary else ())
        backend = choose_for_file(model.path).backend
    except LocalchatError as problem:
        return Inspection(None, None, _told(problem, model))
    return Inspection(header, describe_gguf(header), backend.objection(model_shape(header)))


def _checkpoint(folder: Path, *, vocabulary: bool) -> Inspection:
    """A folder of safetensors. Raises LocalchatError."""
    found = read_checkpoint(folder)
    facts = describe_checkpoint(folder, found, vocabulary=vocabulary)
    backend = choose_for_model(found, "safetensors").backend
    return Inspection(None, facts, backend.objection(found))


def _told(problem: LocalchatError, model: Model) -> str:
    """The reason alone: the table names the model already."""
    text = problem.message.rstrip(".")
    _, found, reason = text.partition(" is no usable GGUF model: ")
    if not found:
        _, found, reason = text.partition(" is no usable model: ")
    return reason if found else text.replace(str(model.path), "it")
