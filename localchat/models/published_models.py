"""Shapes of the catalogue's models, for a verdict on memory without the file and without a network.

The mix of number formats follows llama.cpp's own (src/llama-quant.cpp): half of the layers keep finer values
and down projections, the output is finer than the rest, and rows that are no multiple of 256 take the next
format that divides them. Sizes come within a few percent of the real files.
"""

from collections.abc import Iterator
from math import prod
from typing import Final, Literal, NamedTuple

from localchat.model_files.architecture import LayerShape, ModelShape, Weight, sliding_layers
from localchat.model_files.checkpoint import ModelSummary
from localchat.model_files.ggml_types import NUMBER_FORMATS, NumberFormat, stored_bytes
from localchat.models.catalog import CatalogEntry
from localchat.models.names import Reference
from localchat.models.published_checkpoint import published_checkpoint
from localchat.models.published_shapes import PublishedShape, read_published_shapes
from localchat.models.quantizations import DEFAULT_QUANTIZATION, canonical

_FORMATS: Final = {form.name: form for form in NUMBER_FORMATS.values()}


class Mix(NamedTuple):
    """Number formats of a quantization."""

    base: str
    """Of most matrices."""
    fine: str
    """Of values and down projections in the finer half of the layers."""
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


def published_model(reference: Reference) -> ModelSummary | None:
    """The shape or the checkpoint that a name of the catalogue means; None for other names and formats."""
    shape = (
        read_published_shapes().get(reference.entry.name) if reference.entry is not None else None
    )
    if reference.entry is None or shape is None:
        return None
    build = gguf_shape if reference.format == "gguf" else published_checkpoint
    return build(reference.entry, shape, reference.quantization or DEFAULT_QUANTIZATION)


def published_names(reference: Reference) -> tuple[str, ...]:
    """Names of the same model that `published_model` knows, by the quantizations on offer."""
    entry = reference.entry
    if entry is None or entry.name not in read_published_shapes():
        return ()
    offered = [(one.format, name) for one in entry.sources for name in one.quantizations]
    tried = [
        reference._replace(format=form, quantization=name) for form, name in dict.fromkeys(offered)
    ]
    return tuple(
        f"{entry.name}-{(one.quantization or '').lower()}" for one in tried if published_model(one)
    )


def gguf_shape(
    entry: CatalogEntry, published: PublishedShape, quantization: str
) -> ModelShape | None:
    """The shape of a GGUF file of this model; None for a quantization whose mix is not known here.

    The context is the catalogue's.
    """
    mix = MIXES.get(canonical(quantization))
    if mix is None:
        return None
    weights = tuple(_weights(published, mix))
    width = published.head * published.kv_heads
    sliding, window = sliding_layers(
        published.architecture, published.layers, published.window or None
    )
    return ModelShape(
        name=f"{entry.name}-{quantization.lower()}",
        architecture=published.architecture,
        layers=tuple(LayerShape(width, width, slides) for slides in sliding),
        all_layers=published.layers,
        embedding=published.embedding,
        heads=published.heads,
        head_width=published.head,
        feed_forward=published.feed * max(published.experts_used, 1),
        vocab_size=published.vocabulary,
        context_train=entry.context_tokens,
        weights=weights,
        quantization=canonical(quantization),
        file_bytes=sum(weight.size_bytes for weight in weights),
        window=window if any(sliding) else 0,
        experts=published.experts,
        experts_used=published.experts_used,
        # Decoders of the catalogue that embed take the vector of the last token.
        pooling="last" if "embeddings" in entry.uses else "",
    )


def _weights(published: PublishedShape, mix: Mix) -> Iterator[Weight]:
    embedding = (published.embedding, published.vocabulary)
    yield _matrix("embedding", embedding, mix.output if published.tied else mix.base)
    if not published.tied:
        yield _matrix("output", embedding, mix.output)
    for layer in range(published.layers):
        finer = mix.fine if _is_fine(layer, published.layers) else mix.base
        yield from _attention(published, mix.base, finer, layer)
        yield from _feed_forward(published, mix, finer, layer)


def _attention(published: PublishedShape, base: str, finer: str, layer: int) -> Iterator[Weight]:
    width = published.embedding
    queries, keys = published.heads * published.head, published.kv_heads * published.head
    yield _matrix("layer", (width, queries), base, layer)
    yield _matrix("layer", (width, keys), base, layer)
    yield _matrix("layer", (width, keys), finer, layer)
    yield _matrix("layer", (queries, width), base, layer)
    for _ in ("attention norm", "feed-forward norm"):
        yield _matrix("layer", (width,), "F32", layer)


def _feed_forward(published: PublishedShape, mix: Mix, finer: str, layer: int) -> Iterator[Weight]:
    width, inner, experts = published.embedding, published.feed, published.experts
    stack = (experts,) if experts else ()
    base, down = mix.experts or mix.base, mix.experts or finer
    if experts:
        yield _matrix("layer", (width, experts), "F32", layer)
    for sides, form in (((width, inner), base), ((width, inner), base), ((inner, width), down)):
        yield _matrix("layer", (*sides, *stack), form, layer, routed=bool(experts))


def _is_fine(layer: int, layers: int) -> bool:
    """The first and last eighth, and every third between them."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _matrix(
    part: Literal["embedding", "output", "layer"],
    shape: tuple[int, ...],
    form_name: str,
    layer: int = -1,
    *,
    routed: bool = False,
) -> Weight:
    form: NumberFormat = _FORMATS[form_name]
    if shape[0] % form.block and form_name in _WHERE_ROWS_ARE_ODD:
        form = _FORMATS[_WHERE_ROWS_ARE_ODD[form_name]]
    return Weight(part, form, shape, stored_bytes(form, prod(shape)), layer, routed)
