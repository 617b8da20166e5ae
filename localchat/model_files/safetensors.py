"""Headers of safetensors files, read with bounds on everything.

The format (github.com/huggingface/safetensors): eight bytes of length, a JSON object of tensors with data
type, shape and place, then the data without holes.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeGuard

from localchat.errors import ModelInvalid, ModelMissing
from localchat.model_files.byte_source import ByteSource, FileSource

LONGEST_HEADER = 64 << 20
MOST_TENSORS = 1 << 17
_BITS = re.compile(r"^[A-Z]+(\d+)")
_AGAIN = "The file is cut off or damaged: download it again."


class Tensor(NamedTuple):
    """One tensor of a safetensors file."""

    name: str
    shape: tuple[int, ...]
    """Slowest dimension first, as torch counts."""
    dtype: str
    offset: int
    """From the beginning of the file."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """Metadata and tensor table of a safetensors file."""

    name: str
    metadata: Mapping[str, str]
    tensors: tuple[Tensor, ...]
    file_bytes: int

    @property
    def weights_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors)


def read_safetensors(path: str | Path) -> SafetensorsHeader:
    """The header of a file on disk. Raises ModelMissing, ModelInvalid."""
    try:
        with FileSource(path) as source:
            return read_safetensors_source(source)
    except FileNotFoundError as trouble:
        raise ModelMissing(
            f"There is no file {path}.", hint="Check the path.", path=str(path)
        ) from trouble
    except (OSError, ValueError) as trouble:
        raise ModelInvalid(
            f"{path} cannot be read: {trouble}.",
            hint="Check the path and its permissions.",
            path=str(path),
        ) from trouble


def read_safetensors_source(source: ByteSource) -> SafetensorsHeader:
    """The header of any byte source; reads the header only. Raises ModelInvalid."""
    length = int.from_bytes(source.read(0, 8), "little")
    if source.size < 10 or not 2 <= length <= min(LONGEST_HEADER, source.size - 8):
        raise _invalid(source, f"its header claims {length:,} bytes of {source.size:,}")
    try:
        found = json.loads(source.read(8, length))
    except (ValueError, RecursionError) as trouble:
        raise _invalid(source, "its header is not valid JSON") from trouble
    if not isinstance(found, dict) or len(found) > MOST_TENSORS:
        raise _invalid(source, "its header is not a table of tensors")
    metadata = found.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise _invalid(source, "its metadata is not a table of strings")
    tensors = [_tensor(source, name, entry, 8 + length) for name, entry in found.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.size_bytes))
    end = 8 + length
    for tensor in tensors:
        if tensor.offset != end:
            raise _invalid(
                source,
                f"tensor {tensor.name} starts at byte {tensor.offset:,} instead of {end:,}",
            )
        end += tensor.size_bytes
    if end != source.size:
        raise _invalid(source, f"its tensors end at byte {end:,}, the file at {source.size:,}")
    return SafetensorsHeader(source.name, metadata, tuple(tensors), source.size)


def _invalid(source: ByteSource, found: str) -> ModelInvalid:
    return ModelInvalid(
        f"{source.name} is not a usable safetensors file: {found}.", hint=_AGAIN, path=source.name
    )


def _tensor(source: ByteSource, name: str, entry: object, start: int) -> Tensor:
    fields = entry if isinstance(entry, dict) else {}
    dtype = fields.get("dtype")
    shape = fields.get("shape")
    place = fields.get("data_offsets")
    if not isinstance(dtype, str) or not _whole(shape) or not _whole(place) or len(place) != 2:
        raise _invalid(source, f"tensor {name} has no type, shape and place")
    count = 1
    for side in shape:
        count *= side
    size = place[1] - place[0]
    bits = 8 if dtype == "BOOL" else int(found[1]) if (found := _BITS.match(dtype)) else 0
    if not bits or count >= 1 << 60 or size != -(-count * bits // 8):
        raise _invalid(source, f"tensor {name} of shape {shape} in {dtype} takes {size:,} bytes")
    return Tensor(name, tuple(shape), dtype, start + place[0], size)


def _whole(found: object) -> TypeGuard[list[int]]:
    return (
        isinstance(found, list)
        and len(found) <= 16
        and all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in found)
    )
