"""Writes the models for the benchmarks: the shape of a 0.5B Qwen2 with random weights and a real
vocabulary.

The mix of formats is that of its Q4_K_M file. A *random* model has the speed of a real one and writes
nonsense. A *successor* model has that speed too, and its greedy text follows one fixed cycle of tokens:
the output row of a token is the embedding of its predecessor, and what the blocks add to an embedding
is kept small.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGMLQuantizationType as Form
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from numpy.typing import NDArray

TRAINED = 32_768
CYCLE = range(1000, 100_000)
"""Ids whose text is ordinary; the cycle of a successor model goes through all of them."""
_LINE_END = 198
"""In the cycle too: an answer in a chat follows a line end, and would repeat it without a successor."""
_QUIET = 1 / 16
_SHARPNESS = 0.02
"""Of the output rows: the successor has a logit of 18, which is a probability of 0.997."""


class Shape(NamedTuple):
    """Dimensions of a Qwen2; the default is its 0.5B."""

    embedding: int = 896
    layers: int = 24
    heads: int = 14
    kv_heads: int = 2
    feed: int = 4864


SMALL = Shape()
MIDDLE = Shape(embedding=1536, layers=28, heads=12, kv_heads=2, feed=8960)
"""The 1.5B."""


class _Blocks(NamedTuple):
    """A format with random bits. scales: (first byte, value for weights of deviation 1)."""

    values: int
    size_bytes: int
    scales: tuple[tuple[int, float], ...]


_FORMS = {
    Form.Q5_0: _Blocks(32, 22, ((0, 1 / 9.23),)),
    Form.Q8_0: _Blocks(32, 34, ((0, 1 / 73.9),)),
    # The second scale multiplies the minimum that is taken off: with it the mean is zero.
    Form.Q4_K: _Blocks(256, 144, ((0, 1 / 258), (2, 7.5 / 258))),
    Form.Q6_K: _Blocks(256, 210, ((208, 1 / 1367),)),
}
_NARROW = {Form.Q4_K: Form.Q5_0, Form.Q6_K: Form.Q8_0}
"""What quantizers take where a row is no multiple of 256."""


class Models(NamedTuple):
    """Files of the two models. successors: the token that follows each token, -1 outside the cycle."""

    random: Path
    successor: Path
    successors: NDArray[np.int64]


def models(folder: Path, vocabulary: Path | None, seed: int) -> Models:
    """The models in `folder`; missing ones are written, with the vocabulary of a GGUF file.

    Raises FileNotFoundError if a model is missing and no vocabulary was given.
    """
    random, successor = folder / "random-0.5b.gguf", folder / "successor-0.5b.gguf"
    chain = successor.with_name(successor.name + ".succ.npy")
    if not (random.exists() and successor.exists() and chain.exists()):
        if vocabulary is None:
            raise FileNotFoundError(f"no models in {folder}: give --vocabulary to write them")
        folder.mkdir(parents=True, exist_ok=True)
        reader = GGUFReader(vocabulary)
        write_model(random, reader, seed)
        following = _cycle(_vocab_size(reader), seed)
        write_model(successor, reader, seed, successors=following)
        np.save(chain, following)
    return Models(random, successor, np.load(chain))


def _cycle(vocab_size: int, seed: int) -> NDArray[np.int64]:
    order = np.random.default_rng(seed + 1).permutation(np.array([_LINE_END, *CYCLE]))
    following = np.full(vocab_size, -1, np.int64)
    following[order] = np.roll(order, -1)
    return following


def _vocab_size(reader: GGUFReader) -> int:
    return len(reader.fields["tokenizer.ggml.tokens"].data)


def write_model(
    path: Path,
    reader: GGUFReader,
    seed: int,
    shape: Shape = SMALL,
    successors: NDArray[np.int64] | None = None,
    context: int = TRAINED,
) -> None:
    """Write one model with the vocabulary of `reader`. `successors` None: the output matrix is the
    embedding's (tied), and the text is nonsense.
    """
    unfinished = path.with_suffix(".part")
    writer = GGUFWriter(unfinished, "qwen2")
    writer.add_name(path.stem)
    writer.add_context_length(context)
    writer.add_embedding_length(shape.embedding)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_file_type(15)
    _copy_vocabulary(writer, reader)
    draw = np.random.default_rng(seed)
    _write_ends(writer, draw, _vocab_size(reader), shape.embedding, successors)
    for name, rows, columns, form in _matrices(shape):
        deviation = columns**-0.5 * (_QUIET if name.endswith(("_output", "ffn_down")) else 1)
        _matrix(writer, draw, f"{name}.weight", (rows, columns), form, deviation)
        if name.endswith(("_q", "_k", "_v")):
            writer.add_tensor(f"{name}.bias", np.zeros(rows, np.float32))
    for layer in range(shape.layers):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(shape.embedding, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(path)


def _copy_vocabulary(writer: GGUFWriter, reader: GGUFReader) -> None:
    for name, entry in reader.fields.items():
        if not name.startswith("tokenizer."):
            continue
        value: Any = entry.contents()
        if entry.types[0] == GGUFValueType.ARRAY:
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, value, entry.types[0])


def _write_ends(
    writer: GGUFWriter,
    draw: np.random.Generator,
    vocab_size: int,
    embedding: int,
    successors: NDArray[np.int64] | None,
) -> None:
    """Embedding and output. Rows are int8 of one scale, so that an output row can be an embedding's."""
    rows = draw.integers(-127, 128, (vocab_size, embedding), dtype=np.int8)
    _bytes_matrix(writer, "token_embd.weight", rows, 1 / 73)
    writer.add_tensor("output_norm.weight", np.ones(embedding, np.float32))
    if successors is not None:
        before = np.arange(vocab_size)
        inside = np.flatnonzero(successors >= 0)
        before[successors[inside]] = inside
        _bytes_matrix(writer, "output.weight", rows[before], _SHARPNESS / 73)


def _bytes_matrix(writer: GGUFWriter, name: str, values: NDArray[np.int8], scale: float) -> None:
    """Q8_0 of given integers."""
    rows, columns = values.shape
    blocks = np.empty((rows, columns // 32, 34), np.uint8)
    blocks[..., :2] = np.array([scale], np.float16).view(np.uint8)
    blocks[..., 2:] = values.view(np.uint8).reshape(rows, columns // 32, 32)
    writer.add_tensor(name, blocks.reshape(rows, -1), raw_dtype=Form.Q8_0)


def _matrix(
    writer: GGUFWriter,
    draw: np.random.Generator,
    name: str,
    shape: tuple[int, int],
    form: Form,
    deviation: float,
) -> None:
    """Random bits with scales that give weights of this standard deviation."""
    rows, columns = shape
    if columns % 256:
        form = _NARROW[form]
    kind = _FORMS[form]
    blocks = draw.integers(0, 256, (rows, columns // kind.values, kind.size_bytes), dtype=np.uint8)
    for place, scale in kind.scales:
        stored = np.array([scale * deviation], np.float16).view(np.uint8)
        blocks[..., place : place + 2] = stored
    writer.add_tensor(name, blocks.reshape(rows, -1), raw_dtype=form)


def _matrices(shape: Shape) -> Iterator[tuple[str, int, int, Form]]:
    """Name, rows, columns and format of each block's matrices, in the order of the file."""
    width, layers = shape.embedding, shape.layers
    narrow = shape.kv_heads * (width // shape.heads)
    for layer in range(layers):
        # The mix Q4_K_M: half of the layers have finer values and finer ways down.
        early, late = layer < layers // 8, layer >= 7 * layers // 8
        fine = Form.Q6_K if early or late or (layer - layers // 8) % 3 == 2 else Form.Q4_K
        block = f"blk.{layer}."
        yield block + "attn_q", width, width, Form.Q4_K
        yield block + "attn_k", narrow, width, Form.Q4_K
        yield block + "attn_v", narrow, width, fine
        yield block + "attn_output", width, width, Form.Q4_K
        yield block + "ffn_gate", shape.feed, width, Form.Q4_K
        yield block + "ffn_up", shape.feed, width, Form.Q4_K
        yield block + "ffn_down", width, shape.feed, fine
