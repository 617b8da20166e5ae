"""Builds the header of a GGUF file: metadata entries and the table of tensors."""

import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

from localchat.model_files.ggml_types import NUMBER_FORMATS, stored_bytes

ALIGNMENT: Final = 32
TYPE_CODES: Final = {format_.name: code for code, format_ in NUMBER_FORMATS.items()}
"""Numbers of ggml's formats by name."""
_GGUF_VERSION: Final = 3
_ARRAY: Final = 9

Scalar: TypeAlias = bool | int | float | str


class TableEntry(NamedTuple):
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    """Fastest dimension first."""
    format: str

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor without padding."""
        elements = 1
        for length in self.shape:
            elements *= length
        return stored_bytes(NUMBER_FORMATS[TYPE_CODES[self.format]], elements)


def head(entries: Sequence[bytes], tensors: Iterable[TableEntry]) -> bytes:
    """Return everything before the tensors' data. Each tensor begins at a multiple of ALIGNMENT."""
    table = []
    offset = 0
    for tensor in tensors:
        shape = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        code = TYPE_CODES[tensor.format]
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
