"""A header drawn from a model's published shape, for a verdict without the file and without a network.

The mix of number formats follows llama.cpp's own (src/llama-quant.cpp): half of the layers keep finer values
and finer ways down, the output is finer than the rest, and rows that are no multiple of 256 take the next
format that divides them. Sizes come within a few percent of the real files.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from localchat.model_files.architecture import ModelShape, model_shape
from localchat.model_files.checkpoint import ModelSummary
from localchat.model_files.ggml_types import FILE_TYPES, NUMBER_FORMATS, NumberFormat, stored_bytes
from localchat.model_files.gguf import Array, GgufTensor, Header, Value
from localchat.models.catalog import CatalogEntry
from localchat.models.names import Reference
from localchat.models.quantizations import DEFAULT_QUANTIZATION, canonical

_SHAPES: Final = "shapes.toml"
_POOLED_LAST: Final = 3
"""llama.cpp's number for a text's vector that is the last token's, as decoders make it."""
_Count = Annotated[int, Meta(ge=1)]
_FORMS: Final = {form.name: form for form in NUMBER_FORMATS.values()}


class Mix(NamedTuple):
    """Formats of a quantization: of most matrices, of the finer half, of the output, of the experts."""

    base: str
    fine: str
    output: str
    experts: str = ""


MIXES: Final = {
    "Q2_K": Mix("Q2_K", "Q3_K", "Q6_K"),
    "Q3_K_M": Mix("Q3_K", "Q5_K", "Q6_K"),
    "Q4_0": Mix("Q4_0", "Q4_0", "Q6_K"),
    "IQ4_XS": Mix("IQ4_XS", "Q5_K", "Q6_K"),
    "Q4_K_M": Mix("Q4_K", "Q6_K", "Q6_K"),
    "Q5_0": Mix("Q5_0", "Q5_0", "Q6_K"),
    "Q5_K_M": Mix("Q5_K", "Q6_K", "Q6_K"),
    "Q6_K": Mix("Q6_K", "Q6_K", "Q6_K"),
    "Q8_0": Mix("Q8_0", "Q8_0", "Q8_0"),
    "F16": Mix("F16", "F16", "F16"),
    "MXFP4": Mix("Q8_0", "Q8_0", "Q8_0", experts="MXFP4"),
}
_WHERE_ROWS_ARE_ODD: Final = {
    "Q2_K": "IQ4_NL",
    "Q3_K": "IQ4_NL",
    "IQ4_XS": "IQ4_NL",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}


class PublishedShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder's shape. `models`: names of the catalogue that have it; `window`: of its sliding-window
    layers, 0: none; `experts`: 0: none."""

    models: tuple[str, ...]
    architecture: str
    layers: _Count
    embedding: _Count
    feed: _Count
    heads: _Count
    kv_heads: _Count
    vocabulary: _Count
    head_width: int = 0
    tied: bool = False
    window: int = 0
    experts: int = 0
    experts_used: int = 0

    @property
    def head(self) -> int:
        """Columns of one head."""
        return self.head_width or self.embedding // self.heads


@cache
def read_published_shapes() -> Mapping[str, PublishedShape]:
    """Every shape by the names of the catalogue that have it."""
    from tomllib import loads

    table = loads(Path(__file__).with_name(_SHAPES).read_text(encoding="utf-8"))
    shapes = [msgspec.convert(body, PublishedShape) for body in table.values()]
    return {name: shape for shape in shapes for name in shape.models}


def synthetic_model(reference: Reference) -> ModelSummary | None:
    """The header or the checkpoint behind a name of the catalogue; None for other names and for forms that
    cannot be drawn."""
    from localchat.models.synthetic.safetensors import synthetic_checkpoint

    shape = (
        read_published_shapes().get(reference.entry.name) if reference.entry is not None else None
    )
    if reference.entry is None or shape is None:
        return None
    draw = synthetic_header if reference.format == "gguf" else synthetic_checkpoint
    return draw(reference.entry, shape, reference.quantization or DEFAULT_QUANTIZATION)


def synthetic_names(reference: Reference) -> tuple[str, ...]:
    """Names of the same model that `synthetic_model` knows: its offered quantizations, or the usual ones."""
    entry = reference.entry
    if entry is None or entry.name not in read_published_shapes():
        return ()
    offered = [(one.format, name) for one in entry.sources for name in one.quantizations]
    tried = [
        reference._replace(format=form, quantization=name) for form, name in dict.fromkeys(offered)
    ]
    return tuple(
        f"{entry.name}-{(one.quantization or '').lower()}" for one in tried if synthetic_model(one)
    )


def synthetic_header(
    entry: CatalogEntry, shape: PublishedShape, quantization: str
) -> ModelShape | None:
    """The header that a file of this model would have, as far as memory goes; None for a quantization whose
    mix is not known here. `entry`: its context is taken."""
    mix = MIXES.get(canonical(quantization))
    if mix is None:
        return None
    tensors = tuple(_tensors(shape, mix))
    codes = {name: code for code, name in FILE_TYPES.items()}
    name = shape.architecture
    metadata: dict[str, Value] = {
        "general.architecture": name,
        "general.file_type": codes[canonical(quantization)],
        f"{name}.block_count": shape.layers,
        f"{name}.context_length": entry.context_tokens,
        f"{name}.embedding_length": shape.embedding,
        f"{name}.feed_forward_length": shape.feed,
        f"{name}.attention.head_count": shape.heads,
        f"{name}.attention.head_count_kv": shape.kv_heads,
        f"{name}.attention.key_length": shape.head,
        f"{name}.attention.value_length": shape.head,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": Array(shape.vocabulary),
    }
    if "embeddings" in entry.uses:
        metadata[f"{name}.pooling_type"] = _POOLED_LAST
    if shape.window:
        metadata[f"{name}.attention.sliding_window"] = shape.window
    if shape.experts:
        metadata[f"{name}.expert_count"] = shape.experts
        metadata[f"{name}.expert_used_count"] = shape.experts_used
        metadata[f"{name}.expert_feed_forward_length"] = shape.feed
    whole = sum(tensor.size_bytes for tensor in tensors)
    return model_shape(
        Header(f"{entry.name}-{quantization.lower()}", 3, metadata, tensors, 0, whole)
    )


def _tensors(shape: PublishedShape, mix: Mix) -> Iterator[GgufTensor]:
    width, vocabulary = shape.embedding, shape.vocabulary
    yield _matrix("token_embd", (width, vocabulary), mix.output if shape.tied else mix.base)
    if not shape.tied:
        yield _matrix("output", (width, vocabulary), mix.output)
    queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
    for layer in range(shape.layers):
        fine = mix.fine if _is_fine(layer, shape.layers) else mix.base
        at = f"blk.{layer}."
        yield _matrix(f"{at}attn_q", (width, queries), mix.base)
        yield _matrix(f"{at}attn_k", (width, keys), mix.base)
        yield _matrix(f"{at}attn_v", (width, keys), fine)
        yield _matrix(f"{at}attn_output", (queries, width), mix.base)
        yield GgufTensor(f"{at}attn_norm.weight", (width,), _FORMS["F32"], 0, 4 * width)
        yield GgufTensor(f"{at}ffn_norm.weight", (width,), _FORMS["F32"], 0, 4 * width)
        yield from _feed(shape, mix, at, fine)


def _feed(shape: PublishedShape, mix: Mix, at: str, fine: str) -> Iterator[GgufTensor]:
    width, feed = shape.embedding, shape.feed
    stack = (shape.experts,) if shape.experts else ()
    kind = "_exps" if shape.experts else ""
    base, down = mix.experts or mix.base, mix.experts or fine
    if shape.experts:
        yield _matrix(f"{at}ffn_gate_inp", (width, shape.experts), "F32")
    yield _matrix(f"{at}ffn_gate{kind}", (width, feed, *stack), base)
    yield _matrix(f"{at}ffn_up{kind}", (width, feed, *stack), base)
    yield _matrix(f"{at}ffn_down{kind}", (feed, width, *stack), down)


def _is_fine(layer: int, layers: int) -> bool:
    """The first and last eighth, and every third between them."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _matrix(name: str, shape: tuple[int, ...], form_name: str) -> GgufTensor:
    form: NumberFormat = _FORMS[form_name]
    if shape[0] % form.block and form_name in _WHERE_ROWS_ARE_ODD:
        form = _FORMS[_WHERE_ROWS_ARE_ODD[form_name]]
    count = 1
    for side in shape:
        count *= side
    return GgufTensor(f"{name}.weight", shape, form, 0, stored_bytes(form, count))
