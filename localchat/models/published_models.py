"""Shapes of the catalogue's models, for a verdict on memory without the file and without a network.

The mix of number formats follows llama.cpp's own (src/llama-quant.cpp): half of the layers keep finer values
and down projections, the output is finer than the rest, and rows that are no multiple of 256 take the next
format that divides them. Sizes come within a few percent of the real files.
"""

from collections.abc import Iterator
from math import prod
from typing import Final, Literal, NamedTuple

from localchat.model_files.architecture import LayerShape, ModelShape, Weight
from localchat.model_files.checkpoint import ModelSummary
from localchat.model_files.ggml_types import NUMBER_FORMATS, NumberFormat, stored_bytes
from localchat.models.catalog import CatalogEntry
from localchat.models.names import Reference
from localchat.models.published_checkpoint import published_checkpoint
from localchat.models.published_layers import layer_matrices, layer_shapes
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
    "UD_Q4_K_XL": Mix("Q4_K", "Q6_K", "Q6_K"),
    "Q5_0": Mix("Q5_0", "Q5_0", "Q6_K"),
    "Q5_K_M": Mix("Q5_K", "Q6_K", "Q6_K"),
    "Q6_K": Mix("Q6_K", "Q6_K", "Q6_K"),
    "Q8_0": Mix("Q8_0", "Q8_0", "Q8_0"),
    "F16": Mix("F16", "F16", "F16"),
    "MXFP4": Mix("Q8_0", "Q8_0", "Q8_0", experts="MXFP4"),
}
_FOUR_BITS: Final = frozenset({"Q4_K", "Q4_0"})
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
    layers, window = layer_shapes(published)
    weights = tuple(_weights(published, mix, layers))
    shared = max(published.shared_feed, published.dense_feed, published.late_feed)
    return ModelShape(
        name=f"{entry.name}-{quantization.lower()}",
        architecture=published.architecture,
        layers=layers,
        all_layers=published.layers,
        embedding=published.embedding,
        heads=published.heads,
        head_width=layers[0].keys if published.latent else max(published.head, published.wide_head),
        feed_forward=max(published.feed * max(published.experts_used, 1), shared),
        vocab_size=published.vocabulary,
        context_train=entry.context_tokens,
        weights=weights,
        quantization=canonical(quantization),
        file_bytes=sum(weight.size_bytes for weight in weights),
        window=window,
        experts=published.experts,
        experts_used=published.experts_used,
        inner=published.inner,
        # Decoders of the catalogue that embed take the vector of the last token.
        pooling=_pooling(entry),
    )


def _pooling(entry: CatalogEntry) -> str:
    if "reranking" in entry.uses:
        return "rank"
    return "last" if "embeddings" in entry.uses else ""


def _weights(
    published: PublishedShape, mix: Mix, layers: tuple[LayerShape, ...]
) -> Iterator[Weight]:
    embedding = (published.embedding, published.vocabulary)
    yield _matrix("embedding", embedding, mix.output if published.tied else mix.base)
    if not published.tied:
        yield _matrix("output", embedding, mix.output)
    if published.layer_embedding:
        rows = published.layer_embedding * published.layers
        yield _matrix("lookup", (rows, published.vocabulary), mix.output)
        yield _matrix("other", (published.embedding, rows), mix.base)
    attention = published.attention_format if mix.base in _FOUR_BITS else ""
    for number, layer in enumerate(layers):
        finer = mix.fine if _is_fine(number, published.layers) else mix.base
        for matrix in layer_matrices(published, layer, number):
            form = {"attention": attention or mix.base, "values": attention or finer}.get(
                matrix.kind, mix.base
            )
            if matrix.kind == "down":
                form = finer
            elif matrix.kind == "plain":
                form = "F32"
            if matrix.experts:
                form = mix.experts or form
            yield _matrix("layer", matrix.shape, form, number, routed=matrix.experts)


def _is_fine(layer: int, layers: int) -> bool:
    """The first and last eighth, and every third between them."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _matrix(
    part: Literal["embedding", "output", "layer", "lookup", "other"],
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
