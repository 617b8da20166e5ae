"""Reader of safetensors headers, with limits on everything.

The format (github.com/huggingface/safetensors): eight bytes of length, a JSON object that lists the data
type, shape and offsets of each tensor, then the data without holes.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeGuard

from localchat.errors import ModelInvalid
from localchat.model_files.byte_source import ByteSource, FileSource, file_errors

MAX_HEADER_BYTES = 64 << 20
MAX_TENSORS = 1 << 17
_MAX_NAME = 1024
_MAX_SIZE = 1 << 60
_BITS = re.compile(r"[A-Z]{1,4}([0-9]{1,3})(?:_[A-Z0-9]{1,8})?")
_AGAIN = "The file is cut off or damaged: download it again."


class Tensor(NamedTuple):
    """A tensor of a safetensors file."""

    name: str
    shape: tuple[int, ...]
    """Slowest dimension first, as in torch."""
    dtype: str
    offset: int
    """Offset from the start of the file."""
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
    """Return the header of a file on disk. Raises ModelMissing, ModelInvalid."""
    with file_errors(path), FileSource(path) as source:
        return read_safetensors_source(source)


def read_safetensors_source(source: ByteSource) -> SafetensorsHeader:
    """Return the header of a byte source, reading nothing else. Raises ModelInvalid."""
    length = int.from_bytes(source.read(0, 8), "little")
    if source.size < 10 or not 2 <= length <= min(MAX_HEADER_BYTES, source.size - 8):
        raise _invalid(source, f"its header claims {length:,} bytes of {source.size:,}")
    try:
        table = json.loads(source.read(8, length).decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _invalid(source, f"its header is not valid JSON: {error}") from error
    if not isinstance(table, dict) or len(table) > MAX_TENSORS:
        raise _invalid(source, "its header is not a table of tensors")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise _invalid(source, "its metadata is not a table of strings")
    tensors = [_tensor(source, name, entry, 8 + length) for name, entry in table.items()]
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


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return the object of a header. Raises ValueError for a name that occurs twice.

    Programs differ in which of two entries they read.
    """
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _invalid(source: ByteSource, cause: str) -> ModelInvalid:
    return ModelInvalid(
        f"{source.name} is not a usable safetensors file: {cause}.", hint=_AGAIN, path=source.name
    )


def _tensor(source: ByteSource, name: str, entry: object, start: int) -> Tensor:
    if len(name) > _MAX_NAME or not name.isprintable():
        raise _invalid(source, f"a tensor has the name {name[:80]!a}")
    fields = entry if isinstance(entry, dict) else {}
    dtype = fields.get("dtype")
    shape = fields.get("shape")
    offsets = fields.get("data_offsets")
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets):
        raise _invalid(source, f"tensor {name} has no type, shape and place")
    if len(offsets) != 2:
        raise _invalid(source, f"tensor {name} has no type, shape and place")
    count = prod(shape)
    begin, end = offsets
    size = end - begin
    bits = _bits(dtype)
    if not bits:
        raise _invalid(source, f"tensor {name} has the unknown type {dtype[:40]!a}")
    if count >= _MAX_SIZE or size != -(-count * bits // 8):
        raise _invalid(source, f"tensor {name} of shape {shape} in {dtype} takes {size:,} bytes")
    return Tensor(name, tuple(shape), dtype, start + begin, size)


def _bits(dtype: str) -> int:
    """Return the bits per number, 0 for an unknown type."""
    if dtype == "BOOL":
        return 8
    match = _BITS.fullmatch(dtype)
    return int(match[1]) if match else 0


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    """Return whether a value is a short list of sizes or offsets."""
    return (
        isinstance(value, list)
        and len(value) <= 16
        and all(
            isinstance(item, int) and not isinstance(item, bool) and 0 <= item < _MAX_SIZE
            for item in value
        )
    )
