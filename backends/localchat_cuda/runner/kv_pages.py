"""KV pages of a model, and the tensors of a step that its layers read.

Letters: T tokens of the step, S sequences, L layers, J key/value heads, D head dimension. A *page* holds
`page_tokens` positions of one sequence in one layer; a *block table* lists the pages of a slot in order.
Page numbers are the same in all layers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from localchat_cuda.kernels import rope
from localchat_cuda.kernels.attention.prefill import PrefillTileConfig
from localchat_cuda.kernels.attention.reference import AttentionBatch
from localchat_cuda.kernels.delta_net import Tokens
from localchat_cuda.memory_plan import PAGE_TOKENS
from localchat_cuda.model_config import ModelConfig
from localchat_cuda.rope_config import Rotation
from localchat_cuda.runner.states import States

_LAYOUT = 1
"""To be raised whenever a page's bytes are arranged in another way: pages on the disk are then misses."""


def host_layout(config: ModelConfig) -> str:
    """Names the arrangement of the bytes that `Pages.read` gives."""
    return f"{_LAYOUT}: {config.layers} {config.key_heads} {config.head_dim}"


class LayerPages(NamedTuple):
    """Views of one layer's pages: numbers, or 8-bit codes with exponents (kernels/attention/kv_fp8.py)."""

    k: torch.Tensor
    """Keys [pages, J, page_tokens, D]."""
    v: torch.Tensor
    """Values, in the same shape."""
    exponents: torch.Tensor | None
    """[pages, J, page_tokens, 2] of codes; None: k and v are numbers."""


class Pages:
    """The KV cache: one tensor [L, pages, 2, J, page_tokens, D], a page's keys next to its values.

    With `fp8`, words of two codes [..., D/2] and their exponents [L, pages, J, page_tokens, 2]. Layers with a
    delta net have states in place of pages, and do not count in L.
    """

    def __init__(
        self, config: ModelConfig, pages: int, context_tokens: int, device: torch.device,
        dtype: torch.dtype, page_tokens: int = PAGE_TOKENS, *, fp8: bool = False, slots: int = 0,
        saved_states: int = 0,
    ) -> None:  # fmt: skip
        """`context_tokens`: the longest sequence, for the tables of rotations. `dtype`: of the numbers;
        `fp8`: store them in 8 bits. `slots`, `saved_states`: see States."""
        self.page_tokens, self.device, self.dtype = page_tokens, device, dtype
        heads, width = config.key_heads, config.head_dim
        self.states = (
            States(config.delta_net, slots, saved_states, device, dtype)
            if config.delta_net and config.delta_net.count
            else None
        )
        with_pages = [n for n in range(config.layers) if not config.has_delta_net(n)]
        self._number = {layer: n for n, layer in enumerate(with_pages)}
        self.pool = torch.zeros(
            len(with_pages), pages, 2, heads, page_tokens, width // 2 if fp8 else width,
            device=device, dtype=torch.int16 if fp8 else dtype,
        )  # fmt: skip
        self.exponents: torch.Tensor | None = None
        if fp8:
            self.exponents = torch.zeros(
                len(with_pages), pages, heads, page_tokens, 2, device=device, dtype=torch.uint8
            )
        self._angles = self._angle_table(config, config.rotation, context_tokens)
        windowed = config.windowed_rotation
        self._windowed_layers = (
            {n for n in range(config.layers) if config.window(n)} if windowed else set()
        )
        self._windowed_angles = (
            self._angle_table(config, windowed, context_tokens) if windowed else self._angles
        )

        self._unrotated_angles = self._angles
        if any(config.unrotated):
            self._unrotated_angles = rope.angle_table(
                context_tokens, width, (0.0,) * (width // 2), device
            )
        self._unrotated = config.unrotated

    def _angle_table(
        self, config: ModelConfig, rotation: Rotation, context_tokens: int
    ) -> torch.Tensor:
        d = config.head_dim
        radians = rotation.radians(d, context_tokens)
        return rope.angle_table(context_tokens, d, radians, self.device, rotation.magnitude)

    def angles(self, layer: int) -> torch.Tensor:
        """The table of cosines and sines of a layer."""
        if self._unrotated and self._unrotated[layer]:
            return self._unrotated_angles
        return self._windowed_angles if layer in self._windowed_layers else self._angles

    @property
    def bytes(self) -> int:
        """Device memory of the pages."""
        return self.pool.nbytes + (0 if self.exponents is None else self.exponents.nbytes)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers."""
        return self.bytes // self.pool.shape[1]

    def read(self, page: int, out: torch.Tensor) -> None:
        """Copy a page in all layers to bytes uint8 [page_bytes]."""
        for part, pages in self._parts(page, out):
            part.copy_(pages)

    def write(self, page: int, source: torch.Tensor) -> None:
        """Copy bytes that `read` gave to a page."""
        for part, pages in self._parts(page, source):
            pages.copy_(part)

    def _parts(
        self, page: int, content: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The parts of a page's bytes beside the views that hold them: numbers or codes, then exponents."""
        begin = 0
        for tensor in (self.pool, self.exponents):
            if tensor is not None:
                view = tensor[:, page]
                end = begin + view.numel() * view.element_size()
                yield content[begin:end].view(view.dtype).view(view.shape), view
                begin = end

    def layer(self, number: int) -> LayerPages:
        """Keys and values of a layer."""
        own, exponents = self._number[number], self.exponents
        pool = self.pool[own]
        return LayerPages(pool[:, 0], pool[:, 1], None if exponents is None else exponents[own])

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` positions of a page, in all layers."""
        self.pool[:, target, :, :, :tokens] = self.pool[:, source, :, :, :tokens]
        if self.exponents is not None:
            self.exponents[:, target, :, :tokens] = self.exponents[:, source, :, :tokens]


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
    logits_indices: torch.Tensor | None
    """Tokens whose last state is needed, int64 [P]; None: all."""
    tokens: Tokens | None
    """Places of the tokens; None: the model has no states."""
    batch: AttentionBatch
    """All sequences, in two parts:"""
    decode: DecodeBatch | None
    prefill: PrefillBatch | None
