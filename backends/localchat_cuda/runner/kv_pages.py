"""The KV pages of a model, and what a step says about its tokens.

Letters: T tokens of the step, S sequences, L layers, J key/value heads, D head dimension. A *page* holds
`page_tokens` positions of one sequence in one layer; a *table* lists the pages of a slot in order. Page
numbers are the same in all layers.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from localchat_cuda.kernels import rope
from localchat_cuda.kernels.attention.prefill import PrefillTileConfig
from localchat_cuda.kernels.attention.reference import AttentionBatch
from localchat_cuda.memory_plan import PAGE_TOKENS
from localchat_cuda.model_config import ModelConfig
from localchat_cuda.rope_config import Rotation


class LayerPages(NamedTuple):
    """Keys and values [pages, J, page_tokens, D] of a layer, or codes of 8 bits with exponents
    [pages, J, page_tokens, 2] (kernels/kv8.py): views."""

    k: torch.Tensor
    v: torch.Tensor
    exponents: torch.Tensor | None


class Pages:
    """The cache: one tensor [L, pages, 2, J, page_tokens, D], keys beside values of a page; coded, words of
    two codes [..., D/2] and their exponents [L, pages, J, page_tokens, 2]."""

    def __init__(
        self, config: ModelConfig, pages: int, context_tokens: int, device: torch.device,
        dtype: torch.dtype, page_tokens: int = PAGE_TOKENS, *, coded: bool = False,
    ) -> None:  # fmt: skip
        """`context_tokens`: the longest sequence, for the table of rotations. `dtype`: of the numbers; `coded`:
        they are kept in 8 bits."""
        self.page_tokens, self.device, self.dtype = page_tokens, device, dtype
        heads, width = config.key_heads, config.head_dim
        self.pool = torch.zeros(
            config.layers, pages, 2, heads, page_tokens, width // 2 if coded else width,
            device=device, dtype=torch.int16 if coded else dtype,
        )  # fmt: skip
        self.exponents: torch.Tensor | None = None
        if coded:
            self.exponents = torch.zeros(
                config.layers, pages, heads, page_tokens, 2, device=device, dtype=torch.uint8
            )
        self.angles = self._table(config, config.rotation, context_tokens)
        other = config.windowed_rotation
        self._windowed = {n for n in range(config.layers) if config.window(n)} if other else set()
        self._other = self._table(config, other, context_tokens) if other else self.angles

    def _table(self, config: ModelConfig, rotation: Rotation, context_tokens: int) -> torch.Tensor:
        d = config.head_dim
        radians = rotation.radians(d, context_tokens)
        return rope.turned(context_tokens, d, radians, self.device, rotation.magnitude)

    def angles_of(self, layer: int) -> torch.Tensor:
        """The table of rotations of a layer."""
        return self._other if layer in self._windowed else self.angles

    @property
    def bytes(self) -> int:
        """What the cache takes."""
        return self.pool.nbytes + (0 if self.exponents is None else self.exponents.nbytes)

    def layer(self, number: int) -> LayerPages:
        """The keys and values of a layer."""
        pool, exponents = self.pool[number], self.exponents
        return LayerPages(pool[:, 0], pool[:, 1], None if exponents is None else exponents[number])

    def copy(self, source: int, target: int, tokens: int) -> None:
        """The first `tokens` positions of a page, in all layers."""
        self.pool[:, target, :, :, :tokens] = self.pool[:, source, :, :, :tokens]
        if self.exponents is not None:
            self.exponents[:, target, :, :tokens] = self.exponents[:, source, :, :tokens]


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Sequences with at most 16 new tokens; they stand first. tokens: rows of the step that this part
    fills. widest: most new tokens of one sequence. splits: ranges that each history is cut into."""

    batch: AttentionBatch
    tokens: int
    widest: int
    splits: int


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Sequences with more new tokens. tiles: attention_many.tiles_of the cut's rows. decoded: pages of codes
    that are made plain first, kv8_plain's sources; None: pages are read as they are."""

    batch: AttentionBatch
    tiles: torch.Tensor
    cut: PrefillTileConfig
    decoded: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """A step on the device, int32: ids, positions and slots [T]; tables [slots, width]; wanted [P] int64,
    the tokens whose last state is wanted (None: of all). batch: all sequences, of which few and many are
    the two kinds (None: none of that kind)."""

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor
    wanted: torch.Tensor | None
    batch: AttentionBatch
    few: DecodeBatch | None
    many: PrefillBatch | None
