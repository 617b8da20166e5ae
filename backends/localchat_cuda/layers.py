"""Operations of a decoder layer for one step, over a paged KV cache; architectures are written with them.

Letters: T tokens of the step, S partial sums, N output and K input features, H query heads, J key/value
heads, D head dimension, P tokens whose logits are computed.

A gemm leaves partial sums [S, T, N]; the operation after it adds them up. The residual is fp32 and stays
here. Two classes do the same with different activations: `DenseLayers` keeps [T, K] in the model's dtype,
`PackedLayers` the rows that gemms of packed weights read, with 1/rms left to the gemm
(kernels/int4/activations.py).
Each runs the kernels, or with `kernels` False their plain-torch references: on a CPU, and in tests.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

import torch

from localchat_cuda.kernels import (
    activation,
    delta_net,
    experts,
    fp8_int8,
    ggml,
    int4,
    qk_norm,
    rms_norm,
    rms_norm_post,
    rope,
    skinny_gemm,
)
from localchat_cuda.kernels.attention import decode as decode_attention
from localchat_cuda.kernels.attention import kv_fp8_dequant
from localchat_cuda.kernels.attention import prefill as prefill_attention
from localchat_cuda.kernels.attention import reference as attention_reference
from localchat_cuda.kernels.delta_net import gated_norm
from localchat_cuda.kernels.fp8_int8 import pack as w8_pack
from localchat_cuda.kernels.int4 import activations as w4_activations
from localchat_cuda.kernels.int4 import pack as w4_pack
from localchat_cuda.model_config import ModelConfig
from localchat_cuda.runner.kv_pages import ModelInputs, Pages, PrefillBatch
from localchat_cuda.weights.formats.weight import Weight

X = TypeVar("X")


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights of the norms of queries and keys: [D] per head, or [H*D] and [J*D] of all heads together."""

    q: torch.Tensor
    k: torch.Tensor


class Layers(Protocol[X]):
    """Operations that an architecture's forward pass calls. `X`: activations that a gemm reads."""

    def embed(self, table: torch.Tensor, gain: torch.Tensor | None) -> X:
        """Set the residual to rows of the table [vocabulary, K]; norm it with `gain` [K], if there is one."""
        ...

    def gemm(self, x: X, weight: Weight) -> torch.Tensor:
        """Partial sums [S, T, N] of x w^T."""
        ...

    def attend(
        self, qkv: torch.Tensor, layer: int, bias: torch.Tensor | None, norms: HeadNorms | None,
        sinks: torch.Tensor | None = None,
    ) -> X:  # fmt: skip
        """Rotate, write keys and values into the pages of `layer`, attend: [T, H*D]. In the last layer [P, H*D]
        if P is small, and everything after it has as many rows."""
        ...

    def add_norm(
        self, y: torch.Tensor, gain: torch.Tensor | None, post: torch.Tensor | None = None
    ) -> X:
        """Add partial sums (normed with `post` first, if given) to the residual; norm the sum with `gain`.
        Without `gain`, where there is a `post`, the sum is not normed."""
        ...

    def gemm_act_mul(self, x: X, weight: Weight) -> X:
        """act(gate) * up of x w^T: [T, K] from a weight of 2K features, gate first."""
        ...

    def run_experts(
        self, y: torch.Tensor, gain: torch.Tensor, weights: experts.Experts,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Add partial sums and their bias to the residual, norm the sum with `gain`, and compute the experts of
        each row: partial sums [S, T, K]."""
        ...

    def finish(
        self, y: torch.Tensor, gain: torch.Tensor, post: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As add_norm, but only the last states [P, K] that the head reads."""
        ...


class _LayersBase:
    """Attention and the end of a step, which both kinds of layers share."""

    def __init__(
        self, config: ModelConfig, inputs: ModelInputs, pages: Pages, *, kernels: bool
    ) -> None:
        self.config, self.inputs, self.pages, self.kernels = config, inputs, pages, kernels
        self.device, self.dtype = pages.device, pages.dtype
        self.tokens = inputs.ids.shape[0]
        self.logits_indices = inputs.logits_indices
        """Tokens whose last states are needed; None: all that rows are left of."""
        self.residual = torch.empty(self.tokens, config.hidden, device=self.device)
        self.q = torch.empty(
            self.tokens, config.heads, config.head_dim, dtype=self.dtype, device=self.device
        )
        self._dequantized: kv_fp8_dequant.DequantizedPages | None = None

    def store_kv(
        self, qkv: torch.Tensor, layer: int, bias: torch.Tensor | None, norms: HeadNorms | None
    ) -> None:
        """Rotate queries into `q`, and keys into their pages together with the values."""
        pages = self.pages.layer(layer)
        if norms is not None and norms.q.shape[0] != self.config.head_dim:
            normed = torch.empty(1, self.tokens, qkv.shape[2], device=self.device)
            normalize = qk_norm.normalize if self.kernels else qk_norm.reference
            normalize(qkv, norms.q, norms.k, normed[0], self.config.eps)
            qkv, norms = normed, None
        call = rope.rope_store if self.kernels else rope.reference
        call(
            qkv, self.pages.angles(layer), self.inputs.positions, self.inputs.slots,
            self.inputs.block_tables,
            self.q, pages.k, pages.v, bias=bias, q_norm=norms.q if norms else None,
            k_norm=norms.k if norms else None, eps=self.config.eps,
            columns=self.config.rotation.columns, exponents=pages.exponents,
        )  # fmt: skip

    def decode_attention(
        self, rules: attention_reference.Rules, layer: int
    ) -> decode_attention.Partials:
        """Attention of the decode part, which comes first."""
        part = self.inputs.decode
        assert part is not None
        k, v, exponents = self.pages.layer(layer)
        heads, d = self.config.heads, self.config.head_dim
        partials = decode_attention.Partials.empty(part.splits, part.tokens, heads, d, self.device)
        decode_attention.attend(
            self.q[: part.tokens],
            k,
            v,
            part.batch,
            part.widest,
            partials,
            rules,
            exponents=exponents,
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
            out = attention_reference.reference(self.q, k, v, self.inputs.batch, rules, exponents)
            return out.view(self.tokens, -1).to(self.dtype)
        out = torch.empty_like(self.q)
        flat = out.view(self.tokens, -1)
        decode, prefill = self.inputs.decode, self.inputs.prefill
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
        batch, sources = part.batch, part.dequant_pages
        if sources is not None and exponents is not None:
            if self._dequantized is None:  # one for all layers: each reads what it has just written
                self._dequantized = kv_fp8_dequant.DequantizedPages.empty(
                    sources.shape[0], k.shape[1], k.shape[2], self.config.head_dim, self.dtype,
                    batch.tables,
                )  # fmt: skip
            kv_fp8_dequant.dequantize(k, v, exponents, batch.tables, sources, self._dequantized)
            batch = self._dequantized.batch(batch)
            k, v, exponents = self._dequantized.pool[:, 0], self._dequantized.pool[:, 1], None
        prefill_attention.attend(
            self.q, k, v, batch, part.tiles, out, rules, exponents=exponents,
            config=part.tile_config,
        )  # fmt: skip

    def drops_rows(self, layer: int) -> bool:
        """True if this layer's attention is followed only by rows whose logits are computed.

        So it is in the last layer, if they are at most half of all rows. Of 28 layers that saves a prompt a
        28th of the work after attention."""
        last = layer == self.config.layers - 1
        indices = self.logits_indices
        return last and indices is not None and 2 * indices.shape[0] <= self.tokens

    def drop_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of x [T, K] whose logits are computed; the residual keeps the same ones."""
        indices, self.logits_indices = self.logits_indices, None
        assert indices is not None
        self.tokens, self.residual = indices.shape[0], self.residual[indices]
        return x[indices]

    def run_experts(
        self, y: torch.Tensor, gain: torch.Tensor, weights: experts.Experts,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        if not self.kernels:
            return experts.reference(self.normed(y, self.residual, gain, bias=bias), weights)
        rows = self.residual.shape[0]
        if rows <= experts.FEW_ROWS:
            found, self.residual = experts.apply_few(
                y, self.residual, gain, weights, self.config.eps, bias
            )
            return found
        packed = experts.packed_rows(rows, weights, self.device)
        return experts.apply_many(
            self.normed(y, self.residual, gain, packed=packed, bias=bias), packed, weights
        )

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

    def finish(
        self, y: torch.Tensor, gain: torch.Tensor, post: torch.Tensor | None = None
    ) -> torch.Tensor:
        residual = self.residual
        if self.logits_indices is not None:
            residual = residual[self.logits_indices]
            y = y[:, self.logits_indices].contiguous()
        return self.normed(y, residual, gain, post)

    def normed(
        self, y: torch.Tensor | None, residual: torch.Tensor, gain: torch.Tensor | None,
        post: torch.Tensor | None = None, packed: w4_activations.HalfRows | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Add y to the residual in place, and norm the sum: rows [T, K] in the model's dtype. `packed`, `bias`:
        as rms_norm.add_norm has them. Without `gain` the sum is not normed: of y and `post`, or of neither."""
        out = torch.empty(residual.shape, dtype=self.dtype, device=self.device)
        eps = self.config.eps
        if y is not None and post is not None:
            both = rms_norm_post.post_norm if self.kernels else rms_norm_post.reference
            both(y, residual, post, gain, out, eps)
        elif gain is not None:
            call = rms_norm.add_norm if self.kernels else rms_norm.reference
            call(y, residual, gain, out, eps, packed, bias)
        else:
            assert y is None, "partial sums without a norm"
            out.copy_(residual)
        return out


def compute_logits(
    x: torch.Tensor,
    head: torch.Tensor | w8_pack.W8 | ggml.GgmlWeight,
    cap: float = 0.0,
    *,
    kernels: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits fp32 [P, vocabulary] of last states x [P, K], with `cap` as in ModelConfig.head_cap. `out`: where
    to write them.

    2 to 64 rows go through the library on a GPU (259 to 273 us for 152,064 x 3,584 on an H200, against 293 to
    351 of our kernel inside a step)."""
    if isinstance(head, w8_pack.W8):
        found = fp8_int8.logits(x, head, kernels=kernels, out=out)
    elif isinstance(head, ggml.GgmlWeight):
        found = ggml.logits(x, head, kernels=kernels, out=out)
    elif kernels and x.is_cuda and x.shape[0] > 1 and x.dtype != torch.float32:
        found = torch.mm(x, head.t(), out_dtype=torch.float32, out=out)
    else:
        found = _dense_gemm(x, head, kernels=kernels, out=out).float()
    if out is not None and found.data_ptr() != out.data_ptr():
        found = out.copy_(found)
    return found.div_(cap).tanh_().mul_(cap) if cap else found


def _dense_gemm(
    x: torch.Tensor, weight: torch.Tensor, *, kernels: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x w^T: in fp32 from the kernel and the reference, in the model's dtype from the library. `out`: where the
    kernel writes."""
    rows = x.shape[0]
    if not kernels:
        return skinny_gemm.reference(x, weight)
    if not 1 <= rows <= skinny_gemm.MAX_ROWS or x.dtype == torch.float32:
        return torch.matmul(x, weight.t())
    if out is None:
        out = torch.empty(rows, weight.shape[0], device=x.device)
    skinny_gemm.gemm(x, weight, out)
    return out


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in `dtype`, values beyond the range of fp16 as its ends."""
    return (x.clamp(-65504.0, 65504.0) if dtype == torch.float16 else x).to(dtype)


class DenseLayers(_LayersBase):
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
            return _dense_gemm(x, weight, kernels=self.kernels)[None]
        # What is added to the residual is as wide.
        added = weight.features_out == self.config.hidden
        if isinstance(weight, ggml.GgmlWeight):
            return ggml.gemm(x, weight, kernels=self.kernels, wide=added)
        return int4.gemm_of(x, weight, kernels=self.kernels, wide=added)

    def attend(
        self, qkv: torch.Tensor, layer: int, bias: torch.Tensor | None, norms: HeadNorms | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        self.store_kv(qkv, layer, bias, norms)
        out = self.attention(layer, sinks)
        return self.drop_rows(out) if self.drops_rows(layer) else out

    def attend_gated(self, qkvg: torch.Tensor, layer: int, norms: HeadNorms) -> torch.Tensor:
        """As `attend`, of sums with a gate [H*D] after the values, whose sigmoid multiplies the result."""
        gates = self.config.heads * self.config.head_dim
        self.store_kv(qkvg[..., :-gates].contiguous(), layer, None, norms)
        found = self.attention(layer, None)
        out = torch.empty_like(found)
        heads = found.view(self.tokens, self.config.heads, self.config.head_dim)
        self._gate(heads, qkvg[..., -gates:], None, out)
        return self.drop_rows(out) if self.drops_rows(layer) else out

    def run_delta_net(
        self, x: torch.Tensor, linears: Mapping[str, Weight], weights: delta_net.DeltaNetWeights,
        layer: int,
    ) -> torch.Tensor:  # fmt: skip
        """Compute the gemms `qkvz` and `ba` of a delta net (one `qkvz` may hold both), change the states of
        `layer`, and norm the output: [T, H*V], rows as in `attend`."""
        shape, states, inputs = self.config.delta_net, self.pages.states, self.inputs
        assert shape is not None
        assert states is not None
        assert inputs.tokens is not None
        qkvz = self.gemm(x, linears["qkvz"])
        ba = self.gemm(x, linears["ba"]) if "ba" in linears else qkvz[..., shape.columns :]
        projection, own = delta_net.Projection(qkvz, ba), states.layer(layer)
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
        return self.drop_rows(normed) if self.drops_rows(layer) else normed

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
        self, y: torch.Tensor, gain: torch.Tensor | None, post: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.normed(y, self.residual, gain, post)

    def gemm_act_mul(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        gelu = self.config.activation == "gelu_tanh"
        if isinstance(weight, w4_pack.W4):
            gate_up = int4.gemm_of(x, weight, kernels=self.kernels)
        else:
            gate_up = self.gemm(x, weight)
        if not self.kernels:
            return _rounded(activation.reference(gate_up, gelu=gelu), self.dtype)
        out = torch.empty(self.tokens, gate_up.shape[2] // 2, dtype=self.dtype, device=self.device)
        activation.act_and_mul(gate_up, out, gelu=gelu)
        return out


PackedWeight: TypeAlias = w4_pack.W4 | ggml.GgmlWeight
"""A weight whose gemms of few rows read packed activations."""


class PackedActivations:
    """Activations of one gemm, written when its weight, and so their order and groups, are known."""

    def __init__(
        self,
        write: Callable[[PackedWeight], w4_activations.Rows],
        squares: torch.Tensor | None = None,
    ) -> None:
        """`squares` [T, K / 128]: sums of squares, from which the gemm takes the rms of a row to divide by."""
        self._write: Callable[[PackedWeight], w4_activations.Rows] | None = write
        self.squares = squares

    def rows(self, weight: PackedWeight) -> w4_activations.Rows:
        """Write them, once: writing may add to the residual. In the order and for the groups of `weight`."""
        write, self._write = self._write, None
        assert write is not None, "a second gemm of the same activations"
        return write(weight)


class PackedLayers(_LayersBase):
    """Activations as gemms of packed weights read them: steps of at most ModelWeights.packed_rows tokens."""

    def __init__(
        self, config: ModelConfig, inputs: ModelInputs, pages: Pages, *, kernels: bool
    ) -> None:
        super().__init__(config, inputs, pages, kernels=kernels)
        self._buffers: dict[tuple[int, int, bool], w4_activations.Rows] = {}

    def embed(self, table: torch.Tensor, gain: torch.Tensor | None) -> PackedActivations:
        if gain is None:
            self.embed_residual(table)
            return self._write_packed("plain", self.residual[None])
        return self._write_packed("embed", table, gain)

    def gemm(self, x: PackedActivations, weight: Weight) -> torch.Tensor:
        assert isinstance(weight, PackedWeight)
        return self._multiply(x.rows(weight), weight, x.squares)

    def _multiply(
        self, rows: w4_activations.Rows, weight: PackedWeight, squares: torch.Tensor | None
    ) -> torch.Tensor:
        eps, kernels = self.config.eps, self.kernels
        if isinstance(weight, w4_pack.W4):
            return int4.gemm(rows, weight, squares=squares, eps=eps, kernels=kernels)
        assert isinstance(rows, w4_activations.Int8Rows)
        return ggml.gemm_rows(rows, weight, squares=squares, eps=eps, kernels=kernels)

    def attend(
        self, qkv: torch.Tensor, layer: int, bias: torch.Tensor | None, norms: HeadNorms | None,
        sinks: torch.Tensor | None = None,
    ) -> PackedActivations:  # fmt: skip
        self.store_kv(qkv, layer, bias, norms)
        decode, drops = self.inputs.decode, self.drops_rows(layer)
        if self.kernels and decode is not None and decode.tokens == self.tokens and not drops:
            # Merging the partial sums writes the rows of the next gemm: one kernel fewer.
            partials = self.decode_attention(self.rules(layer, sinks), layer)

            def merge(reader: PackedWeight) -> w4_activations.Rows:
                rows = self._rows(reader)
                decode_attention.merge(partials, rows, order=reader.order, sinks=sinks)
                return rows

            return PackedActivations(merge)
        out = self.attention(layer, sinks)
        if drops:
            out = self.drop_rows(out)
            self._buffers.clear()
        return self._write_packed("plain", out[None])

    def add_norm(
        self, y: torch.Tensor, gain: torch.Tensor | None, post: torch.Tensor | None = None
    ) -> PackedActivations:
        if gain is None:
            self.normed(y, self.residual, None, post)
            return self._write_packed("plain", self.residual[None])
        if post is None:
            return self._write_packed("norm", y, gain)
        eps, first = self.config.eps, post
        squares = self._squares()
        call = rms_norm_post.prepare if self.kernels else rms_norm_post.prepare_reference

        def write(reader: PackedWeight) -> w4_activations.Rows:
            rows = self._rows(reader)
            call(y, self.residual, first, gain, rows, squares, eps, order=reader.order)
            return rows

        return PackedActivations(write, squares)

    def gemm_act_mul(self, x: PackedActivations, weight: Weight) -> PackedActivations:
        assert isinstance(weight, PackedWeight)
        read = x.rows(weight)
        gelu = self.config.activation == "gelu_tanh"

        def write(reader: PackedWeight) -> w4_activations.Rows:
            rows = self._rows(reader, activated=True)
            if isinstance(weight, w4_pack.W4):
                int4.gemm_silu_mul(
                    read, weight, rows, squares=x.squares, eps=self.config.eps, gelu=gelu,
                    order=reader.order, kernels=self.kernels,
                )  # fmt: skip
                return rows
            sums = self._multiply(read, weight, x.squares)
            call = w4_activations.prepare if self.kernels else w4_activations.reference
            call("act_and_mul", sums, rows, gelu=gelu, order=reader.order)
            return rows

        return PackedActivations(write)

    def _write_packed(
        self,
        mode: w4_activations.Mode,
        source: torch.Tensor,
        gain: torch.Tensor | None = None,
    ) -> PackedActivations:
        call = w4_activations.prepare if self.kernels else w4_activations.reference
        squares = None if gain is None else self._squares()
        embeds = mode == "embed"

        def factor(rows: w4_activations.Rows) -> float:
            if embeds:
                return self.embedding_scale
            scaled = mode == "norm" and isinstance(rows, w4_activations.HalfRows)
            return w4_activations.HALF_RESIDUAL if scaled else 1.0

        def write(reader: PackedWeight) -> w4_activations.Rows:
            rows = self._rows(reader)
            call(
                mode, source, rows, ids=self.inputs.ids if embeds else None,
                residual=None if gain is None else self.residual, weight=gain, squares=squares,
                factor=factor(rows), eps=self.config.eps, order=reader.order,
            )  # fmt: skip
            return rows

        return PackedActivations(write, squares)

    def _squares(self) -> torch.Tensor:
        return torch.empty(self.tokens, self.config.hidden // w4_pack.BLOCK_K, device=self.device)

    def _rows(self, reader: PackedWeight, *, activated: bool = False) -> w4_activations.Rows:
        """One buffer per width and group of the weight that reads it: a gemm has read it before the next kernel
        writes it, and its padding is zeroed once. `activated` rows have buffers of their own: the gemm that
        writes them still reads others, which may be as wide."""
        key = reader.features_in, reader.group, activated
        if key not in self._buffers:
            self._buffers[key] = int4.empty_activations(
                self.tokens, reader.features_in, self.device, reader.group
            )
        return self._buffers[key]
