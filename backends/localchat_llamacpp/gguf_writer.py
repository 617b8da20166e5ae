"""Builds the header of a GGUF file: metadata entries and the table of tensors."""

import struct
from collections.abc import Iterable, Sequence
from math import prod
from typing import Final, TypeAlias

from localchat.model_files.ggml_types import NUMBER_FORMATS, stored_bytes
from localchat.model_files.gguf import GgufTensor

ALIGNMENT: Final = 32
TYPE_CODES: Final = {format_.name: code for code, format_ in NUMBER_FORMATS.items()}
"""Numbers of ggml's formats by name."""
_GGUF_VERSION: Final = 3
_ARRAY: Final = 9

Scalar: TypeAlias = bool | int | float | str


def tensor_to_write(name: str, shape: tuple[int, ...], format_name: str) -> GgufTensor:
    """Return a tensor whose offset `head` chooses. shape: fastest dimension first."""
    format_ = NUMBER_FORMATS[TYPE_CODES[format_name]]
    return GgufTensor(name, shape, format_, 0, stored_bytes(format_, prod(shape)))


def head(entries: Sequence[bytes], tensors: Iterable[GgufTensor]) -> bytes:
    """Return everything before the tensors' data. Each tensor begins at a multiple of ALIGNMENT."""
    table = []
    offset = 0
    for tensor in tensors:
        shape = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        code = TYPE_CODES[tensor.format.name]
        table.append(_string(tensor.name) + shape + struct.pack("<IQ", code, offset))
        offset += -(-tensor.size_bytes // ALIGNMENT) * ALIGNMENT
    counts = struct.pack("<4sIQQ", b"GGUF", _GGUF_VERSION, len(table), len(entries))
    text = b"".join((counts, *entries, *table))
    return text + bytes(-len(text) % ALIGNMENT)


def entry(key: str, value: Scalar | Sequence[Scalar]) -> bytes:
    """Return a metadata entry, also of a list of one type. Floats are float32, integers uint32 or int32."""
    if isinstance(value, Scalar):
        code, data = _packed([value])
        return _string(key) + struct.pack("<I", code) + data
    code, data = _packed(value)
    return _string(key) + struct.pack("<IIQ", _ARRAY, code, len(value)) + data


def _packed(values: Sequence[Scalar]) -> tuple[int, bytes]:
    """Return GGUF's number of the type, and the values without their count."""
    match values[0]:
        case str():
            return 8, b"".join(_string(str(value)) for value in values)
        case bool():
            return 7, struct.pack(f"<{len(values)}?", *values)
        case float():
            return 6, struct.pack(f"<{len(values)}f", *values)
    if len(values) > 1:
        # llama.cpp reads types of tokens as int32.
        return 5, struct.pack(f"<{len(values)}i", *values)
    return 4, struct.pack(f"<{len(values)}I", *values)


def _string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data
