"""Operations of a decoder layer for one step, over a paged KV cache; architectures are written with them.

Letters: T tokens of the step, S partial sums, N output and K input features, H query heads, J key/value
heads, D head dimension, P tokens whose logits are computed.

A gemm leaves partial sums [S, T, N]; the operation after it adds them up. The residual is fp32 and stays
here. Two classes do the same with different activations: `DenseLayers` keeps [T, K] in the model's dtype,
`PackedLayers` (packed.py) the rows that gemms of packed weights read, with 1/rms left to the gemm
(kernels/int4/activations.py).
Each runs the kernels, or with `kernels` False their plain-torch references: on a CPU, and in tests.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol, TypeVar

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
    rms_norm_post,
    rope,
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
from localchat_cuda.kernels.int4 import pack as w4_pack
from localchat_cuda.layers.head_norms import HeadNorms
from localchat_cuda.layers.output_head import dense_gemm
from localchat_cuda.runner.kv_pages import ModelInputs, Pages, PrefillBatch
from localchat_cuda.weights.formats.weight import Weight
from localchat_cuda.weights.model_weights import LayerInputs

X = TypeVar("X")
_HALF_POWER = 0.5**0.5
"""Keeps the power of a sum of two that have as much."""


class Layers(Protocol[X]):
    """Operations that an architecture's forward pass calls. `X`: activations that a gemm reads."""

    def embed(self, table: torch.Tensor, gain: torch.Tensor | None) -> X:
        """Set the residual to rows of the table [vocabulary, K]; norm it with `gain` [K], if there is one."""
        ...

    def gemm(self, x: X, weight: Weight) -> torch.Tensor:
        """Partial sums [S, T, N] of x w^T."""
        ...

    def attend(
        self,
        qkv: torch.Tensor,
        layer: int,
        bias: torch.Tensor | None,
        norms: HeadNorms | None,
        sinks: torch.Tensor | None = None,
    ) -> X:
        """Rotate, write keys and values into the pages of `layer`, attend: [T, H*D]. In the last layer [P, H*D]
        if P is small, and everything after it has as many rows."""
        ...

    def norm_latent(self, y: torch.Tensor, gain: torch.Tensor) -> X:
        """Norm the first columns of partial sums [S, T, ..], as many as `gain` [Q] has."""
        ...

    def attend_latent(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        gain: torch.Tensor,
        kv: torch.Tensor,
        layer: int,
    ) -> X:
        """As `attend`, over latents (kernels/latent.py): of partial sums q [S, T, H*(N+E)] and `latents`
        [S, T, ..], which end with the latent and its rotated key. `gain`: of the latent's norm; `kv`: as
        LayerWeights has it. The result has H*V columns."""
        ...

    def add_norm(
        self,
        y: torch.Tensor,
        gain: torch.Tensor | None,
        post: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> X:
        """Add partial sums (normed with `post` first, if given) to the residual; norm the sum with `gain`.
        Where there is a `post`, the sum is multiplied by `scale`, and not normed without `gain`."""
        ...

    def gemm_act_mul(self, x: X, weight: Weight) -> X:
        """act(gate) * up of x w^T: [T, K] from a weight of 2K features, gate first."""
        ...

    def run_experts(
        self,
        y: torch.Tensor | None,
        gain: torch.Tensor,
        weights: experts.Experts,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add partial sums, if any, and their bias to the residual, norm the sum with `gain`, and compute the
        experts of each row: partial sums [S, T, K]."""
        ...

    def add_normed(self, *parts: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Sum [1, T, K] in fp32 of partial sums [S, T, K], each normed with its gain [K]."""
        ...

    def embed_inputs(self, inputs: LayerInputs, table: torch.Tensor) -> torch.Tensor:
        """What layers read of a second embedding, and of the first one's table: [T, L, P] in the model's dtype.
        Not of the residual, which a first gemm may still have to write."""
        ...

    def act_mul(self, y: torch.Tensor, other: torch.Tensor) -> X:
        """act(y) * other, of partial sums y [S, T, K] and `other` [T, K]."""
        ...

    def finish(
        self,
        y: torch.Tensor,
        gain: torch.Tensor,
        post: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """As add_norm, but only the last states [P, K] that the head reads."""
        ...


class LayersBase:
    """Attention and the end of a step, which both kinds of layers share."""

    def __init__(
        self, config: ModelConfig, inputs: ModelInputs, pages: Pages, *, kernels: bool
    ) -> None:
        self.config = config
        self.inputs = inputs
        self.pages = pages
        self.kernels = kernels
        self.device = pages.device
        self.dtype = pages.dtype
        self.tokens = inputs.ids.shape[0]
        self.logits_indices = inputs.logits_indices
        """Tokens whose last states are needed; None: all that rows are left of."""
        self.residual = torch.empty(self.tokens, config.hidden, device=self.device)
        self._queries: dict[int, torch.Tensor] = {}
        self._dequantized: kv_fp8_dequant.DequantizedPages | None = None
        self.taps: tuple[int, ...] = ()
        """Layers before which the states are kept, in `tapped`: [T, hidden] in the model's dtype, by layer."""
        self.tapped: dict[int, torch.Tensor] = {}

    def tap(self, layer: int) -> None:
        """Keep the states before a layer that computes its first gemm, if they are wanted."""
        if layer in self.taps:
            self.tapped[layer] = _rounded(self.residual, self.dtype).clone()

    def store_kv(
        self, qkv: torch.Tensor, layer: int, bias: torch.Tensor | None, norms: HeadNorms | None
    ) -> None:
        """Rotate queries into those of the layer, and keys into their pages together with the values."""
        self.tap(layer)
        pages = self.pages.layer(layer)
        if norms is not None and norms.q.shape[0] != self.config.head_dim_of(layer):
            normed = torch.empty(1, self.tokens, qkv.shape[2], device=self.device)
            normalize = qk_norm.normalize if self.kernels else qk_norm.reference
            normalize(qkv, norms.q, norms.k, normed[0], self.config.eps)
            qkv = normed
            norms = None
        call = rope.rope_store if self.kernels else rope.reference
        call(
            qkv,
            self.pages.angles(layer),
            self.inputs.positions,
            self.inputs.slots,
            self._tables(layer),
            self.queries(layer),
            pages.k,
            pages.v,
            bias=bias,
            q_norm=norms.q if norms else None,
            k_norm=norms.k if norms else None,
            v_norm=norms is not None and norms.values,
            eps=self.config.eps,
            columns=self.config.rotation.columns,
            exponents=pages.exponents,
        )

    def _tables(self, layer: int) -> torch.Tensor:
        """Block tables of the pages of a layer."""
        inputs = self.inputs
        if self.pages.windowed(layer):
            return inputs.window_tables
        return inputs.block_tables

    def _batch(self, batch: AttentionBatch, layer: int) -> AttentionBatch:
        """Sequences of the step with the block tables of a layer."""
        if not self.pages.windowed(layer):
            return batch
        return replace(batch, tables=self.inputs.window_tables)

    def queries(self, layer: int) -> torch.Tensor:
        """Room for the queries of a layer, [T, H, D]: layers of one head dimension share it."""
        d = self.config.head_dim_of(layer)
        if d not in self._queries:
            self._queries[d] = torch.empty(
                self.tokens, self.config.heads, d, dtype=self.dtype, device=self.device
            )
        return self._queries[d]

    def normed_latent(self, y: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        """The norm [T, Q] of the first columns of partial sums, in the model's dtype."""
        out = torch.empty(self.tokens, len(gain), dtype=self.dtype, device=self.device)
        (latent.norm if self.kernels else latent.norm_reference)(y, gain, out, LATENT_EPS)
        return out

    def latent_attention(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        gain: torch.Tensor,
        kv: torch.Tensor,
        layer: int,
    ) -> torch.Tensor:
        """Attention over latents, [T, H*V] in the model's dtype."""
        self.tap(layer)
        shape = self.config.latent
        queries = self.queries(layer)
        assert shape is not None
        plain, out = (
            torch.empty(self.tokens, self.config.heads, n, dtype=self.dtype, device=self.device)
            for n in (shape.plain, shape.value)
        )
        (latent.store if self.kernels else latent.store_reference)(
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
        # Batches of products, one a head, for which the library has kernels for any number of rows. They read
        # 2 % of what a token of DeepSeek-V2-Lite reads, 7 % of GLM-4.7-Flash: no kernel of our own, so far.
        by_head = plain.transpose(0, 1), queries[..., : shape.kv_rank].transpose(0, 1)
        torch.bmm(by_head[0], kv[:, : shape.plain], out=by_head[1])
        found = self.attention(layer, None).view(self.tokens, -1, shape.kv_rank).transpose(0, 1)
        torch.bmm(found, kv[:, shape.plain :].transpose(1, 2), out=out.transpose(0, 1))
        return out.view(self.tokens, -1)

    def decode_attention(
        self, rules: attention_reference.Rules, layer: int
    ) -> decode_attention.Partials:
        """Attention of the decode part, which comes first."""
        part = self.inputs.decode
        assert part is not None
        k, v, exponents = self.pages.layer(layer)
        q = self.queries(layer)[: part.tokens]
        partials = decode_attention.Partials.empty(
            part.splits, part.tokens, q.shape[1], self.config.value_dim_of(layer), self.device
        )
        decode_attention.attend(
            q,
            k,
            v,
            self._batch(part.batch, layer),
            part.widest,
            partials,
            rules,
            exponents=exponents,
        )
        return partials

    def only_decodes(self, layer: int) -> bool:
        """True if kernels run, and all rows of the step are the decode part's and stay."""
        decode = self.inputs.decode
        all_rows = decode is not None and decode.tokens == self.tokens
        return self.kernels and all_rows and not self.drops_rows(layer)

    def decode_partials(
        self,
        qkv: torch.Tensor,
        layer: int,
        bias: torch.Tensor | None,
        norms: HeadNorms | None,
        sinks: torch.Tensor | None,
    ) -> Partials:
        """Store keys and values and attend, in a step that only decodes."""
        part = self.inputs.decode
        pages = self.pages.layer(layer)
        config = self.config
        assert part is not None
        rules = self.rules(layer, sinks)
        d = config.head_dim_of(layer)
        headed = norms is None or (norms.q.shape[0] == d and not norms.values)
        fused = part.one_page and decode_fused.serves(
            qkv, config.heads, d, pages.k, pages.exponents
        )
        if not (headed and fused):
            self.store_kv(qkv.contiguous(), layer, bias, norms)
            return self.decode_attention(rules, layer)
        self.tap(layer)
        partials = Partials.empty(part.splits, part.tokens, config.heads, d, self.device)
        decode_fused.store_and_attend(
            qkv,
            self.pages.angles(layer),
            pages.k,
            pages.v,
            self._batch(part.batch, layer),
            partials,
            rules,
            dtype=self.dtype,
            bias=bias,
            q_norm=norms.q if norms else None,
            k_norm=norms.k if norms else None,
            eps=config.eps,
            columns=config.rotation.columns,
        )
        return partials

    def rules(self, layer: int, sinks: torch.Tensor | None) -> attention_reference.Rules:
        """Scale, window, soft cap and sinks of a layer's attention."""
        config = self.config
        return attention_reference.Rules(
            config.attention_scale, config.window(layer), config.attention_cap, sinks
        )

    def attention(self, layer: int, sinks: torch.Tensor | None) -> torch.Tensor:
        """Attention of all sequences, [T, H*D] in the model's dtype."""
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
        decode = self.inputs.decode
        prefill = self.inputs.prefill
        if decode is not None:
            partials = self.decode_attention(rules, layer)
            decode_attention.merge(partials, flat[: decode.tokens], sinks=sinks)
        if prefill is not None:
            self.prefill_attention(prefill, rules, layer, out)
        return flat

    def prefill_attention(
        self, part: PrefillBatch, rules: attention_reference.Rules, layer: int, out: torch.Tensor
    ) -> None:
        """Attention of the prompt chunks, into their rows of `out` [T, H, D]."""
        k, v, exponents = self.pages.layer(layer)
        batch = self._batch(part.batch, layer)
        sources = part.dequant_pages
        if sources is not None and exponents is not None:
            if self._dequantized is None:  # one for all layers: each reads what it has just written
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
        """True if this layer's attention is followed only by rows whose logits are computed.

        So it is in the last layer, if they are at most half of all rows. Of 28 layers that saves a prompt a
        28th of the work after attention."""
        last = layer == self.config.layers - 1
        indices = self.logits_indices
        return last and indices is not None and 2 * indices.shape[0] <= self.tokens

    def drop_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of x [T, K] whose logits are computed; the residual keeps the same ones."""
        indices = self.logits_indices
        self.logits_indices = None
        assert indices is not None
        self.tokens = indices.shape[0]
        self.residual = self.residual[indices]
        return x[indices]

    def run_experts(
        self,
        y: torch.Tensor | None,
        gain: torch.Tensor,
        weights: experts.Experts,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not self.kernels:
            return experts.reference(self.normed(y, self.residual, gain, bias=bias), weights)
        rows = self.residual.shape[0]
        if rows <= experts.FEW_ROWS:
            y = self.residual.new_empty(0, *self.residual.shape) if y is None else y
            found, self.residual = experts.apply_few(
                y, self.residual, gain, weights, self.config.eps, bias
            )
            return found
        packed = experts.packed_rows(rows, weights, self.device)
        return experts.apply_many(
            self.normed(y, self.residual, gain, packed=packed, bias=bias), packed, weights
        )

    def add_normed(self, *parts: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        found = torch.zeros_like(self.residual)
        for y, gain in parts:
            self.normed(y, found, None, gain)
        return found[None]

    def with_gate(self, y: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Gate and up [1, T, 2K] fp32: partial sums y [S, T, K], and `other` [T, K]."""
        return torch.cat((y.float().sum(0), other.float()), 1)[None]

    def kept(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of x [.., T, K] that are left, of a step whose other rows may have been dropped."""
        if x.shape[-2] == self.tokens:
            return x
        assert self.inputs.logits_indices is not None
        return x[..., self.inputs.logits_indices, :]

    @property
    def embedding_scale(self) -> float:
        """Rounded to the model's dtype where its reference implementation does that."""
        if not self.config.rounds_embedding_scale:
            return self.config.embedding_scale
        return float(torch.tensor(self.config.embedding_scale, dtype=self.dtype))

    def embed_residual(self, table: torch.Tensor) -> None:
        """Set the residual to rows of the table [vocabulary, K]."""
        self.residual.copy_(table[self.inputs.ids.long()])
        if self.config.embedding_scale != 1.0:
            self.residual.mul_(self.embedding_scale)

    def embed_inputs(self, inputs: LayerInputs, table: torch.Tensor) -> torch.Tensor:
        own = self.config.gemma
        ids = self.inputs.ids.long()
        assert own is not None
        shape = self.tokens, self.config.layers, own.input_columns
        scale = float(torch.tensor(own.input_columns**0.5, dtype=self.dtype))
        # Tokens that stand for images and sounds have no row of their own; `where` would copy its 0 to the
        # device, which no graph can capture.
        held = inputs.table[ids * (ids < own.input_vocabulary)].view(shape).float() * scale
        x = (table[ids].float() * self.embedding_scale).to(self.dtype)
        projected = dense_gemm(x, inputs.projection, kernels=self.kernels).view(shape).float()
        # The projection is divided by the root of the hidden columns, which a norm notices by its eps alone.
        eps = self.config.eps * self.config.hidden
        inverse = torch.rsqrt(projected.square().mean(-1, keepdim=True) + eps)
        mixed = projected * inverse * inputs.norm.float() + held
        return (mixed * _HALF_POWER).to(self.dtype)

    def finish(
        self,
        y: torch.Tensor,
        gain: torch.Tensor,
        post: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        residual = self.residual
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
        """Add y to the residual in place, and norm the sum: rows [T, K] in the model's dtype. `packed`, `bias`:
        as rms_norm.add_norm has them; `scale`: as rms_norm_post.post_norm has it. Without `gain` the sum is not
        normed: of y and `post`, or of neither."""
        out = torch.empty(residual.shape, dtype=self.dtype, device=self.device)
        eps = self.config.eps
        if y is not None and post is not None:
            both = rms_norm_post.post_norm if self.kernels else rms_norm_post.reference
            both(y, residual, post, gain, out, eps, scale)
        elif gain is not None:
            call = rms_norm.add_norm if self.kernels else rms_norm.reference
            call(y, residual, gain, out, eps, packed, bias)
        else:
            assert y is None, "partial sums without a norm"
            out.copy_(residual)
        return out


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in `dtype`, values beyond the range of fp16 as its ends."""
    return (x.clamp(-65504.0, 65504.0) if dtype == torch.float16 else x).to(dtype)


class DenseLayers(LayersBase):
    """Activations [T, K] in the model's dtype, for weights of any kind, also mixed."""

    def embed(self, table: torch.Tensor, gain: torch.Tensor | None) -> torch.Tensor:
        self.embed_residual(table)
        return self.normed(None, self.residual, gain)

    def gemm(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        if isinstance(weight, w8_pack.W8):
            return fp8_int8.gemm(
                x, weight, kernels=self.kernels, rounded=self.config.fp8_activations
            )
        if isinstance(weight, torch.Tensor):
            return dense_gemm(x, weight, kernels=self.kernels)[None]
        # What is added to the residual is as wide.
        added = weight.features_out == self.config.hidden
        if isinstance(weight, ggml.GgmlWeight):
            return ggml.gemm(x, weight, kernels=self.kernels, wide=added)
        return int4.gemm_of(x, weight, kernels=self.kernels, wide=added)

    def attend(
        self,
        qkv: torch.Tensor,
        layer: int,
        bias: torch.Tensor | None,
        norms: HeadNorms | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = self._attended(qkv, layer, bias, norms, sinks)
        return self.drop_rows(out) if self.drops_rows(layer) else out

    def _attended(
        self,
        qkv: torch.Tensor,
        layer: int,
        bias: torch.Tensor | None,
        norms: HeadNorms | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        if not self.only_decodes(layer):
            self.store_kv(qkv.contiguous(), layer, bias, norms)
            return self.attention(layer, sinks)
        partials = self.decode_partials(qkv, layer, bias, norms, sinks)
        out = torch.empty(partials.sums.shape[1:], dtype=self.dtype, device=self.device)
        decode_attention.merge(partials, out, sinks=sinks)
        return out

    def norm_latent(self, y: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return self.normed_latent(y, gain)

    def attend_latent(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        gain: torch.Tensor,
        kv: torch.Tensor,
        layer: int,
    ) -> torch.Tensor:
        out = self.latent_attention(q, latents, gain, kv, layer)
        return self.drop_rows(out) if self.drops_rows(layer) else out

    def attend_gated(self, qkvg: torch.Tensor, layer: int, norms: HeadNorms) -> torch.Tensor:
        """As `attend`, of sums with a gate [H*D] after the values, whose sigmoid multiplies the result."""
        gates = self.config.heads * self.config.head_dim
        found = self._attended(qkvg[..., :-gates], layer, None, norms, None)
        out = torch.empty_like(found)
        heads = found.view(self.tokens, self.config.heads, self.config.head_dim)
        self._gate(heads, qkvg[..., -gates:], None, out)
        return self.drop_rows(out) if self.drops_rows(layer) else out

    def run_delta_net(
        self,
        x: torch.Tensor,
        linears: Mapping[str, Weight],
        weights: delta_net.DeltaNetWeights,
        layer: int,
    ) -> torch.Tensor:
        """Compute the gemms `qkvz` and `ba` of a delta net (one `qkvz` may hold both), change the states of
        `layer`, and norm the output: [T, H*V], rows as in `attend`."""
        self.tap(layer)
        shape = self.config.delta_net
        states = self.pages.states
        inputs = self.inputs
        assert shape is not None
        assert states is not None
        assert inputs.tokens is not None
        qkvz = self.gemm(x, linears["qkvz"])
        ba = self.gemm(x, linears["ba"]) if "ba" in linears else qkvz[..., shape.columns :]
        projection = delta_net.Projection(qkvz, ba)
        own = states.layer(layer)
        out = torch.empty(
            self.tokens, shape.value_heads, shape.value_dim, dtype=self.dtype, device=self.device
        )
        if self.kernels:
            decode = None if inputs.decode is None else inputs.decode.batch
            delta_net.apply(
                projection, weights, own, inputs.tokens, decode, self._chunked_part(), out
            )
        else:
            delta_net.reference(projection, weights, own, inputs.tokens, inputs.batch, out)
        normed = torch.empty(self.tokens, shape.values, dtype=self.dtype, device=self.device)
        self._gate(out, qkvz[..., shape.channels : shape.columns], weights.norm, normed)
        if self.drops_rows(layer):
            return self.drop_rows(normed)
        return normed

    def _chunked_part(self) -> delta_net.ChunkedPart | None:
        prefill = self.inputs.prefill
        if prefill is None or prefill.chunks is None:
            return None
        return delta_net.ChunkedPart(prefill.batch, prefill.chunks)

    def _gate(
        self, x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        call = gated_norm.gate if self.kernels else gated_norm.reference
        call(x, z, weight, out, self.config.eps)

    def add_norm(
        self,
        y: torch.Tensor,
        gain: torch.Tensor | None,
        post: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        return self.normed(y, self.residual, gain, post, scale=scale)

    def gemm_act_mul(
        self, x: torch.Tensor, weight: Weight, cutoff: float | None = None
    ) -> torch.Tensor:
        """`cutoff`: of gates, as activation.act_and_mul has it."""
        if isinstance(weight, w4_pack.W4):
            found = int4.gemm_of(x, weight, kernels=self.kernels)
            return self._activated(found, cutoff=cutoff)
        return self._activated(self.gemm(x, weight), cutoff=cutoff)

    def act_mul(self, y: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self._activated(y, self.kept(other))

    def _activated(
        self, gate_up: torch.Tensor, up: torch.Tensor | None = None, cutoff: float | None = None
    ) -> torch.Tensor:
        """act(gate) * up of partial sums [S, T, 2K], or of those of gate [S, T, K] alone and `up` [T, K]."""
        gelu = self.config.activation == "gelu_tanh"
        if not self.kernels:
            both = gate_up if up is None else self.with_gate(gate_up, up)
            return _rounded(activation.reference(both, gelu=gelu, cutoff=cutoff), self.dtype)
        columns = gate_up.shape[2] // 2 if up is None else up.shape[1]
        out = torch.empty(self.tokens, columns, dtype=self.dtype, device=self.device)
        activation.act_and_mul(gate_up, out, gelu=gelu, up=up, cutoff=cutoff)
        return out
