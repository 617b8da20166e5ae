"""Operations of a decoder layer for one step, over a paged KV cache.

Letters: T tokens of the step, S partial sums, N output and K input features, H query heads, J key/value
heads, D head dimension, P tokens whose logits are computed.

A gemm returns partial sums [S, T, N], and the next operation adds them up. The residual is fp32 and stays here.
Two classes differ in their activations. Those of `DenseLayers` are [T, K] in the model's dtype. Those of
`PackedLayers` (packed.py) are the rows that gemms of packed weights read, and the gemm divides them by their
rms (kernels/int4/activations.py). Each class runs the kernels, or with `kernels` False their plain-torch
references, on a CPU and in tests.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import torch

from localchat_cuda.config.latent import EPS as LATENT_EPS
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.kernels import (
    activation,
    delta_net,
    experts,
    fp8_int8,
    ggml,
    int4,
    latent,
    qk_norm,
    rms_norm,
    rope,
    short_conv,
)
from localchat_cuda.kernels.attention import decode as decode_attention
from localchat_cuda.kernels.attention import decode_fused, kv_fp8_dequant
from localchat_cuda.kernels.attention import prefill as prefill_attention
from localchat_cuda.kernels.attention import reference as attention_reference
from localchat_cuda.kernels.attention.decode import Partials
from localchat_cuda.kernels.attention.reference import AttentionBatch
from localchat_cuda.kernels.delta_net import gated_norm
from localchat_cuda.kernels.fp8_int8 import pack as w8_pack
from localchat_cuda.kernels.int4 import activations as w4_activations
from localchat_cuda.layers.head_norms import AttentionWeights, HeadNorms
from localchat_cuda.layers.output_head import dense_gemm, dense_sums
from localchat_cuda.ranks.collective import Collective
from localchat_cuda.runner.input_batch import ModelInputs, PrefillBatch
from localchat_cuda.runner.kv_pages import Pages
from localchat_cuda.weights.formats.weight import Weight
from localchat_cuda.weights.model_weights import LayerInputs, RecurrentWeights

X = TypeVar("X")
Call = TypeVar("Call", bound=Callable[..., object])


class RankSums(NamedTuple):
    """Partial sums [S, T, N] of one rank, which the next norm adds to those of the others."""

    own: torch.Tensor


Sums: TypeAlias = torch.Tensor | RankSums
"""Partial sums [S, T, N] of all ranks, or of one."""
_HALF_POWER = 0.5**0.5
"""Factor that keeps the power of a sum of two equally powerful terms."""


class Layers(ABC, Generic[X]):
    """Operations of an architecture's forward pass. `X`: activations that a gemm reads.

    Size: all operations share the state of one step: residual, pages and rows."""

    def __init__(
        self,
        config: ModelConfig,
        inputs: ModelInputs,
        pages: Pages,
        *,
        kernels: bool,
        collective: Collective | None = None,
    ) -> None:
        self.config = config
        self.inputs = inputs
        self.pages = pages
        self.kernels = kernels
        self.collective = collective
        """Ranks that compute the model together; None: this process alone."""
        self.device = pages.device
        self.dtype = pages.dtype
        self.gelu = config.activation == "gelu_tanh"
        self.tokens = inputs.ids.shape[0]
        self.logits_indices = inputs.logits_indices
        """Tokens whose last states are needed; None: all remaining rows."""
        self.residual = torch.empty(self.tokens, config.hidden, device=self.device)
        self._queries: dict[int, torch.Tensor] = {}
        self._dequantized: kv_fp8_dequant.DequantizedPages | None = None
        self.taps: tuple[int, ...] = ()
        """Layers before which `tap` stores the states."""
        self.tapped: dict[int, torch.Tensor] = {}
        """States by layer: [T, hidden] in the model's dtype."""

    @abstractmethod
    def embed(self, table: torch.Tensor, gain: torch.Tensor | None) -> X:
        """Set the residual to rows of the table [vocabulary, K]. Norm it with `gain` [K] unless None."""

    @abstractmethod
    def gemm(self, x: X, weight: Weight) -> torch.Tensor:
        """Return partial sums [S, T, N] of x w^T."""

    @abstractmethod
    def attend(self, qkv: torch.Tensor, layer: int, weights: AttentionWeights) -> X:
        """Rotate, write keys and values to the pages of `layer`, and attend: [T, H*D].

        The last layer returns [P, H*D] if P is small. All later operations then have as many rows."""

    @abstractmethod
    def add_norm(
        self,
        y: Sums,
        gain: torch.Tensor | None,
        post: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> X:
        """Add partial sums to the residual, and norm the result with `gain`.

        `post`: norm of the partial sums before they are added. With it, the result is multiplied by `scale`,
        and not normed if `gain` is None."""

    @abstractmethod
    def gemm_act_mul(self, x: X, weight: Weight) -> X:
        """Return act(gate) * up of x w^T: [T, K] from a weight of 2K features, gate first."""

    @abstractmethod
    def act_mul(self, y: torch.Tensor, other: torch.Tensor) -> X:
        """Return act(y) * other of partial sums y [S, T, K] and `other` [T, K]."""

    @abstractmethod
    def plain(self, rows: torch.Tensor) -> X:
        """Return rows [T, K] in the model's dtype as activations."""

    def implementation(self, kernel: Call, reference: Call) -> Call:
        """Return the kernel, or its reference where kernels do not run."""
        return kernel if self.kernels else reference

    def reduce(self, y: torch.Tensor) -> Sums:
        """Add up the partial sums [S, T, N] of all ranks, at once or in the next norm.

        For products of weights whose input features are divided among the ranks. One rank changes nothing."""
        if self.collective is None:
            return y
        return self.collective.add_up(y, exact=False)

    def total(self, y: Sums) -> torch.Tensor:
        """Return the partial sums of all ranks."""
        if not isinstance(y, RankSums):
            return y
        assert self.collective is not None
        return self.collective.add_up(y.own)

    def embedded(self, table: torch.Tensor) -> torch.Tensor:
        """Return the rows of the embedding [vocabulary, K] for the step's tokens: [T, K]."""
        ids = self.inputs.ids.long()
        if self.collective is None:
            return table[ids]
        # Each rank has some of the rows. The others are zeros, so the sum is exact.
        local = ids - self.collective.rank * len(table)
        inside = (local >= 0) & (local < len(table))
        rows = table[local * inside] * inside[:, None]
        return self.collective.add_up(rows[None])[0].to(table.dtype)

    def tap(self, layer: int) -> None:
        """Store the states before a layer if `taps` contains it. Call before the layer's first gemm."""
        if layer in self.taps:
            self.tapped[layer] = _rounded(self.residual, self.dtype).clone()

    def store_kv(self, qkv: torch.Tensor, layer: int, weights: AttentionWeights) -> None:
        """Write rotated queries to their buffer, and rotated keys and values to their pages."""
        self.tap(layer)
        pages = self.pages.layer(layer)
        norms = weights.norms
        if norms is not None and self.config.family.normed_projections:
            qkv = self._normed_projections(qkv, norms)
            norms = None
        q_norm, k_norm = _weights_of(norms)
        rope_store = self.implementation(rope.rope_store, rope.reference)
        rope_store(
            qkv,
            self.pages.angles(layer),
            self.inputs.positions,
            self.inputs.slots,
            self._tables(layer),
            self.queries(layer),
            pages.k,
            pages.v,
            bias=weights.bias,
            q_norm=q_norm,
            k_norm=k_norm,
            v_norm=norms is not None and norms.values,
            eps=self.config.eps,
            columns=self.config.rotation.columns,
            exponents=pages.exponents,
        )

    def _normed_projections(self, qkv: torch.Tensor, norms: HeadNorms) -> torch.Tensor:
        """Norm queries and keys of partial sums over all heads: fp32 [1, T, N]."""
        if self.collective is not None:
            return self._normed_across_ranks(qkv, norms, self.collective)
        normed = torch.empty(1, self.tokens, qkv.shape[2], device=self.device)
        normalize = self.implementation(qk_norm.normalize, qk_norm.reference)
        normalize(qkv, norms.q, norms.k, normed[0], self.config.eps)
        return normed

    def _normed_across_ranks(
        self, qkv: torch.Tensor, norms: HeadNorms, collective: Collective
    ) -> torch.Tensor:
        """Norm queries and keys over the heads of all ranks, with plain torch."""
        total = qkv.sum(0, dtype=torch.float32)
        queries = len(norms.q)
        keys = len(norms.k)
        q, k, v = torch.split(total, [queries, keys, keys], 1)
        # Copied key heads count once per rank, in the sum as in the mean.
        squares = torch.stack((q.square().mean(1), k.square().mean(1)), 1)
        means = collective.add_up(squares[None])[0] / collective.ranks
        inverse = torch.rsqrt(means + self.config.eps)
        q = q * inverse[:, :1] * norms.q.float()
        k = k * inverse[:, 1:] * norms.k.float()
        return torch.cat((q, k, v), 1)[None]

    def _tables(self, layer: int) -> torch.Tensor:
        """Return the block tables of a layer's pages."""
        if self.pages.windowed(layer):
            return self.inputs.window_tables
        return self.inputs.block_tables

    def _batch(self, batch: AttentionBatch, layer: int) -> AttentionBatch:
        """Return the sequences of the step with a layer's block tables."""
        if not self.pages.windowed(layer):
            return batch
        return batch._replace(tables=self.inputs.window_tables)

    def queries(self, layer: int) -> torch.Tensor:
        """Return the buffer of a layer's queries, [T, H, D]. Layers with equal D share it."""
        d = self.config.head_dim_of(layer)
        if d not in self._queries:
            self._queries[d] = torch.empty(
                self.tokens, self.config.heads, d, dtype=self.dtype, device=self.device
            )
        return self._queries[d]

    def norm_latent(self, y: torch.Tensor, gain: torch.Tensor) -> X:
        """Norm the first Q columns of partial sums [S, T, ..] with `gain` [Q]."""
        out = torch.empty(self.tokens, len(gain), dtype=self.dtype, device=self.device)
        norm = self.implementation(latent.norm, latent.norm_reference)
        norm(y, gain, out, LATENT_EPS)
        return self.plain(out)

    def attend_latent(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        gain: torch.Tensor,
        kv: torch.Tensor,
        layer: int,
    ) -> X:
        """Attend over latents (kernels/latent.py), otherwise like `attend`: [T, H*V].

        `q`: partial sums [S, T, H*(N+E)]. `latents`: partial sums [S, T, ..] that end with the latent and its
        rotated key. `gain`: of the latent's norm. `kv`: see LayerWeights."""
        self.tap(layer)
        shape = self.config.latent
        queries = self.queries(layer)
        assert shape is not None
        heads = self.tokens, self.config.heads
        plain = torch.empty(*heads, shape.plain, dtype=self.dtype, device=self.device)
        out = torch.empty(*heads, shape.value, dtype=self.dtype, device=self.device)
        store = self.implementation(latent.store, latent.store_reference)
        store(
            q,
            latents,
            gain,
            self.pages.angles(layer),
            self.inputs.positions,
            self.inputs.slots,
            self._tables(layer),
            plain,
            queries,
            self.pages.layer(layer).k,
            LATENT_EPS,
            neighbours=shape.neighbours,
        )
        # The library has kernels for batches of products, one per head, of any number of rows. These products
        # read 2 % of the bytes of a token of DeepSeek-V2-Lite, and 7 % of GLM-4.7-Flash, too little for a
        # kernel of our own.
        latent_queries = queries[..., : shape.kv_rank].transpose(0, 1)
        torch.bmm(plain.transpose(0, 1), kv[:, : shape.plain], out=latent_queries)
        attended = self.attention(layer, None).view(self.tokens, -1, shape.kv_rank).transpose(0, 1)
        torch.bmm(attended, kv[:, shape.plain :].transpose(1, 2), out=out.transpose(0, 1))
        return self.continued(out.view(self.tokens, -1), layer)

    def run_recurrent(
        self,
        product: torch.Tensor,
        weights: RecurrentWeights,
        layer: int,
        gates: torch.Tensor | None = None,
    ) -> X:
        """Run a layer with a running state, and update the states: [T, H*V].

        `product`: partial sums [S, T, ..] of a delta net, a Mamba 2 or a short convolution. `gates`: partial
        sums of a delta net's gates; None: they follow in `product`. Rows of the last layer as in `attend`."""
        self.tap(layer)
        shape = self.config.recurrent
        inputs = self.inputs
        assert shape is not None
        assert self.pages.states is not None
        assert inputs.tokens is not None
        states = self.pages.states.layer(layer)
        normed = torch.empty(self.tokens, shape.values, dtype=self.dtype, device=self.device)
        if isinstance(weights, torch.Tensor):
            convolve = self.implementation(short_conv.apply, short_conv.reference)
            convolve(product, weights, states.inputs, inputs.tokens, inputs.batch, normed)
            return self.continued(normed, layer)
        heads = shape.value_heads
        if shape.kind == "mamba":
            parts = torch.split(product[..., : shape.columns], list(shape.parts), 2)
            gate, channels, gates = parts
            norm_heads = shape.key_heads
        else:
            channels = product
            gate = product[..., shape.channels : shape.columns]
            gates = product[..., shape.columns :] if gates is None else gates
            norm_heads = heads
        projection = delta_net.Projection(channels, gates)
        out = torch.empty(self.tokens, heads, shape.value_dim, dtype=self.dtype, device=self.device)
        if self.kernels:
            prefill = inputs.prefill
            many: delta_net.ChunkedPart | None = None
            if prefill is not None and prefill.chunks is not None:
                many = delta_net.ChunkedPart(prefill.batch, prefill.chunks)
            delta_net.apply(projection, weights, states, inputs.tokens, inputs.decode, many, out)
        else:
            delta_net.reference(projection, weights, states, inputs.tokens, inputs.batch, out)
        self.gate(
            out.view(self.tokens, norm_heads, -1),
            gate,
            weights.norm,
            normed,
            shape.eps,
            groups=shape.kind == "mamba",
        )
        return self.continued(normed, layer)

    def gate(
        self,
        x: torch.Tensor,
        z: torch.Tensor,
        weight: torch.Tensor | None,
        out: torch.Tensor,
        eps: float = 0.0,
        *,
        groups: bool = False,
    ) -> None:
        """Multiply by output gates, see gated_norm. `eps`: 0.0 for that of the model."""
        gate = self.implementation(gated_norm.gate, gated_norm.reference)
        gate(x, z, weight, out, eps or self.config.eps, groups=groups)

    def square_relu(self, y: torch.Tensor) -> X:
        """Return the square of relu(y) of partial sums y [S, T, K]."""
        if not self.kernels:
            return self.plain(_rounded(activation.square_reference(y), self.dtype))
        out = torch.empty(y.shape[1:], dtype=self.dtype, device=self.device)
        activation.square_relu(y, out)
        return self.plain(out)

    def decode_attention(
        self, rules: attention_reference.Rules, layer: int
    ) -> decode_attention.Partials:
        """Attend with the rows that decode, which come first."""
        shape = self.inputs.shape
        assert self.inputs.decode is not None
        k, v, exponents = self.pages.layer(layer)
        q = self.queries(layer)[: shape.decode_tokens]
        partials = decode_attention.Partials.empty(
            shape.splits, len(q), q.shape[1], self.config.value_dim_of(layer), self.device
        )
        decode_attention.attend(
            q,
            k,
            v,
            self._batch(self.inputs.decode, layer),
            shape.widest,
            partials,
            rules,
            exponents=exponents,
        )
        return partials

    def only_decodes(self, layer: int) -> bool:
        """Return True if kernels run, all rows of the step decode, and none is dropped."""
        all_rows = self.inputs.shape.decode_tokens == self.tokens
        return self.kernels and all_rows and not self.drops_rows(layer)

    def decode_partials(self, qkv: torch.Tensor, layer: int, weights: AttentionWeights) -> Partials:
        """Store keys and values, and attend in a step that only decodes."""
        norms = weights.norms
        batch = self.inputs.decode
        shape = self.inputs.shape
        pages = self.pages.layer(layer)
        config = self.config
        assert batch is not None
        rules = self.rules(layer, weights.sinks)
        d = config.head_dim_of(layer)
        fits_norms = norms is None or not (config.family.normed_projections or norms.values)
        fits_shape = shape.one_page and decode_fused.serves(
            qkv, config.heads, d, pages.k, pages.exponents
        )
        if not (fits_norms and fits_shape):
            self.store_kv(qkv.contiguous(), layer, weights)
            return self.decode_attention(rules, layer)
        self.tap(layer)
        q_norm, k_norm = _weights_of(norms)
        partials = Partials.empty(shape.splits, self.tokens, config.heads, d, self.device)
        decode_fused.store_and_attend(
            qkv,
            self.pages.angles(layer),
            pages.k,
            pages.v,
            self._batch(batch, layer),
            partials,
            rules,
            dtype=self.dtype,
            bias=weights.bias,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=config.eps,
            columns=config.rotation.columns,
        )
        return partials

    def rules(self, layer: int, sinks: torch.Tensor | None) -> attention_reference.Rules:
        """Return scale, window, soft cap and sinks of a layer's attention."""
        config = self.config
        return attention_reference.Rules(
            config.attention_scale, config.window(layer), config.attention_cap, sinks
        )

    def attention(self, layer: int, sinks: torch.Tensor | None) -> torch.Tensor:
        """Attend with all sequences: [T, H*D] in the model's dtype."""
        rules = self.rules(layer, sinks)
        if not self.kernels:
            k, v, exponents = self.pages.layer(layer)
            q = self.queries(layer)
            batch = self._batch(self.inputs.batch, layer)
            out = attention_reference.reference(q, k, v, batch, rules, exponents)
            return out.view(self.tokens, -1).to(self.dtype)
        out = self.queries(layer).new_empty(
            self.tokens, self.config.heads, self.config.value_dim_of(layer)
        )
        flat = out.view(self.tokens, -1)
        prefill = self.inputs.prefill
        if self.inputs.decode is not None:
            partials = self.decode_attention(rules, layer)
            decode_attention.merge(partials, flat[: partials.sums.shape[1]], sinks=sinks)
        if prefill is not None:
            self.prefill_attention(prefill, rules, layer, out)
        return flat

    def prefill_attention(
        self, part: PrefillBatch, rules: attention_reference.Rules, layer: int, out: torch.Tensor
    ) -> None:
        """Attend with the prompt chunks, and write their rows of `out` [T, H, D]."""
        k, v, exponents = self.pages.layer(layer)
        batch = self._batch(part.batch, layer)
        sources = part.dequant_pages
        if sources is not None and exponents is not None:
            if self._dequantized is None:
                # One pool serves all layers: each layer reads what it has just written.
                self._dequantized = kv_fp8_dequant.DequantizedPages.empty(
                    sources.shape[0],
                    k.shape[1],
                    k.shape[2],
                    self.config.head_dim,
                    self.dtype,
                    batch.tables,
                )
            kv_fp8_dequant.dequantize(k, v, exponents, batch.tables, sources, self._dequantized)
            batch = self._dequantized.batch(batch)
            k = self._dequantized.pool[:, 0]
            v = self._dequantized.pool[:, 1]
            exponents = None
        prefill_attention.attend(
            self.queries(layer),
            k,
            v,
            batch,
            part.tiles,
            out,
            rules,
            exponents=exponents,
            config=part.tile_config,
        )

    def drops_rows(self, layer: int) -> bool:
        """Return True if only rows with logits continue after this layer's attention or running state.

        That applies to the last such layer, if at most half of the rows have logits. With 28 layers it saves a
        prompt 1/28 of the work after attention."""
        last = layer == self.config.last_mixer
        indices = self.logits_indices
        return last and indices is not None and 2 * indices.shape[0] <= self.tokens

    def drop_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Reduce x [T, K] and the residual to the rows with logits."""
        indices = self.logits_indices
        self.logits_indices = None
        assert indices is not None
        self.tokens = indices.shape[0]
        self.residual = self.residual[indices]
        return x[indices]

    def continued(self, x: torch.Tensor, layer: int) -> X:
        """Return the rows of x [T, K] that continue after a layer."""
        if self.drops_rows(layer):
            x = self.drop_rows(x)
        return self.plain(x)

    def run_experts(
        self,
        y: Sums | None,
        gain: torch.Tensor,
        weights: experts.Experts,
        bias: torch.Tensor | None = None,
    ) -> Sums:
        """Compute the experts of each row: partial sums [S, T, K].

        Before, add partial sums y and their bias to the residual, if any, and norm it with `gain`."""
        total = None if y is None else self.total(y)
        rows = self.residual.shape[0]
        if not self.kernels:
            normed = self.normed(total, self.residual, gain, bias=bias)
            sums = experts.reference(normed, weights)
        elif rows <= experts.FEW_ROWS:
            if total is None:
                total = self.residual.new_empty(0, *self.residual.shape)
            sums, self.residual = experts.apply_few(
                total, self.residual, gain, weights, self.config.eps, bias
            )
        else:
            packed = experts.packed_rows(rows, weights, self.device)
            normed = self.normed(total, self.residual, gain, packed=packed, bias=bias)
            sums = experts.apply_many(normed, packed, weights)
        return self.reduce(sums)

    def add_normed(self, *parts: tuple[Sums, torch.Tensor]) -> torch.Tensor:
        """Norm partial sums [S, T, K] with their gains [K], and add them: fp32 [1, T, K]."""
        total = torch.zeros_like(self.residual)
        for y, gain in parts:
            self.normed(self.total(y), total, None, gain)
        return total[None]

    def with_gate(self, y: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Join partial sums y [S, T, K] and `other` [T, K] to gate and up: [1, T, 2K] fp32."""
        return torch.cat((y.float().sum(0), other.float()), 1)[None]

    def remaining_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of x [.., T, K] that the step has not dropped."""
        if x.shape[-2] == self.tokens:
            return x
        assert self.inputs.logits_indices is not None
        return x[..., self.inputs.logits_indices, :]

    @property
    def embedding_scale(self) -> float:
        """Factor of embeddings, rounded to the model's dtype if the reference implementation rounds it."""
        # Reference implementations of post-normed families round it.
        if not self.config.family.post_normed:
            return self.config.embedding_scale
        return float(torch.tensor(self.config.embedding_scale, dtype=self.dtype))

    def embed_residual(self, table: torch.Tensor) -> None:
        """Set the residual to rows of the table [vocabulary, K]."""
        self.residual.copy_(self.embedded(table))
        if self.config.embedding_scale != 1.0:
            self.residual.mul_(self.embedding_scale)

    def embed_inputs(self, inputs: LayerInputs, table: torch.Tensor) -> torch.Tensor:
        """Combine a second embedding and a projection of the first one: [T, L, P] in the model's dtype.

        Reads the table, not the residual, because the first gemm may not have written that yet."""
        gemma = self.config.gemma
        ids = self.inputs.ids.long()
        assert gemma is not None
        shape = self.tokens, self.config.layers, gemma.input_columns
        scale = float(torch.tensor(gemma.input_columns**0.5, dtype=self.dtype))
        # Tokens of images and sounds have no row. They use row 0 by a product, because `where` would copy its 0
        # to the device, and graphs cannot capture that.
        rows = ids * (ids < gemma.input_vocabulary)
        embedded = inputs.table[rows].view(shape).float() * scale
        x = (self.embedded(table).float() * self.embedding_scale).to(self.dtype)
        projected = dense_gemm(x, inputs.projection, kernels=self.kernels).view(shape).float()
        # The reference divides the projection by the root of the hidden columns. A norm cancels such a factor,
        # except in its eps.
        eps = self.config.eps * self.config.hidden
        inverse = torch.rsqrt(projected.square().mean(-1, keepdim=True) + eps)
        mixed = projected * inverse * inputs.norm.float() + embedded
        return (mixed * _HALF_POWER).to(self.dtype)

    def finish(
        self,
        y: Sums,
        gain: torch.Tensor,
        post: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """Like add_norm, but return only the last states [P, K] that the head reads."""
        residual = self.residual
        y = self.total(y)
        if self.logits_indices is not None:
            residual = residual[self.logits_indices]
            y = y[:, self.logits_indices].contiguous()
        return self.normed(y, residual, gain, post, scale=scale)

    def normed(
        self,
        y: torch.Tensor | None,
        residual: torch.Tensor,
        gain: torch.Tensor | None,
        post: torch.Tensor | None = None,
        packed: w4_activations.HalfRows | None = None,
        bias: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """Add y to the residual in place, and norm the sum: rows [T, K] in the model's dtype.

        `gain`: None leaves the sum as it is. The others: see rms_norm.add_norm."""
        out = torch.empty(residual.shape, dtype=self.dtype, device=self.device)
        add_norm = self.implementation(rms_norm.add_norm, rms_norm.reference)
        add_norm(y, residual, gain, out, self.config.eps, packed, bias, post, scale)
        return out


def _weights_of(norms: HeadNorms | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if norms is None:
        return None, None
    return norms.q, norms.k


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x in `dtype`. Values beyond the range of fp16 become its largest number."""
    if dtype == torch.float16:
        x = x.clamp(-65504.0, 65504.0)
    return x.to(dtype)


class DenseLayers(Layers[torch.Tensor]):
    """Layers with activations [T, K] in the model's dtype, for weights of any kinds."""

    def plain(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def embed(self, table: torch.Tensor, gain: torch.Tensor | None) -> torch.Tensor:
        self.embed_residual(table)
        return self.normed(None, self.residual, gain)

    def gemm(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        if isinstance(weight, w8_pack.W8):
            return fp8_int8.gemm(
                x, weight, kernels=self.kernels, rounded=self.config.fp8_activations
            )
        if isinstance(weight, torch.Tensor):
            return dense_sums(x, weight, kernels=self.kernels)
        # An output as wide as the residual is added to it.
        added = weight.features_out == self.config.hidden
        if isinstance(weight, ggml.GgmlWeight):
            # Few rows are those of a prompt that are left in the last layer.
            return ggml.gemm(x, weight, kernels=self.kernels, wide=added, few=False)
        prompts = self.inputs.prefill is not None
        return int4.gemm_of(x, weight, kernels=self.kernels, wide=added, prompts=prompts)

    def attend(self, qkv: torch.Tensor, layer: int, weights: AttentionWeights) -> torch.Tensor:
        return self.continued(self._attended(qkv, layer, weights), layer)

    def _attended(self, qkv: torch.Tensor, layer: int, weights: AttentionWeights) -> torch.Tensor:
        if not self.only_decodes(layer):
            self.store_kv(qkv.contiguous(), layer, weights)
            return self.attention(layer, weights.sinks)
        partials = self.decode_partials(qkv, layer, weights)
        out = torch.empty(partials.sums.shape[1:], dtype=self.dtype, device=self.device)
        decode_attention.merge(partials, out, sinks=weights.sinks)
        return out

    def attend_gated(self, qkvg: torch.Tensor, layer: int, norms: HeadNorms) -> torch.Tensor:
        """Attend like `attend`, and multiply by the sigmoid of gates [H*D], which follow the values."""
        gates = self.config.heads * self.config.head_dim
        attended = self._attended(qkvg[..., :-gates], layer, AttentionWeights(norms=norms))
        out = torch.empty_like(attended)
        heads = attended.view(self.tokens, self.config.heads, self.config.head_dim)
        self.gate(heads, qkvg[..., -gates:], None, out)
        return self.continued(out, layer)

    def add_norm(
        self,
        y: Sums,
        gain: torch.Tensor | None,
        post: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        return self.normed(self.total(y), self.residual, gain, post, scale=scale)

    def gemm_act_mul(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        return self._activated(self.gemm(x, weight))

    def act_mul(self, y: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self._activated(y, self.remaining_rows(other))

    def _activated(self, gate_up: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        """Return act(gate) * up of partial sums [S, T, 2K].

        `up` [T, K]: the partial sums are of the gate alone, [S, T, K]."""
        if not self.kernels:
            if up is not None:
                gate_up = self.with_gate(gate_up, up)
            return _rounded(activation.reference(gate_up, gelu=self.gelu), self.dtype)
        columns = gate_up.shape[2] // 2 if up is None else up.shape[1]
        out = torch.empty(self.tokens, columns, dtype=self.dtype, device=self.device)
        activation.act_and_mul(gate_up, out, gelu=self.gelu, up=up)
        return out
