"""Operations of a decoder layer over packed weights, in steps of few rows.

Letters: see dense.py.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import TypeAlias

import torch

from localchat_cuda.kernels import ggml, int4, rms_norm_post
from localchat_cuda.kernels.attention import decode as decode_attention
from localchat_cuda.kernels.int4 import activations as w4_activations
from localchat_cuda.kernels.int4 import pack as w4_pack
from localchat_cuda.kernels.int4.row_norm import RowNorm
from localchat_cuda.layers.dense import Layers, RankSums, Sums
from localchat_cuda.layers.head_norms import AttentionWeights
from localchat_cuda.weights.formats.weight import Weight

PackedWeight: TypeAlias = w4_pack.W4 | ggml.GgmlWeight
"""Weight whose gemms of few rows read packed activations."""
Write: TypeAlias = Callable[..., None]
"""Function that writes rows, its argument, with columns in `order`; None: as in the layer."""


class PackedActivations:
    """Activations of one gemm, written once its weight decides their order and groups."""

    def __init__(
        self,
        buffer: Callable[[PackedWeight], w4_activations.Rows],
        write: Write,
        norm: RowNorm | None = None,
    ) -> None:
        """`buffer`: returns memory for what a weight reads. `norm`: the gemm divides each row by its rms."""
        self._buffer = buffer
        self._write: Write | None = write
        self.norm = norm

    def rows(self, weight: PackedWeight) -> w4_activations.Rows:
        """Write the activations in the order and groups of `weight`. Call once: it may change the residual."""
        write = self._write
        self._write = None
        assert write is not None, "a second gemm of the same activations"
        rows = self._buffer(weight)
        write(rows, order=weight.order)
        return rows


class PackedLayers(Layers[PackedActivations]):
    """Layers with packed activations, for steps of kernels with at most ModelWeights.packed_rows tokens."""

    @cached_property
    def _buffers(self) -> dict[tuple[int, int, bool], w4_activations.Rows]:
        return {}

    def reduce(self, y: torch.Tensor) -> Sums:
        collective = self.collective
        has_peers = collective is not None and collective.peers is not None
        if not has_peers or y.shape[1] > w4_activations.ALONE:
            return super().reduce(y)
        # The kernel that norms the sum adds up the ranks', which saves a kernel.
        return RankSums(y)

    def embed(self, table: torch.Tensor, gain: torch.Tensor | None) -> PackedActivations:
        if gain is None:
            self.embed_residual(table)
            return self.plain(self.residual)
        if self.collective is not None:
            # The kernel reads rows of the whole table.
            self.embed_residual(table)
            normed = self.normed(None, self.residual, gain)
            return self.plain(normed)
        return self._write_packed("embed", table, gain)

    def gemm(self, x: PackedActivations, weight: Weight) -> torch.Tensor:
        assert isinstance(weight, PackedWeight)
        return self._multiply(x.rows(weight), weight, x.norm)

    def _multiply(
        self, rows: w4_activations.Rows, weight: PackedWeight, norm: RowNorm | None
    ) -> torch.Tensor:
        if isinstance(weight, w4_pack.W4):
            return int4.gemm(rows, weight, norm)
        assert isinstance(rows, w4_activations.Int8Rows)
        return ggml.gemm_rows(rows, weight, norm)

    def attend(self, qkv: torch.Tensor, layer: int, weights: AttentionWeights) -> PackedActivations:
        if self.only_decodes(layer):
            # Merging the partial sums also writes the rows of the next gemm, which saves a kernel.
            partials = self.decode_partials(qkv, layer, weights)
            merge = partial(decode_attention.merge, partials, sinks=weights.sinks)
            return PackedActivations(self._rows, merge)
        self.store_kv(qkv, layer, weights)
        return self.continued(self.attention(layer, weights.sinks), layer)

    def plain(self, rows: torch.Tensor) -> PackedActivations:
        return self._write_packed("plain", rows[None])

    def drop_rows(self, x: torch.Tensor) -> torch.Tensor:
        self._buffers.clear()
        return super().drop_rows(x)

    def add_norm(
        self,
        y: Sums,
        gain: torch.Tensor | None,
        post: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> PackedActivations:
        if gain is None:
            self.normed(self.total(y), self.residual, None, post, scale=scale)
            return self.plain(self.residual)
        if post is None:
            return self._write_packed("norm", y, gain)
        norm = self._norm()
        total = self.total(y)

        def write(rows: w4_activations.Rows, order: torch.Tensor | None) -> None:
            rms_norm_post.prepare(total, self.residual, post, gain, rows, *norm, scale, order=order)

        return PackedActivations(self._rows, write, norm)

    def gemm_act_mul(self, x: PackedActivations, weight: Weight) -> PackedActivations:
        assert isinstance(weight, PackedWeight)
        read = x.rows(weight)
        if not isinstance(weight, w4_pack.W4):
            return self._activated(self._multiply(read, weight, x.norm))
        write = partial(int4.gemm_silu_mul, read, weight, norm=x.norm, gelu=self.gelu)
        return PackedActivations(self._activated_rows, write)

    def act_mul(self, y: torch.Tensor, other: torch.Tensor) -> PackedActivations:
        return self._activated(self.with_gate(y, self.remaining_rows(other)))

    def _activated(self, gate_up: torch.Tensor) -> PackedActivations:
        """Return act(gate) * up of partial sums [S, T, 2K]."""
        write = partial(w4_activations.prepare, "act_and_mul", gate_up, gelu=self.gelu)
        return PackedActivations(self._activated_rows, write)

    def _write_packed(
        self,
        mode: w4_activations.Mode,
        source: Sums,
        gain: torch.Tensor | None = None,
    ) -> PackedActivations:
        norm: RowNorm | None = None
        residual: torch.Tensor | None = None
        if gain is not None:
            norm = self._norm()
            residual = self.residual
        embeds = mode == "embed"

        def write(rows: w4_activations.Rows, order: torch.Tensor | None) -> None:
            factor = self.embedding_scale if embeds else 1.0
            if mode == "norm" and isinstance(rows, w4_activations.HalfRows):
                factor = w4_activations.HALF_RESIDUAL
            peers = None
            if isinstance(source, RankSums) and order is None:
                assert self.collective is not None
                peers = self.collective.peers
                sums = source.own
            else:
                sums = self.total(source)
            w4_activations.prepare(
                mode,
                sums,
                rows,
                ids=self.inputs.ids if embeds else None,
                residual=residual,
                weight=gain,
                squares=norm and norm.squares,
                factor=factor,
                eps=self.config.eps,
                order=order,
                peers=peers,
            )

        return PackedActivations(self._rows, write, norm)

    def _norm(self) -> RowNorm:
        groups = self.config.hidden // w4_pack.BLOCK_K
        return RowNorm(torch.empty(self.tokens, groups, device=self.device), self.config.eps)

    def _activated_rows(self, reader: PackedWeight) -> w4_activations.Rows:
        return self._rows(reader, activated=True)

    def _rows(self, reader: PackedWeight, *, activated: bool = False) -> w4_activations.Rows:
        """Return the buffer of activations for weights of this width and group.

        Activations share a buffer, because a gemm has read them before the next kernel writes, and its padding
        is zeroed once. `activated` rows need another buffer: the gemm that writes them still reads the
        first."""
        key = reader.features_in, reader.group, activated
        if key not in self._buffers:
            self._buffers[key] = int4.empty_activations(
                self.tokens, reader.features_in, self.device, reader.group
            )
        return self._buffers[key]
