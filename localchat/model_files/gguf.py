"""Reader of GGUF headers, with limits on everything before native code reads the file.

The format is described in ggml's docs/gguf.md. The reader accepts what llama.cpp accepts (versions 2 and 3,
little endian, tensors in order without holes) and checks what llama.cpp trusts and crashes on. It skips a
vocabulary of 152,000 tokens and as many merges in about 30 ms.
"""

import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeAlias

from localchat.errors import ModelInvalid
from localchat.model_files.byte_source import ByteSource, Cursor, Truncated
from localchat.model_files.ggml_types import FILE_TYPES, NUMBER_FORMATS, NumberFormat, stored_bytes

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_STRINGS = 1 << 23
"""Total number of strings in arrays. The largest vocabularies have less than a million."""
MAX_KEY_BYTES = 1 << 16
MAX_STRING_BYTES = 64 << 20
MAX_TENSOR_NAME_BYTES = 63
MAX_STORED_ELEMENTS = 4096
"""Numeric arrays up to this length, such as settings per layer, store their values."""

_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING = 8
_ARRAY = 9
_U32 = _SCALARS[4]
_U64 = _SCALARS[10]
SAMPLING_KEYS = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""Names of sampling defaults in generation_config.json, and below `general.sampling.` in a GGUF file."""


class Array(NamedTuple):
    """An array of the metadata."""

    length: int
    values: tuple[int | float | str, ...] | None = None
    """Values, or None for skipped long numeric arrays and strings that were not requested."""


Value: TypeAlias = int | float | bool | str | Array


class GgufTensor(NamedTuple):
    """A tensor of a GGUF file."""

    name: str
    shape: tuple[int, ...]
    """*Fastest dimension first, as in ggml."""
    format: NumberFormat
    offset: int
    """Offset from the start of the file."""
    size_bytes: int
    part: int = 0
    """Index of the file in a split model."""

    @property
    def elements(self) -> int:
        """Numbers in the tensor."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """Metadata and tensor table of a GGUF model."""

    name: str
    version: int
    metadata: Mapping[str, Value]
    tensors: tuple[GgufTensor, ...]
    data_offset: int
    file_bytes: int
    """Size of all parts."""
    parts: tuple[Path, ...] = ()
    """Paths of the parts in order, empty for a source that is not a file."""
    encoder: "Header | None" = None
    """Header of the model's projector, if that is not a file beside the model."""
    entries: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Start and end of each metadata entry in the first file, so that a writer can copy it unread."""

    @property
    def architecture(self) -> str:
        """Value of `general.architecture`, or an empty string."""
        value = self.metadata.get("general.architecture", "")
        return value if isinstance(value, str) else ""

    def number(self, key: str, default: int = 0) -> int:
        """Return an integer of the architecture. `number("block_count")` reads `llama.block_count`."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        return int(value) if isinstance(value, int) else default

    def numbers(self, key: str, count: int, default: int = 0) -> tuple[int, ...]:
        """Return an integer per layer, from an array or a single number. Missing layers get `default`."""
        stored = self.metadata.get(f"{self.architecture}.{key}")
        if isinstance(stored, Array) and stored.values is not None:
            values = [int(value) for value in stored.values[:count] if not isinstance(value, str)]
            return tuple(values + [default] * (count - len(values)))
        return (self.number(key, default),) * count

    @property
    def vocab_size(self) -> int:
        """Number of tokens, 0 without a vocabulary."""
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, Array):
            return tokens.length
        return self.number("vocab_size")

    @property
    def parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def weights_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def quantization(self) -> str:
        """Name of the mix, such as Q4_K_M.

        If the file does not state it, this is the format with the most bytes.
        """
        code = self.metadata.get("general.file_type")
        if isinstance(code, int) and code in FILE_TYPES:
            return FILE_TYPES[code]
        sizes: dict[str, int] = {}
        for tensor in self.tensors:
            sizes[tensor.format.name] = sizes.get(tensor.format.name, 0) + tensor.size_bytes
        return max(sizes, key=lambda name: sizes[name], default="")


def read_gguf(source: ByteSource, strings: Collection[str] = ()) -> Header:
    """Return the header of a GGUF file after checking its structure. Raises ModelInvalid.

    Reads only the header. strings: keys whose arrays are loaded completely.
    """
    cursor = Cursor(source)
    try:
        return _read(source, cursor, strings)
    except Truncated:
        raise _invalid(
            source, f"the file ends after {source.size:,} bytes, inside its header", _AGAIN
        ) from None


_AGAIN = "The file is cut off or damaged: download it again."
_MAX_CAUSE = 300
"""Characters of a reason in an error."""


def brief(cause: str) -> str:
    """Shorten a reason that quotes names from a file. They may have a megabyte."""
    if len(cause) <= _MAX_CAUSE:
        return cause
    return f"{cause[:_MAX_CAUSE]}…"


def _invalid(source: ByteSource, cause: str, hint: str = "") -> ModelInvalid:
    cause = brief(cause)
    return ModelInvalid(
        f"{source.name} is not a usable GGUF model: {cause}.",
        hint=hint or _AGAIN,
        path=source.name,
        reason=cause,
    )


def _read(source: ByteSource, cursor: Cursor, strings: Collection[str]) -> Header:
    if cursor.take(4) != b"GGUF":
        raise _invalid(source, "it does not begin with GGUF")
    version = _uint(cursor, _U32)
    if version & 0xFFFF == 0 and version:
        raise _invalid(
            source,
            "it is big endian",
            "Download the little-endian file; most repositories have only that.",
        )
    if version not in (2, 3):
        raise _invalid(
            source,
            f"its format version is {version}; versions 2 and 3 are supported",
            "Download a current conversion of the model.",
        )
    tensor_count = _uint(cursor, _U64)
    key_count = _uint(cursor, _U64)
    _bounded(source, "tensors", tensor_count, min(MAX_TENSORS, cursor.remaining // 24))
    _bounded(source, "metadata keys", key_count, min(MAX_KEYS, cursor.remaining // 13))
    metadata, entries = _metadata(source, cursor, key_count, strings)
    alignment = metadata.get("general.alignment", 32)
    if (
        not isinstance(alignment, int)
        or not 0 < alignment <= 1 << 20
        or alignment & (alignment - 1)
    ):
        raise _invalid(source, f"its alignment is {alignment!r}, not a power of two")
    tensors = _tensors(source, cursor, tensor_count)
    start = -(-cursor.position // alignment) * alignment
    return Header(
        name=source.name,
        version=version,
        metadata=metadata,
        tensors=_placed(source, tensors, start, alignment),
        data_offset=start,
        file_bytes=source.size,
        entries=entries,
    )


def _uint(cursor: Cursor, format_: struct.Struct) -> int:
    return int(cursor.value(format_))


def _bounded(source: ByteSource, noun: str, count: int, limit: int) -> None:
    if count > limit:
        raise _invalid(source, f"it claims {count:,} {noun}; at most {limit:,} are possible")


def _string(source: ByteSource, cursor: Cursor, max_length: int, subject: str) -> str:
    length = _uint(cursor, _U64)
    if length > max_length:
        raise _invalid(
            source, f"{subject} claims {length:,} bytes; at most {max_length:,} are allowed"
        )
    return cursor.take(length).decode("utf-8", "replace")


def _metadata(
    source: ByteSource, cursor: Cursor, count: int, strings: Collection[str]
) -> tuple[dict[str, Value], dict[str, tuple[int, int]]]:
    """Return the values, and the bytes that each entry takes in the file."""
    metadata: dict[str, Value] = {}
    entries: dict[str, tuple[int, int]] = {}
    strings_left = MAX_STRINGS
    for number in range(count):
        start = cursor.position
        key = _string(source, cursor, MAX_KEY_BYTES, f"the name of metadata key {number + 1}")
        if not key or key in metadata:
            raise _invalid(
                source, f"metadata key {number + 1} is {'repeated' if key else 'empty'}: {key!r}"
            )
        kind = _uint(cursor, _U32)
        if kind == _STRING:
            metadata[key] = _string(source, cursor, MAX_STRING_BYTES, key)
        elif kind == _ARRAY:
            metadata[key] = array = _array(source, cursor, key, strings_left, keep=key in strings)
            if array.values is None or key in strings:
                strings_left -= array.length
        elif kind in _SCALARS:
            metadata[key] = cursor.value(_SCALARS[kind])
        else:
            raise _invalid(source, f"{key} has the unknown type {kind}")
        entries[key] = (start, cursor.position)
    return metadata, entries


def _array(source: ByteSource, cursor: Cursor, key: str, strings_left: int, *, keep: bool) -> Array:
    kind = _uint(cursor, _U32)
    length = _uint(cursor, _U64)
    if kind == _STRING:
        _bounded(source, f"strings in {key}", length, min(strings_left, cursor.remaining // 8))
        if keep:
            return Array(length, tuple(_strings(source, cursor, key, length)))
        cursor.skip_strings(length)
        return Array(length)
    if kind not in _SCALARS:
        raise _invalid(
            source, f"{key} is an array of {'arrays' if kind == _ARRAY else f'type {kind}'}"
        )
    format_ = _SCALARS[kind]
    _bounded(source, f"values in {key}", length, cursor.remaining // format_.size)
    if length > MAX_STORED_ELEMENTS and not keep:
        cursor.skip(length * format_.size)
        return Array(length)
    values = struct.unpack(f"<{length}{format_.format[1:]}", cursor.take(length * format_.size))
    return Array(length, values)


def _strings(source: ByteSource, cursor: Cursor, key: str, count: int) -> Iterator[str]:
    while count:
        values = cursor.strings(count, MAX_STRING_BYTES)
        yield from (value.decode("utf-8", "replace") for value in values)
        count -= len(values)
        if count:
            # The window ends inside the next string, or the string is too long.
            yield _string(source, cursor, MAX_STRING_BYTES, key)
            count -= 1


def _tensors(source: ByteSource, cursor: Cursor, count: int) -> list[GgufTensor]:
    tensors: list[GgufTensor] = []
    names: set[str] = set()
    for number in range(count):
        name = _string(source, cursor, MAX_TENSOR_NAME_BYTES, f"the name of tensor {number + 1}")
        if name in names:
            raise _invalid(source, f"tensor {name} occurs twice")
        names.add(name)
        dimensions = _uint(cursor, _U32)
        _bounded(source, f"dimensions of {name}", dimensions, 4)
        shape = tuple(_uint(cursor, _U64) for _ in range(dimensions)) or (1,)
        code = _uint(cursor, _U32)
        offset = _uint(cursor, _U64)
        format_ = NUMBER_FORMATS.get(code)
        if format_ is None:
            raise _invalid(
                source,
                f"tensor {name} has the unknown number format {code}",
                "The file may be newer than this localchat, or use a format that was withdrawn.",
            )
        tensor = GgufTensor(name, shape, format_, offset, 0)
        if not 0 < tensor.elements < 1 << 60 or shape[0] % format_.block:
            raise _invalid(source, f"tensor {name} has the shape {shape} in {format_.name}")
        tensors.append(tensor._replace(size_bytes=stored_bytes(format_, tensor.elements)))
    return tensors


def _placed(
    source: ByteSource, tensors: list[GgufTensor], start: int, alignment: int
) -> tuple[GgufTensor, ...]:
    """Return the tensors with offsets from the start of the file.

    They must be in order, aligned, without holes or overlaps, and inside the file.
    """
    expected = 0
    placed = []
    for tensor in tensors:
        if tensor.offset != expected:
            raise _invalid(
                source,
                f"tensor {tensor.name} starts at byte {tensor.offset:,} instead of {expected:,}",
            )
        end = start + expected + tensor.size_bytes
        if end > source.size:
            raise _invalid(
                source,
                f"tensor {tensor.name} ends at byte {end:,}, after the end of the file ({source.size:,})",
            )
        placed.append(tensor._replace(offset=start + expected))
        expected += -(-tensor.size_bytes // alignment) * alignment
    return tuple(placed)


def has_gguf_magic(path: Path) -> bool:
    """Return whether a file starts like a GGUF file. False for pipes, and if it is unreadable."""
    try:
        # Opening a pipe would wait until somebody writes to it.
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except (OSError, ValueError):
        return False
