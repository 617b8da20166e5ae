"""Writes synthetic GGUF models for trials: the architecture of Llama, no vocabulary.

A trial decodes with them, so llama.cpp chooses kernels, copies and caches as for a real model. The matrices of
the heads contain noise, so that attention scores differ as in a real model. All other matrices are a hole in
the file, which reads as zeros.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from localchat.model_files.gguf import GgufTensor
from localchat_llamacpp.gguf_writer import ALIGNMENT, Scalar, entry, head, tensor_to_write

_HEADS_FORMAT: Final = "Q8_0"
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
    format: str
    """Number format of the feed-forward matrices."""


def write(path: Path, model: SyntheticModel) -> None:
    """Write a GGUF of this model. Raises OSError."""
    matrices = list(_matrices(model))
    with path.open("wb") as file:
        file.write(head([entry(*pair) for pair in _values(model)], matrices))
        for matrix in matrices:
            start = file.tell()
            file.write(_body(matrix))
            file.seek(start + -(-matrix.size_bytes // ALIGNMENT) * ALIGNMENT)
        file.truncate(file.tell())


def _values(model: SyntheticModel) -> Iterator[tuple[str, Scalar]]:
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


def _matrices(model: SyntheticModel) -> Iterator[GgufTensor]:
    width = model.width
    feed_forward = model.feed_forward
    queries, keys = (count * model.head_width for count in (model.heads, model.kv_heads))
    yield tensor_to_write("token_embd.weight", (width, TOKENS), "F32")
    yield tensor_to_write("output_norm.weight", (width,), "F32")
    yield tensor_to_write("output.weight", (width, TOKENS), "F32")
    for layer in range(model.layers):
        prefix = f"blk.{layer}."
        yield tensor_to_write(f"{prefix}attn_norm.weight", (width,), "F32")
        yield tensor_to_write(f"{prefix}ffn_norm.weight", (width,), "F32")
        yield tensor_to_write(f"{prefix}attn_q.weight", (width, queries), _HEADS_FORMAT)
        yield tensor_to_write(f"{prefix}attn_k.weight", (width, keys), _HEADS_FORMAT)
        yield tensor_to_write(f"{prefix}attn_v.weight", (width, keys), _HEADS_FORMAT)
        yield tensor_to_write(f"{prefix}attn_output.weight", (queries, width), _HEADS_FORMAT)
        yield tensor_to_write(f"{prefix}ffn_gate.weight", (width, feed_forward), model.format)
        yield tensor_to_write(f"{prefix}ffn_up.weight", (width, feed_forward), model.format)
        yield tensor_to_write(f"{prefix}ffn_down.weight", (feed_forward, width), model.format)


def _body(matrix: GgufTensor) -> bytes:
    """Return the weights. Empty for zeros."""
    draw = np.random.default_rng(1)
    if matrix.name.endswith("norm.weight"):
        return np.ones(matrix.shape, np.float32).tobytes()
    if matrix.name == "token_embd.weight":
        return draw.standard_normal(matrix.shape, np.float32).tobytes()
    if "attn_" not in matrix.name:
        return b""
    block_bytes = matrix.format.block_bytes
    blocks = draw.integers(0, 256, (matrix.size_bytes // block_bytes, block_bytes), np.uint8)
    blocks[:, :2] = np.frombuffer(_SCALE, np.uint8)
    return blocks.tobytes()
