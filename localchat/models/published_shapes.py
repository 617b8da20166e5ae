"""Table of the published shapes of the catalogue's models (shapes.toml)."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

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
    """A decoder's shape, as its makers publish it; one table of shapes.toml."""

    models: tuple[str, ...]
    """Names of the catalogue that have it."""
    architecture: str
    layers: _Count
    embedding: _Count
    feed: _Count
    """Inner width of the feed-forward part; of one expert, where there are experts."""
    heads: _Count
    kv_heads: _Count
    vocabulary: _Count
    head_width: int = 0
    tied: bool = False
    window: int = 0
    """Of its sliding-window layers; 0: none."""
    experts: int = 0
    """0: none."""
    experts_used: int = 0
    shared_feed: int = 0
    """Inner width of the part beside the experts that every token takes."""
    dense_layers: int = 0
    """Leading layers without experts, where there are experts."""
    dense_feed: int = 0
    """Inner width of those."""
    gated: bool = False
    """Queries bring a gate of their own width (Qwen3-Next and later)."""
    period: int = 0
    """Every n-th layer sees everything, the others a window or keep a state; 0: as the architecture has it."""
    attending: tuple[int, ...] = ()
    """Layers that attend beside running states, where no period says it."""
    inner: int = 0
    """Width of a layer with a running state; 0: there are none."""
    states: int = 0
    """Numbers of state to each of those."""
    groups: int = 0
    """Key heads of such a layer."""
    state_heads: int = 0
    wide_head: int = 0
    """Columns of a head in layers that see everything, where those differ (Gemma 4)."""
    wide_kv_heads: int = 0
    values_are_keys: bool = False
    """Layers that see everything have no value matrix."""
    kv_layers: int = 0
    """Leading layers with keys and values of their own, where later ones reuse them."""
    late_feed: int = 0
    """Inner width of those that reuse them, where it differs."""
    layer_embedding: int = 0
    """Width of an embedding of its own for each layer, looked up by token."""
    latent: Latent | None = None
    """Attention over one compressed row per token."""
    attention_format: str = ""
    """Number format of attention and running states in the published four-bit files; empty: the usual mix."""

    @property
    def head(self) -> int:
        """Columns of one head."""
        return self.head_width or self.embedding // self.heads


@cache
def read_published_shapes() -> Mapping[str, PublishedShape]:
    """All shapes, by the catalogue's names."""
    from tomllib import loads

    table = loads(Path(__file__).with_name(_SHAPES).read_text(encoding="utf-8"))
    shapes = [msgspec.convert(body, PublishedShape) for body in table.values()]
    return {name: shape for shape in shapes for name in shape.models}
