"""Layers of the catalogue's models: keys, values and states of each, and its matrices.

Follows the tensors that llama.cpp reads for each architecture (src/models/).
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from localchat.model_files.architecture import LayerShape, sliding_layers
from localchat.models.published_shapes import Latent, PublishedShape

_KERNEL = 4
"""Of the convolution before a running state."""


class Matrix(NamedTuple):
    """One matrix or vector of a layer."""

    kind: Literal["attention", "values", "feed", "down", "plain"]
    """What decides its number format; `plain` is never quantized."""
    shape: tuple[int, ...]
    """Fastest dimension first."""
    experts: bool = False


def layer_shapes(published: PublishedShape) -> tuple[tuple[LayerShape, ...], int]:
    """Keys, values and states of every layer, and the window of those that slide; 0: none does."""
    count = published.layers
    sliding, window = sliding_layers(
        published.architecture, count, published.window or None, published.period or None
    )
    found = [_layer_shape(published, number, slides=sliding[number]) for number in range(count)]
    return tuple(found), window if any(sliding) else 0


def _layer_shape(published: PublishedShape, number: int, *, slides: bool) -> LayerShape:
    if published.inner and not _attends(published, number):
        tail = (_KERNEL - 1) * (published.inner + 2 * published.groups * published.states)
        return LayerShape(0, 0, state=tail + published.states * published.inner)
    if published.kv_layers and number >= published.kv_layers:
        return LayerShape(0, 0, slides)
    if published.latent is not None:
        return LayerShape(published.latent.kv_rank + published.latent.rope, 0)
    width = published.head * published.kv_heads
    if published.wide_head and not slides:
        width = published.wide_head * published.wide_kv_heads
    return LayerShape(width, width, slides)


def _attends(published: PublishedShape, number: int) -> bool:
    if published.attending:
        return number in published.attending
    return (number + 1) % published.period == 0


def layer_matrices(published: PublishedShape, layer: LayerShape, number: int) -> Iterator[Matrix]:
    """Matrices and vectors of one layer."""
    width = published.embedding
    if layer.state:
        yield from _running_state(published)
    elif published.latent is not None:
        yield from _latent(published, published.latent)
    else:
        yield from _attention(published, layer)
    for _ in ("attention norm", "feed-forward norm"):
        yield Matrix("plain", (width,))
    if published.layer_embedding:
        yield Matrix("feed", (width, published.layer_embedding))
        yield Matrix("feed", (published.layer_embedding, width))
    yield from _feed_forward(published, number)


def _attention(published: PublishedShape, layer: LayerShape) -> Iterator[Matrix]:
    wide = published.wide_head and not layer.sliding
    head = published.wide_head if wide else published.head
    width = published.embedding
    queries = published.heads * head
    yield Matrix("attention", (width, queries * 2 if published.gated else queries))
    # Layers that reuse keys and values have matrices for them all the same.
    keys = head * (published.wide_kv_heads if wide else published.kv_heads)
    yield Matrix("attention", (width, keys))
    if not (wide and published.values_are_keys):
        yield Matrix("values", (width, keys))
    yield Matrix("attention", (queries, width))


def _latent(published: PublishedShape, latent: Latent) -> Iterator[Matrix]:
    width = published.embedding
    heads = published.heads
    yield Matrix("attention", (width, latent.query_rank))
    yield Matrix("attention", (latent.query_rank, heads * (latent.plain + latent.rope)))
    yield Matrix("attention", (width, latent.kv_rank + latent.rope))
    yield Matrix("attention", (latent.plain, latent.kv_rank, heads))
    yield Matrix("values", (latent.kv_rank, latent.value, heads))
    yield Matrix("attention", (heads * latent.value, width))


def _running_state(published: PublishedShape) -> Iterator[Matrix]:
    """A gated delta net or Mamba 2: what goes in, the gate, the convolution, what comes out."""
    width = published.embedding
    inner = published.inner
    mixed = inner + 2 * published.groups * published.states
    yield Matrix("attention", (width, mixed))
    yield Matrix("attention", (width, inner))
    # Delta nets have a decay and a strength for each head, Mamba 2 a time step.
    for _ in range(2 if published.gated else 1):
        yield Matrix("attention", (width, published.state_heads))
    yield Matrix("plain", (_KERNEL, mixed))
    yield Matrix("attention", (inner, width))


def _feed_forward(published: PublishedShape, number: int) -> Iterator[Matrix]:
    width = published.embedding
    dense = published.shared_feed
    if not published.experts:
        reuses = published.kv_layers and number >= published.kv_layers
        dense = (published.late_feed if reuses else 0) or published.feed
    elif number < published.dense_layers:
        dense = published.dense_feed
    if published.experts and number >= published.dense_layers:
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
