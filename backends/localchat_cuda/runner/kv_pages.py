"""KV pages of a model.

Letters: L layers, J key/value heads, D head dimension. A *page* contains
`page_tokens` positions of one sequence in one layer. A *block table* lists the pages of a slot in order. Page
numbers are the same in all layers, unless layers with a window have their own pages and block tables.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from localchat.backend_api.interface import Capabilities
from localchat.fit.kv_types import FP8
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.config.rope import Rotation
from localchat_cuda.kernels import rope
from localchat_cuda.runner.states import States
from localchat_cuda.runner.step_buffer import upload

_LAYOUT = 2
"""Version of the arrangement of a page's bytes. Raise it when that changes, so that pages on disk miss."""


def host_layout(config: ModelConfig) -> str:
    """Return a name for the arrangement of the bytes that `Pages.read` returns."""
    parts: list[object] = [config.layers, config.key_heads, config.head_dim]
    # Some families have layers of different shapes.
    parts += [part for part in (config.gemma, config.latent) if part is not None]
    if config.ranks > 1:
        # A block has the heads of one rank after those of another.
        parts.append(f"{config.ranks} ranks")
    return f"{_LAYOUT}: {' '.join(map(str, parts))}"


class LayerPages(NamedTuple):
    """Views of one layer's pages: floating numbers, or 8-bit codes with exponents (kv_fp8.py)."""

    k: torch.Tensor
    """Keys [pages, J, page_tokens, D]."""
    v: torch.Tensor
    """Values in the same shape. For latents, they are the first columns of the keys."""
    exponents: torch.Tensor | None
    """Exponents of codes [pages, J, page_tokens, 2]; None: k and v are floating numbers."""


class Pages:
    """KV cache: a tensor [L, pages, 2, J, page_tokens, D] for each J and D, with keys before values.

    Latents have only keys: [L, pages, 1, 1, page_tokens, D]. With `fp8`, the tensor has words of two codes
    [..., D/2], and exponents [L, pages, J, page_tokens, 2]. L counts neither layers without attention, nor
    layers that read other layers' pages."""

    def __init__(
        self,
        config: ModelConfig,
        capabilities: Capabilities,
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate the pages of a load, and the running states of a hybrid.

        Each kind of pages has one more than the capabilities have blocks, for padding. `dtype`: of floating
        numbers; None: that of the config."""
        dtype = dtype or getattr(torch, config.dtype)
        fp8 = capabilities.kv_type == FP8
        page_tokens = capabilities.block_tokens
        window_blocks = capabilities.window_blocks
        self.page_tokens = page_tokens
        self.device = device
        self.dtype = dtype
        self._latent = config.latent
        self.states: States | None = None
        if config.recurrent is not None:
            slots = capabilities.max_slots
            self.states = States(config.recurrent, slots, capabilities.saved_states, device, dtype)
        shapes: dict[tuple[int, int, bool], list[int]] = {}
        for layer in config.kv_layers:
            windowed = window_blocks > 0 and config.window(layer) > 0
            shape = config.key_heads_of(layer), config.head_dim_of(layer), windowed
            shapes.setdefault(shape, []).append(layer)
        self._windowed = tuple(windowed for _, _, windowed in shapes)
        """Whether each pool belongs to layers with a window."""
        blocks = capabilities.kv_tokens // page_tokens
        # Keys and values; latents have only keys.
        kinds = 1 if config.latent else 2
        # A word of 16 bits stores two codes.
        codes_per_word = 2 if fp8 else 1
        self.pools = tuple(
            torch.zeros(
                len(layers),
                (window_blocks if windowed else blocks) + 1,
                kinds,
                heads,
                page_tokens,
                d // codes_per_word,
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
        location = {
            layer: (pool, index)
            for pool, layers in enumerate(shapes.values())
            for index, layer in enumerate(layers)
        }
        self._location = {
            layer: location[config.kv_source(layer)]
            for layer in range(config.layers)
            if config.has_attention(layer)
        }
        """Pool, and index in it, of each layer with attention."""
        self._angles = self._angle_tables(config, capabilities.context_tokens)

    def _angle_tables(self, config: ModelConfig, context_tokens: int) -> list[torch.Tensor]:
        """Return a table per layer. Layers of the same rotation and head dimension share it."""
        by_rotation: dict[tuple[Rotation | None, int], torch.Tensor] = {}
        tables = []
        for layer in range(config.layers):
            rotation = config.rotation_of(layer)
            d = config.table_dim_of(layer)
            if (rotation, d) not in by_rotation:
                radians = (0.0,) * (d // 2)
                magnitude = 1.0
                if rotation is not None:
                    radians = rotation.radians(d, context_tokens)
                    magnitude = rotation.magnitude
                by_rotation[rotation, d] = rope.angle_table(
                    context_tokens, d, radians, self.device, magnitude
                )
            tables.append(by_rotation[rotation, d])
        return tables

    def angles(self, layer: int) -> torch.Tensor:
        """Return the table of cosines and sines of a layer."""
        return self._angles[layer]

    def view(self, layers: Sequence[int]) -> "Pages":
        """Return these pages for another model, whose layer n reads `layers[n]`."""
        view = copy.copy(self)
        view._location = {n: self._location[layer] for n, layer in enumerate(layers)}
        view._angles = [self._angles[layer] for layer in layers]
        return view

    @property
    def bytes(self) -> int:
        """Bytes of the pages on the device."""
        return sum(tensor.nbytes for tensor in (*self.pools, *self.exponents))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers, without layers with their own window pages."""
        return sum(tensor.nbytes // tensor.shape[1] for tensor in self._tensors(windowed=False))

    def windowed(self, layer: int) -> bool:
        """Return True if a layer uses the window pages."""
        pool, _ = self._location[layer]
        return self._windowed[pool]

    def _tensors(self, *, windowed: bool) -> list[torch.Tensor]:
        """Return the tensors of one of the two kinds of pages: numbers or codes, then exponents."""
        return [
            tensor
            for tensors in (self.pools, self.exponents)
            for tensor, is_windowed in zip(tensors, self._windowed, strict=False)
            if is_windowed == windowed
        ]

    def read(self, page: int, out: torch.Tensor) -> None:
        """Copy a page in all layers to bytes uint8 [page_bytes]."""
        for part, pages in self._parts(out.unsqueeze(0)):
            part[0].copy_(pages[:, page])

    def write(self, pages: Sequence[int], rows: torch.Tensor) -> None:
        """Copy bytes from `read` to pages. `rows`: uint8 [N, page_bytes or more], one per page."""
        if len(pages) == 1:
            for part, tensor in self._parts(rows):
                tensor[:, pages[0]].copy_(part[0])
            return
        index = upload(torch.tensor(pages), self.device)
        for part, tensor in self._parts(rows):
            tensor.index_copy_(1, index, part.transpose(0, 1))

    def _parts(self, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield parts of page bytes [N, L, words] with their tensors [L, pages, words]."""
        begin = 0
        for tensor in self._tensors(windowed=False):
            layers, pages = tensor.shape[:2]
            words = tensor.view(layers, pages, -1).view(torch.int64)
            end = begin + tensor.nbytes // pages
            yield rows[:, begin:end].view(words.dtype).view(len(rows), layers, -1), words
            begin = end

    def layer(self, number: int) -> LayerPages:
        """Return keys and values of a layer."""
        pool_number, index = self._location[number]
        pool = self.pools[pool_number][index]
        exponents = self.exponents[pool_number][index] if self.exponents else None
        if self._latent is not None:
            return LayerPages(pool[:, 0], pool[:, 0, ..., : self._latent.kv_rank], None)
        return LayerPages(pool[:, 0], pool[:, 1], exponents)

    def copy(self, source: int, target: int, tokens: int, *, windowed: bool = False) -> None:
        """Copy the first `tokens` positions of a page in all layers that have it."""
        for tensor in self._tensors(windowed=windowed):
            # Positions are the second last dimension of numbers and of exponents.
            tensor[:, target, ..., :tokens, :] = tensor[:, source, ..., :tokens, :]
