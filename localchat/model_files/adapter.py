"""LoRA adapters in GGUF: header, and the checks before native code reads the file.

An adapter has two small matrices for a matrix of the model: NAME.lora_a (rank rows) and NAME.lora_b. The model
computes with W + scale * alpha / rank * (B A).
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from localchat.errors import ModelInvalid
from localchat.model_files.byte_source import FileSource, file_errors
from localchat.model_files.gguf import GgufTensor, Header
from localchat.model_files.open_gguf import read_source

PEFT_CONFIG: Final = "adapter_config.json"
PEFT_WEIGHTS: Final = "adapter_model.safetensors"
_A: Final = ".lora_a"
_B: Final = ".lora_b"
_EMBEDDING: Final = "token_embd.weight"
_OUTPUT: Final = "output.weight"


class Adapter(NamedTuple):
    """An adapter file."""

    path: Path
    header: Header
    pairs: Mapping[str, tuple[GgufTensor, GgufTensor]]
    """Matrices A and B by the name of the model's tensor."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all matrices in memory."""
        return sum(a.size_bytes + b.size_bytes for a, b in self.pairs.values())

    def identity(self) -> str:
        """Return a hash of the content, which separates caches. Reads the whole file. Raises ModelInvalid."""
        with file_errors(self.path), self.path.open("rb") as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


def read_adapter(path: Path) -> Adapter:
    """Return a checked adapter. Raises ModelMissing, ModelInvalid for a file of another kind."""
    with file_errors(path), FileSource(path) as source:
        header = replace(read_source(source), parts=(path,))
    kind = header.metadata.get("general.type", "model")
    if kind != "adapter":
        raise _invalid(path, f"its general.type is {kind!r}, not 'adapter'")
    method = header.metadata.get("adapter.type")
    if method != "lora":
        raise _invalid(path, f"its adapter.type is {method!r}, not 'lora'")
    if "adapter.alora.invocation_tokens" in header.metadata:
        raise ModelInvalid(
            f"{path} is an activated LoRA, which changes only the text after certain tokens. "
            "localchat applies adapters to the whole text.",
            hint="Use a plain LoRA adapter.",
            path=str(path),
        )
    alpha = header.metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise _invalid(path, f"its alpha is {alpha!r}")
    return Adapter(path, header, _pairs(path, header))


def _pairs(path: Path, header: Header) -> dict[str, tuple[GgufTensor, GgufTensor]]:
    tensors = {tensor.name: tensor for tensor in header.tensors}
    pairs: dict[str, tuple[GgufTensor, GgufTensor]] = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(_A).removesuffix(_B)
        if stem == name:
            raise _invalid(path, f"its tensor {name} is not a matrix of a LoRA")
        a = tensors.get(f"{stem}{_A}")
        b = tensors.get(f"{stem}{_B}")
        if a is None or b is None:
            raise _invalid(path, f"{stem} has one matrix of two")
        if min(len(a.shape), len(b.shape), len(tensor.shape)) < 2:
            raise _invalid(path, f"its tensor {name} is not a matrix")
        pairs[stem] = a, b
    if not pairs:
        raise _invalid(path, "it contains no matrices")
    return pairs


def check_adapter(adapter: Adapter, model: Header, name: str) -> None:
    """Raise ModelInvalid unless an adapter fits a model. llama.cpp aborts the process at some mismatches.

    name: file or folder that the user gave, for errors.
    """
    architecture = adapter.header.architecture
    if architecture != model.architecture:
        raise _mismatch(
            name, f"it is for the architecture {architecture}, and this is {model.architecture}"
        )
    tensors = {tensor.name: tensor for tensor in model.tensors}
    for stem, (a, b) in adapter.pairs.items():
        if stem in (_EMBEDDING, _OUTPUT) and _OUTPUT not in tensors:
            raise ModelInvalid(
                f"{name} changes the token embedding or the output, which are one matrix in this model. "
                "llama.cpp cannot apply it.",
                hint="Train the adapter without embed_tokens and lm_head.",
            )
        target = tensors.get(stem)
        if target is None:
            raise _mismatch(name, f"it changes {stem}, and the model has no such tensor")
        shape = (a.shape[0], *b.shape[1:])
        ranks = a.shape[1], b.shape[0]
        if stem == _EMBEDDING:
            # An embedding looks up rows of A, so A is transposed.
            shape = (b.shape[1], a.shape[1])
            ranks = a.shape[0], b.shape[0]
        if shape != target.shape or ranks[0] != ranks[1] or a.shape[2:] != b.shape[2:]:
            raise _mismatch(
                name,
                f"its matrices for {stem} have the shapes {_shown(a)} and {_shown(b)}, and the model's has "
                f"{_shown(target)}",
            )


def _shown(tensor: GgufTensor) -> str:
    return " x ".join(map(str, tensor.shape))


def _mismatch(name: str, cause: str) -> ModelInvalid:
    return ModelInvalid(
        f"The adapter {name} does not fit this model: {cause}.",
        hint="Use an adapter that was trained on this model.",
    )


def _invalid(path: Path, cause: str) -> ModelInvalid:
    return ModelInvalid(
        f"{path} is not a usable LoRA adapter: {cause}.",
        hint="Give an adapter in GGUF, or a folder with adapter_config.json and "
        "adapter_model.safetensors.",
        path=str(path),
    )
