"""Published shapes of the catalogue's models: memory verdicts without the file and without a network.

`shapes.toml` holds the dimensions of each decoder. This module derives the tensors of its GGUF files. The
tensors of a layer follow llama.cpp (src/models/), and so does the mix of number formats (src/llama-
quant.cpp): half of the layers keep finer values and down projections, the output is finer than the rest, and
rows that are no multiple of 256 use the next format that divides them. Sizes come within a few percent of the
real files.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from localchat.model_files.architecture import LayerShape, ModelShape, Weight, sliding_layers
from localchat.model_files.ggml_types import (
    NUMBER_FORMATS,
    keeps_finer_formats,
    stored_bytes,
)
from localchat.models.catalog import CatalogEntry
from localchat.models.names import Reference
from localchat.models.quantizations import DEFAULT_QUANTIZATION, canonical

_SHAPES: Final = "shapes.toml"
_Count = Annotated[int, Meta(ge=1)]


class Latent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Widths of multi-head latent attention."""

    query_rank: _Count
    kv_rank: _Count
    rope: _Count
    plain: _Count
    """Columns of a query head without positions."""
    value: _Count


class PublishedShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dimensions of a decoder as its makers publish them: one table of shapes.toml.

    Size: one field per dimension that any catalogue model has. 0 means that the model lacks the part.
    """

    models: tuple[str, ...]
    """Catalogue names with this shape."""
    architecture: str
    layers: _Count
    embedding: _Count
    feed: _Count
    """Inner width of the feed-forward part, or of one expert."""
    heads: _Count
    kv_heads: _Count
    vocabulary: _Count
    head_width: int = 0
    tied: bool = False
    window: int = 0
    """Tokens that a sliding-window layer sees."""
    experts: int = 0
    experts_used: int = 0
    shared_feed: int = 0
    """Inner width of the feed-forward part that every token takes beside the experts."""
    dense_layers: int = 0
    """Leading layers without experts, in a model with experts."""
    dense_feed: int = 0
    """Inner width of these layers."""
    gated: bool = False
    """Queries carry a gate of their own width (Qwen3-Next and later)."""
    period: int = 0
    """Every n-th layer attends to everything. 0: the architecture's own period."""
    attending: tuple[int, ...] = ()
    """Attention layers among recurrent layers without a period."""
    inner: int = 0
    """Width of a recurrent layer."""
    states: int = 0
    """Numbers of state per column of that width."""
    groups: int = 0
    """Key heads of a recurrent layer."""
    state_heads: int = 0
    wide_head: int = 0
    """Columns of a head in layers that attend to everything, if they differ (Gemma 4)."""
    wide_kv_heads: int = 0
    values_are_keys: bool = False
    """Layers that attend to everything have no value matrix."""
    kv_layers: int = 0
    """Leading layers with their own keys and values, if later layers reuse them."""
    late_feed: int = 0
    """Inner width of the layers that reuse keys and values, if it differs."""
    layer_embedding: int = 0
    """Width of an additional embedding per layer, looked up by token."""
    latent: Latent | None = None
    attention_format: str = ""
    """Number format of attention and states in the published 4-bit files. Empty: the usual mix."""

    @property
    def head(self) -> int:
        """Columns of one head."""
        return self.head_width or self.embedding // self.heads

    @property
    def mixed(self) -> int:
        """Columns that a recurrent layer convolves."""
        return self.inner + 2 * self.groups * self.states

    def attends(self, layer: int) -> bool:
        """Return True if a layer of a recurrent model has attention."""
        if self.attending:
            return layer in self.attending
        return (layer + 1) % self.period == 0

    def reuses_kv(self, layer: int) -> bool:
        """Return True if a layer has no keys and values of its own."""
        return 0 < self.kv_layers <= layer


@cache
def read_published_shapes() -> Mapping[str, PublishedShape]:
    """Return all shapes by catalogue name."""
    from tomllib import loads

    table = loads(Path(__file__).with_name(_SHAPES).read_text(encoding="utf-8"))
    shapes = [msgspec.convert(body, PublishedShape) for body in table.values()]
    return {name: shape for shape in shapes for name in shape.models}


def published_model(reference: Reference) -> ModelShape | None:
    """Return the shape of the GGUF file behind a catalogue name. None for other names and formats."""
    entry = reference.entry
    if entry is None or reference.format != "gguf":
        return None
    shape = read_published_shapes().get(entry.name)
    if shape is None:
        return None
    return gguf_shape(entry, shape, reference.quantization or DEFAULT_QUANTIZATION)


def published_names(reference: Reference) -> tuple[str, ...]:
    """Return the names of the same model in every quantization that `published_model` supports."""
    entry = reference.entry
    if entry is None or entry.name not in read_published_shapes():
        return ()
    offers = dict.fromkeys(
        (source.format, name) for source in entry.sources for name in source.quantizations
    )
    return tuple(
        f"{entry.name}-{(name or '').lower()}"
        for format_, name in offers
        if published_model(reference._replace(format=format_, quantization=name))
    )


_KERNEL = 4
"""Width of the convolution in a recurrent layer."""


class Matrix(NamedTuple):
    """A matrix or vector of a layer."""

    kind: Literal["attention", "values", "feed", "down", "plain"]
    """Selects the number format. `plain` is never quantized."""
    shape: tuple[int, ...]
    """Fastest dimension first."""
    experts: bool = False


def layer_shapes(published: PublishedShape) -> tuple[tuple[LayerShape, ...], int]:
    """Return the keys, values and states of every layer, and the sliding window (0: no layer slides)."""
    sliding, window = sliding_layers(
        published.architecture,
        published.layers,
        published.window or None,
        published.period or None,
    )
    layers = tuple(
        _layer_shape(published, layer, slides=sliding[layer]) for layer in range(published.layers)
    )
    return layers, window if any(sliding) else 0


def _layer_shape(published: PublishedShape, layer: int, *, slides: bool) -> LayerShape:
    if published.inner and not published.attends(layer):
        tail = (_KERNEL - 1) * published.mixed
        return LayerShape(0, 0, state=tail + published.states * published.inner)
    if published.reuses_kv(layer):
        return LayerShape(0, 0, slides)
    if published.latent is not None:
        return LayerShape(published.latent.kv_rank + published.latent.rope, 0)
    width = published.head * published.kv_heads
    if published.wide_head and not slides:
        width = published.wide_head * published.wide_kv_heads
    return LayerShape(width, width, slides)


def layer_matrices(published: PublishedShape, layer: LayerShape, number: int) -> Iterator[Matrix]:
    """Yield the matrices and vectors of one layer."""
    width = published.embedding
    if layer.state:
        yield from _recurrent_matrices(published)
    elif published.latent is not None:
        yield from _latent_matrices(published, published.latent)
    else:
        yield from _attention_matrices(published, layer)
    for _ in ("attention norm", "feed-forward norm"):
        yield Matrix("plain", (width,))
    if published.layer_embedding:
        yield Matrix("feed", (width, published.layer_embedding))
        yield Matrix("feed", (published.layer_embedding, width))
    yield from _feed_forward_matrices(published, number)


def _attention_matrices(published: PublishedShape, layer: LayerShape) -> Iterator[Matrix]:
    is_wide = bool(published.wide_head) and not layer.sliding
    head = published.wide_head if is_wide else published.head
    width = published.embedding
    queries = published.heads * head
    yield Matrix("attention", (width, queries * 2 if published.gated else queries))
    # Layers that reuse keys and values still have matrices for them.
    keys = head * (published.wide_kv_heads if is_wide else published.kv_heads)
    yield Matrix("attention", (width, keys))
    if not (is_wide and published.values_are_keys):
        yield Matrix("values", (width, keys))
    yield Matrix("attention", (queries, width))


def _latent_matrices(published: PublishedShape, latent: Latent) -> Iterator[Matrix]:
    width = published.embedding
    heads = published.heads
    yield Matrix("attention", (width, latent.query_rank))
    yield Matrix("attention", (latent.query_rank, heads * (latent.plain + latent.rope)))
    yield Matrix("attention", (width, latent.kv_rank + latent.rope))
    yield Matrix("attention", (latent.plain, latent.kv_rank, heads))
    yield Matrix("values", (latent.kv_rank, latent.value, heads))
    yield Matrix("attention", (heads * latent.value, width))


def _recurrent_matrices(published: PublishedShape) -> Iterator[Matrix]:
    """Yield the matrices of a gated delta net or Mamba 2: input, gate, heads, convolution, output."""
    width = published.embedding
    yield Matrix("attention", (width, published.mixed))
    yield Matrix("attention", (width, published.inner))
    # Delta nets have a decay and a strength for each head, Mamba 2 a time step.
    for _ in range(2 if published.gated else 1):
        yield Matrix("attention", (width, published.state_heads))
    yield Matrix("plain", (_KERNEL, published.mixed))
    yield Matrix("attention", (published.inner, width))


def _feed_forward_matrices(published: PublishedShape, layer: int) -> Iterator[Matrix]:
    width = published.embedding
    dense = published.shared_feed
    has_experts = bool(published.experts) and layer >= published.dense_layers
    if published.experts and not has_experts:
        dense = published.dense_feed
    elif not published.experts:
        dense = published.feed
        if published.reuses_kv(layer) and published.late_feed:
            dense = published.late_feed
    if has_experts:
        inner = published.feed
        experts = published.experts
        yield Matrix("plain", (width, experts))
        for _ in ("gate", "up"):
            yield Matrix("feed", (width, inner, experts), experts=True)
        yield Matrix("down", (inner, width, experts), experts=True)
    if dense:
        for _ in ("gate", "up"):
            yield Matrix("feed", (width, dense))
        yield Matrix("down", (dense, width))


_FORMATS: Final = {format_.name: format_ for format_ in NUMBER_FORMATS.values()}


class Mix(NamedTuple):
    """Number formats of a quantization."""

    base: str
    """Format of most matrices."""
    fine: str
    """Format of values and down projections in the finer half of the layers."""
    output: str
    experts: str = ""


MIXES: Final = {
    "Q2_K": Mix("Q2_K", "Q3_K", "Q6_K"),
    "Q3_K_M": Mix("Q3_K", "Q5_K", "Q6_K"),
    "Q4_0": Mix("Q4_0", "Q4_0", "Q6_K"),
    "IQ4_XS": Mix("IQ4_XS", "Q5_K", "Q6_K"),
    "Q4_K_M": Mix("Q4_K", "Q6_K", "Q6_K"),
    "UD_Q4_K_XL": Mix("Q4_K", "Q6_K", "Q6_K"),
    "Q5_0": Mix("Q5_0", "Q5_0", "Q6_K"),
    "Q5_K_M": Mix("Q5_K", "Q6_K", "Q6_K"),
    "Q6_K": Mix("Q6_K", "Q6_K", "Q6_K"),
    "Q8_0": Mix("Q8_0", "Q8_0", "Q8_0"),
    "F16": Mix("F16", "F16", "F16"),
    "MXFP4": Mix("Q8_0", "Q8_0", "Q8_0", experts="MXFP4"),
}
_FOUR_BITS: Final = frozenset({"Q4_K", "Q4_0"})
_FORMAT_OF_ODD_ROWS: Final = {
    "Q2_K": "IQ4_NL",
    "Q3_K": "IQ4_NL",
    "IQ4_XS": "IQ4_NL",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
"""Format for rows that the blocks of the key do not divide."""


def gguf_shape(
    entry: CatalogEntry, published: PublishedShape, quantization: str
) -> ModelShape | None:
    """Return the shape of a GGUF file with the catalogue's context. None for an unknown quantization."""
    mix = MIXES.get(canonical(quantization))
    if mix is None:
        return None
    layers, window = layer_shapes(published)
    weights = tuple(_weights(published, mix, layers))
    other_feed = max(published.shared_feed, published.dense_feed, published.late_feed)
    return ModelShape(
        name=f"{entry.name}-{quantization.lower()}",
        architecture=published.architecture,
        layers=layers,
        all_layers=published.layers,
        embedding=published.embedding,
        heads=published.heads,
        head_width=layers[0].keys if published.latent else max(published.head, published.wide_head),
        feed_forward=max(published.feed * max(published.experts_used, 1), other_feed),
        vocab_size=published.vocabulary,
        context_train=entry.context_tokens,
        weights=weights,
        quantization=canonical(quantization),
        file_bytes=sum(weight.size_bytes for weight in weights),
        window=window,
        experts=published.experts,
        experts_used=published.experts_used,
        inner=published.inner,
        pooling=_pooling(entry),
    )


def _pooling(entry: CatalogEntry) -> str:
    # The catalogue's embedding models are decoders, which return the vector of the last token.
    if "embeddings" in entry.uses:
        return "last"
    return ""


def _weights(
    published: PublishedShape, mix: Mix, layers: tuple[LayerShape, ...]
) -> Iterator[Weight]:
    embedding = (published.embedding, published.vocabulary)
    yield _weight("embedding", embedding, mix.output if published.tied else mix.base)
    if not published.tied:
        yield _weight("output", embedding, mix.output)
    if published.layer_embedding:
        rows = published.layer_embedding * published.layers
        yield _weight("lookup", (rows, published.vocabulary), mix.output)
        yield _weight("other", (published.embedding, rows), mix.base)
    attention = ""
    if mix.base in _FOUR_BITS:
        attention = published.attention_format
    for number, layer in enumerate(layers):
        fine = mix.fine if keeps_finer_formats(number, published.layers) else mix.base
        formats = {
            "attention": attention or mix.base,
            "values": attention or fine,
            "feed": mix.base,
            "down": fine,
            "plain": "F32",
        }
        for matrix in layer_matrices(published, layer, number):
            format_name = formats[matrix.kind]
            if matrix.experts and mix.experts:
                format_name = mix.experts
            yield _weight("layer", matrix.shape, format_name, number, routed=matrix.experts)


def _weight(
    part: Literal["embedding", "output", "layer", "lookup", "other"],
    shape: tuple[int, ...],
    format_name: str,
    layer: int = -1,
    *,
    routed: bool = False,
) -> Weight:
    format_ = _FORMATS[format_name]
    if shape[0] % format_.block and format_name in _FORMAT_OF_ODD_ROWS:
        format_ = _FORMATS[_FORMAT_OF_ODD_ROWS[format_name]]
    return Weight(part, format_, shape, stored_bytes(format_, prod(shape)), layer, routed)
