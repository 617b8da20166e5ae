"""Writes synthetic GGUF models for trials: the architecture of Llama, no vocabulary.

A trial decodes with them, so llama.cpp chooses kernels, copies and caches as for a real model. The matrices of
the heads contain noise, so that attention scores differ as in a real model. All other matrices are a hole in
the file, which reads as zeros.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from localchat.model_files.ggml_types import NUMBER_FORMATS, stored_bytes

_ALIGNMENT: Final = 32
_VERSION: Final = 3
_TEXT = 8
_U32 = 4
_F32 = 6
"""GGUF's type codes of metadata values."""
_F32_CODE: Final = 0
_HEADS_CODE: Final = 8
_SCALE: Final = np.array([0.001], np.float16).tobytes()
"""Scale of a Q8_0 block. At a width of 1,024, attention scores differ by about twenty, as in real models."""
TOKENS: Final = 32
"""Size of the vocabulary, whose tokens have no text."""


class SyntheticModel(NamedTuple):
    """Shape of a synthetic Llama model, whose attention matrices are Q8_0."""

    layers: int
    heads: int
    kv_heads: int
    head_width: int
    width: int
    """Columns of a token."""
    feed_forward: int
    """Inner columns of the feed-forward block."""
    code: int
    """ggml's type code of the feed-forward matrices."""

    @property
    def weights_bytes(self) -> int:
        """Bytes of all layers, which each token reads."""
        return sum(
            matrix.size_bytes for matrix in _matrices(self) if matrix.name.startswith("blk.")
        )


class _Matrix(NamedTuple):
    name: str
    shape: tuple[int, ...]
    code: int

    @property
    def size_bytes(self) -> int:
        rows = 1
        if len(self.shape) > 1:
            rows = self.shape[1]
        return rows * stored_bytes(NUMBER_FORMATS[self.code], self.shape[0])


def write(path: Path, model: SyntheticModel) -> None:
    """Write a GGUF of this model. Raises OSError."""
    matrices = list(_matrices(model))
    values = list(_values(model))
    head = bytearray(b"GGUF" + struct.pack("<IQQ", _VERSION, len(matrices), len(values)))
    for name, value in values:
        head += _text(name) + _value(value)
    offset = 0
    offsets = []
    for matrix in matrices:
        head += _text(matrix.name) + struct.pack("<I", len(matrix.shape))
        head += struct.pack(f"<{len(matrix.shape)}Q", *matrix.shape)
        head += struct.pack("<IQ", matrix.code, offset)
        offsets.append(offset)
        offset += _aligned(matrix.size_bytes)
    start = _aligned(len(head))
    with path.open("wb") as file:
        file.write(head)
        for matrix, data_offset in zip(matrices, offsets, strict=True):
            if body := _body(matrix):
                file.seek(start + data_offset)
                file.write(body)
        file.truncate(start + offset)


def _values(model: SyntheticModel) -> Iterator[tuple[str, str | int | float]]:
    yield "general.architecture", "llama"
    yield "tokenizer.ggml.model", "none"
    numbers = {
        "vocab_size": TOKENS,
        "context_length": 1 << 20,
        "embedding_length": model.width,
        "block_count": model.layers,
        "feed_forward_length": model.feed_forward,
        "attention.head_count": model.heads,
        "attention.head_count_kv": model.kv_heads,
        "attention.key_length": model.head_width,
        "attention.value_length": model.head_width,
        "rope.dimension_count": model.head_width,
    }
    for name, number in numbers.items():
        yield f"llama.{name}", number
    yield "llama.attention.layer_norm_rms_epsilon", 1e-5


def _matrices(model: SyntheticModel) -> Iterator[_Matrix]:
    width = model.width
    feed_forward = model.feed_forward
    queries, keys = (count * model.head_width for count in (model.heads, model.kv_heads))
    yield _Matrix("token_embd.weight", (width, TOKENS), _F32_CODE)
    yield _Matrix("output_norm.weight", (width,), _F32_CODE)
    yield _Matrix("output.weight", (width, TOKENS), _F32_CODE)
    for layer in range(model.layers):
        prefix = f"blk.{layer}."
        yield _Matrix(f"{prefix}attn_norm.weight", (width,), _F32_CODE)
        yield _Matrix(f"{prefix}ffn_norm.weight", (width,), _F32_CODE)
        yield _Matrix(f"{prefix}attn_q.weight", (width, queries), _HEADS_CODE)
        yield _Matrix(f"{prefix}attn_k.weight", (width, keys), _HEADS_CODE)
        yield _Matrix(f"{prefix}attn_v.weight", (width, keys), _HEADS_CODE)
        yield _Matrix(f"{prefix}attn_output.weight", (queries, width), _HEADS_CODE)
        yield _Matrix(f"{prefix}ffn_gate.weight", (width, feed_forward), model.code)
        yield _Matrix(f"{prefix}ffn_up.weight", (width, feed_forward), model.code)
        yield _Matrix(f"{prefix}ffn_down.weight", (feed_forward, width), model.code)


def _body(matrix: _Matrix) -> bytes:
    """Return the weights. Empty for zeros."""
    draw = np.random.default_rng(1)
    if matrix.name.endswith("norm.weight"):
        return np.ones(matrix.shape, np.float32).tobytes()
    if matrix.name == "token_embd.weight":
        return draw.standard_normal(matrix.shape, np.float32).tobytes()
    if "attn_" not in matrix.name:
        return b""
    form = NUMBER_FORMATS[_HEADS_CODE]
    blocks = draw.integers(
        0, 256, (matrix.size_bytes // form.block_bytes, form.block_bytes), np.uint8
    )
    blocks[:, :2] = np.frombuffer(_SCALE, np.uint8)
    return blocks.tobytes()


def _text(text: str) -> bytes:
    body = text.encode()
    return struct.pack("<Q", len(body)) + body


def _value(value: str | float) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _TEXT) + _text(value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    return struct.pack("<If", _F32, value)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
