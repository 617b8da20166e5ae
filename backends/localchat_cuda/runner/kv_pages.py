"""KV pages of a model, and the tensors of a step that its layers read.

Letters: T tokens of the step, S sequences, L layers, J key/value heads, D head dimension. A *page* holds
`page_tokens` positions of one sequence in one layer; a *block table* lists the pages of a slot in order.
Page numbers are the same in all layers; or windowed layers have their own, and block tables of their own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from localchat_cuda.config.model import PAGE_TOKENS, ModelConfig
from localchat_cuda.config.rope import Rotation
from localchat_cuda.kernels import rope
from localchat_cuda.kernels.attention.prefill import PrefillTileConfig
from localchat_cuda.kernels.attention.reference import AttentionBatch
from localchat_cuda.kernels.delta_net import Tokens
from localchat_cuda.runner.states import States

_LAYOUT = 2
"""To be raised whenever a page's bytes are arranged in another way: pages on the disk are then misses."""


def host_layout(config: ModelConfig) -> str:
    """Names the arrangement of the bytes that `Pages.read` gives."""
    own = "" if config.gemma is None else f" {config.gemma}"
    own += "" if config.latent is None else f" {config.latent}"
    return f"{_LAYOUT}: {config.layers} {config.key_heads} {config.head_dim}{own}"


class LayerPages(NamedTuple):
    """Views of one layer's pages: numbers, or 8-bit codes with exponents (kernels/attention/kv_fp8.py)."""

    k: torch.Tensor
    """Keys [pages, J, page_tokens, D]."""
    v: torch.Tensor
    """Values, in the same shape; of latents the first columns of the keys."""
    exponents: torch.Tensor | None
    """[pages, J, page_tokens, 2] of codes; None: k and v are numbers."""


class Pages:
    """The KV cache: a tensor [L, pages, 2, J, page_tokens, D] for each J and D, keys before values of a page.

    Of latents keys alone: [L, pages, 1, 1, page_tokens, D]. With `fp8`, words of two codes [..., D/2] and their
    exponents [L, pages, J, page_tokens, 2]. Layers with a delta net have states in place of pages, and do not
    count in L; nor do those that read other layers' pages.
    """

    def __init__(
        self,
        config: ModelConfig,
        pages: int,
        context_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        page_tokens: int = PAGE_TOKENS,
        *,
        fp8: bool = False,
        slots: int = 0,
        saved_states: int = 0,
        window_pages: int = 0,
    ) -> None:
        """`context_tokens`: the longest sequence, for the tables of rotations. `dtype`: of the numbers;
        `fp8`: store them in 8 bits. `slots`, `saved_states`: see States. `window_pages`: those of layers with a
        window; 0: they have the pages of all."""
        self.page_tokens = page_tokens
        self.device = device
        self.dtype = dtype
        self._latent = config.latent
        self.states = (
            States(config.delta_net, slots, saved_states, device, dtype)
            if config.delta_net and config.delta_net.count
            else None
        )
        shapes: dict[tuple[int, int, bool], list[int]] = {}
        for layer in config.kv_layers:
            windowed = window_pages > 0 and config.window(layer) > 0
            shape = config.key_heads_of(layer), config.head_dim_of(layer), windowed
            shapes.setdefault(shape, []).append(layer)
        self._windowed = tuple(windowed for _, _, windowed in shapes)
        """By pool."""
        self.pools = tuple(
            torch.zeros(
                len(layers),
                window_pages if windowed else pages,
                1 if config.latent else 2,
                heads,
                page_tokens,
                d // 2 if fp8 else d,
                device=device,
                dtype=torch.int16 if fp8 else dtype,
            )
            for (heads, d, windowed), layers in shapes.items()
        )
        self.exponents: tuple[torch.Tensor, ...] = ()
        if fp8:
            self.exponents = tuple(
                torch.zeros(
                    *(*pool.shape[:2], *pool.shape[3:5], 2), device=device, dtype=torch.uint8
                )
                for pool in self.pools
            )
        own = {
            layer: (number, at)
            for number, layers in enumerate(shapes.values())
            for at, layer in enumerate(layers)
        }
        self._own = {
            layer: own[config.kv_source(layer)]
            for layer in range(config.layers)
            if not config.has_delta_net(layer)
        }
        self._angles = self._angle_tables(config, context_tokens)

    def _angle_tables(self, config: ModelConfig, context_tokens: int) -> list[torch.Tensor]:
        """By layer; those of the same rotation and head dimension share one."""
        held: dict[tuple[Rotation | None, int], torch.Tensor] = {}
        found = []
        for layer in range(config.layers):
            rotation, d = key = config.rotation_of(layer), config.table_dim_of(layer)
            if key not in held:
                still = (0.0,) * (d // 2)
                magnitude = 1.0
                if rotation is not None:
                    still = rotation.radians(d, context_tokens)
                    magnitude = rotation.magnitude
                held[key] = rope.angle_table(context_tokens, d, still, self.device, magnitude)
            found.append(held[key])
        return found

    def angles(self, layer: int) -> torch.Tensor:
        """The table of cosines and sines of a layer."""
        return self._angles[layer]

    @property
    def bytes(self) -> int:
        """Device memory of the pages."""
        return sum(each.nbytes for each in (*self.pools, *self.exponents))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers, but for windowed ones with pages of their own."""
        return sum(each.nbytes // each.shape[1] for each in self._tensors(windowed=False))

    def windowed(self, layer: int) -> bool:
        """True if a layer has the pages of the windowed layers."""
        return self._windowed[self._own[layer][0]]

    def _tensors(self, *, windowed: bool) -> list[torch.Tensor]:
        """Numbers or codes, then exponents, of one of the two kinds of pages."""
        kinds = (*self._windowed, *self._windowed)
        every = zip((*self.pools, *self.exponents), kinds, strict=False)
        return [tensor for tensor, kind in every if kind == windowed]

    def read(self, page: int, out: torch.Tensor) -> None:
        """Copy a page in all layers to bytes uint8 [page_bytes]."""
        for part, pages in self._parts(out.unsqueeze(0)):
            part[0].copy_(pages[:, page])

    def write(self, pages: Sequence[int], rows: torch.Tensor) -> None:
        """Copy bytes that `read` gave to pages. `rows`: uint8 [N, page_bytes or more], a row for a page."""
        if len(pages) == 1:
            for part, held in self._parts(rows):
                held[:, pages[0]].copy_(part[0])
            return
        index = torch.tensor(pages)
        if self.device.type == "cuda":
            # From memory that is not pinned the copy would be waited for.
            index = index.pin_memory().to(self.device, non_blocking=True)
        for part, held in self._parts(rows):
            held.index_copy_(1, index, part.transpose(0, 1))

    def _parts(self, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The parts of pages' bytes [N, L, words] beside the views that hold them [L, pages, words]: numbers or
        codes, then exponents."""
        begin = 0
        for tensor in self._tensors(windowed=False):
            layers, pages = tensor.shape[:2]
            held = tensor.view(layers, pages, -1).view(torch.int64)
            end = begin + tensor.nbytes // pages
            yield rows[:, begin:end].view(held.dtype).view(len(rows), layers, -1), held
            begin = end

    def layer(self, number: int) -> LayerPages:
        """Keys and values of a layer."""
        shape, own = self._own[number]
        pool = self.pools[shape][own]
        exponents = self.exponents[shape][own] if self.exponents else None
        if self._latent is not None:
            return LayerPages(pool[:, 0], pool[:, 0, ..., : self._latent.kv_rank], None)
        return LayerPages(pool[:, 0], pool[:, 1], exponents)

    def copy(self, source: int, target: int, tokens: int, *, windowed: bool = False) -> None:
        """Copy the first `tokens` positions of a page, in all layers that have it."""
        for tensor in self._tensors(windowed=windowed):
            # The positions are the last dimension but one, of numbers and of exponents.
            tensor[:, target, ..., :tokens, :] = tensor[:, source, ..., :tokens, :]


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Sequences with at most 16 new tokens; they come first in the step."""

    batch: AttentionBatch
    tokens: int
    """Rows of the step that this part fills."""
    widest: int
    """Most new tokens of one sequence."""
    splits: int
    """Ranges that each history is cut into."""
    one_page: bool
    """No range is longer than a page."""


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Sequences with more new tokens: prompt chunks."""

    batch: AttentionBatch
    tiles: torch.Tensor
    """Tiles of `tile_config` rows, from kernels.attention.prefill.tiles_of."""
    tile_config: PrefillTileConfig
    dequant_pages: torch.Tensor | None
    """FP8 pages to dequantize first, as kv_fp8_dequant takes them; None: pages are read as they are."""
    chunks: torch.Tensor | None = None
    """As ChunkedPart has them; None: the model has no states."""


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """A step on the device, int32 unless stated."""

    ids: torch.Tensor
    """Token ids [T]."""
    positions: torch.Tensor
    """[T]"""
    slots: torch.Tensor
    """[T]"""
    block_tables: torch.Tensor
    """[slots, pages of the longest sequence]"""
    window_tables: torch.Tensor
    """The same of windowed layers with pages of their own."""
    logits_indices: torch.Tensor | None
    """Tokens whose last state is needed, int64 [P]; None: all."""
    tokens: Tokens | None
    """Places of the tokens; None: the model has no states."""
    batch: AttentionBatch
    """All sequences, in two parts:"""
    decode: DecodeBatch | None
    prefill: PrefillBatch | None
