"""Tensors of safetensors files as numpy arrays, mapped from the disk."""

import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localchat.errors import ModelInvalid
from localchat.model_files.safetensors import Tensor, read_safetensors

_NUMPY: Final = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "F64": np.float64}
"""Types of stored numbers. numpy has no BF16, so its bits are integers."""


class StoredTensor(NamedTuple):
    """A tensor of a file."""

    file: Path
    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Slowest dimension first."""
        return self.tensor.shape

    @property
    def dtype(self) -> str:
        """Type as safetensors names it."""
        return self.tensor.dtype

    def numbers(self) -> NDArray[Any]:
        """Map the tensor. BF16 is mapped as uint16."""
        kind = _NUMPY[self.dtype]
        if not self.tensor.size_bytes:
            return np.empty(self.shape, kind)
        return np.memmap(self.file, kind, "r", self.tensor.offset, self.shape)

    def floats(self) -> NDArray[np.float32]:
        """Return the numbers in float32."""
        numbers = self.numbers()
        if self.dtype == "BF16":
            return (numbers.astype(np.uint32) << 16).view(np.float32)
        return numbers.astype(np.float32)


def read_tensors(files: list[Path]) -> dict[str, StoredTensor]:
    """Return the tensors of files by name. Raises ModelMissing, ModelInvalid, also for other types."""
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in read_safetensors(file).tensors:
            if tensor.dtype not in _NUMPY:
                raise ModelInvalid(
                    f"{file.name}: {tensor.name} has the type {tensor.dtype}, which cannot be converted; "
                    f"only {', '.join(_NUMPY)} can.",
                    hint="Use the original checkpoint without quantization.",
                    path=str(file),
                )
            if tensor.name in tensors:
                other = tensors[tensor.name].file
                raise ModelInvalid(
                    f"{file}: {tensor.name} is also in {other.name}.",
                    hint="The folder has the weights twice: remove the older files.",
                    path=str(file),
                )
            if not 1 <= len(tensor.shape) <= 2 or 0 in tensor.shape:
                raise ModelInvalid(
                    f"{file}: {tensor.name} has the shape {list(tensor.shape)}; only vectors and matrices "
                    "can be converted.",
                    path=str(file),
                )
            tensors[tensor.name] = StoredTensor(file, tensor)
    return tensors


def unsupported(folder: Path | str, cause: str) -> ModelInvalid:
    """Return the error for a checkpoint that cannot be converted. cause: as a part of the sentence."""
    return ModelInvalid(
        f"{folder} cannot be converted: {cause}.",
        hint="Convert it with convert_hf_to_gguf.py of llama.cpp, or pull a GGUF of the model.",
        path=str(folder),
    )


@contextmanager
def expected_values(folder: Path) -> Iterator[None]:
    """Turn errors about the values of JSON files into ModelInvalid.

    The files come from anywhere, and a value of another type may be at every place.
    """
    try:
        yield
    except (
        *(ArithmeticError, AttributeError, LookupError, TypeError, ValueError),
        *(re.error, struct.error),
    ) as error:
        raise ModelInvalid(
            f"{folder} cannot be converted: one of its JSON files has an unexpected value "
            f"({type(error).__name__}: {str(error)[:200]}).",
            hint="The files may be damaged: download them again.",
            path=str(folder),
        ) from error
