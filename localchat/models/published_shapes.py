"""Table of the published shapes of the catalogue's models (shapes.toml)."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

_SHAPES: Final = "shapes.toml"
_Count = Annotated[int, Meta(ge=1)]


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
