"""One step's way through the layers: the operations between products, over a paged KV cache.

Letters: T tokens of the step, S partial sums, N output and K input features, H query heads, J key/value
heads, D head dimension, P points (tokens whose logits are wanted).

A product leaves partial sums [S, T, N]; whatever comes next adds them up. The residual is fp32 and stays
here. Two flows do the same with different activations: `DenseFlow` keeps [T, K] in the model's dtype,
`PackedFlow` the rows that the W4 products read, with 1/rms left to the product (kernels/w4_feed.py). Each
runs the kernels, or with `kernels` False their plain-torch references: on a CPU, and in tests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from localchat_cuda.kernels import (
    activation,
    fp8_int8,
    int4,
    rms_norm,
    rms_norm_post,
    rope,
    skinny_gemm,
)
from localchat_cuda.kernels.attention import decode as decode_attention
from localchat_cuda.kernels.attention import kv_fp8_dequant
from localchat_cuda.kernels.attention import prefill as prefill_attention
from localchat_cuda.kernels.attention import reference as attention_reference
from localchat_cuda.kernels.fp8_int8 import pack as w8_pack
from localchat_cuda.kernels.int4 import activations as w4_activations
from localchat_cuda.kernels.int4 import pack as w4_pack
from localchat_cuda.model_config import ModelConfig
from localchat_cuda.runner.kv_pages import ModelInputs, Pages, PrefillBatch
from localchat_cuda.weights.formats.weight import Weight

X = TypeVar("X")


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights [D] that normalize queries and keys per head."""

    q: torch.Tensor
    k: torch.Tensor


class Layers(Protocol[X]):
    """What an architecture is written over. `X`: activations that a product reads."""

    def embed(self, table: torch.Tensor, gain: torch.Tensor) -> X:
        """The residual begins as rows of the table [vocabulary, K]; normed with `gain` [K]."""
        ...

    def product(self, x: X, weight: Weight) -> torch.Tensor:
        """Partial sums [S, T, N] of x w^T."""
        ...

    def attend(
        self, qkv: torch.Tensor, layer: int, bias: torch.Tensor | None, norms: HeadNorms | None
    ) -> X:
        """Rotate, write keys and values into the pages of `layer`, attend: [T, H*D]; in the last layer [P, H*D]
        where few are wanted, and all that follows has as many rows."""
        ...

    def add_norm(self, y: torch.Tensor, gain: torch.Tensor, post: torch.Tensor | None = None) -> X:
        """Add partial sums to the residual, themselves normed with `post` where there is one; the sum normed
        with `gain`."""
        ...

    def gated(self, x: X, weight: Weight) -> X:
        """The model's activation of gate, times up, of x w^T: [T, K] of a weight of 2K features, gate first."""
        ...

    def finish(
        self, y: torch.Tensor, gain: torch.Tensor, post: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As add_norm; the last states [P, K] of the wanted tokens alone: the head reads them."""
        ...


class _LayersBase:
    """Attention and the end of a step, the same in both flows."""

    def __init__(
        self, config: ModelConfig, inputs: ModelInputs, pages: Pages, *, kernels: bool
    ) -> None:
        self.config, self.inputs, self.pages, self.kernels = config, inputs, pages, kernels
        self.device, self.dtype = pages.device, pages.dtype
        self.tokens = inputs.ids.shape[0]
        self.wanted = inputs.wanted
        """Tokens whose last states are wanted; None: all that there are still rows of."""
        self.residual = torch.empty(self.tokens, config.hidden, device=self.device)
        self.q = torch.empty(
            self.tokens, config.heads, config.head_dim, dtype=self.dtype, device=self.device
        )
        self._plain: kv_fp8_dequant.Plain | None = None

    def store(
        self, qkv: torch.Tensor, layer: int, bias: torch.Tensor | None, norms: HeadNorms | None
    ) -> None:
        held = self.pages.layer(layer)
        call = rope.rope_store if self.kernels else rope.reference
        call(
            qkv, self.pages.angles_of(layer), self.inputs.positions, self.inputs.slots, self.inputs.tables,
            self.q, held.k, held.v, bias=bias, q_norm=norms.q if norms else None,
            k_norm=norms.k if norms else None, eps=self.config.eps,
            columns=self.config.rotation.columns, exponents=held.exponents,
        )  # fmt: skip

    def few(self, layer: int) -> decode_attention.Partials:
        """Attention of the sequences with few new tokens, which stand first."""
        work = self.inputs.few
        assert work is not None
        k, v, exponents = self.pages.layer(layer)
        heads, d = self.config.heads, self.config.head_dim
        partials = decode_attention.Partials.empty(work.splits, work.tokens, heads, d, self.device)
        decode_attention.attend(
            self.q[: work.tokens],
            k,
            v,
            work.batch,
            work.widest,
            partials,
            self.rules(layer),
            exponents=exponents,
        )
        return partials

    def rules(self, layer: int) -> attention_reference.Rules:
        """What the attention of a layer does beyond the usual."""
        config = self.config
        return attention_reference.Rules(
            config.attention_scale, config.window(layer), config.attention_cap
        )

    def attention(self, layer: int) -> torch.Tensor:
        """[T, H*D] in the model's dtype."""
        if not self.kernels:
            k, v, exponents = self.pages.layer(layer)
            rules = self.rules(layer)
            out = attention_reference.reference(self.q, k, v, self.inputs.batch, rules, exponents)
            return out.view(self.tokens, -1).to(self.dtype)
        out = torch.empty_like(self.q)
        flat = out.view(self.tokens, -1)
        if self.inputs.few is not None:
            decode_attention.merge(self.few(layer), flat[: self.inputs.few.tokens])
        if self.inputs.many is not None:
            self.many(self.inputs.many, layer, out)
        return flat

    def many(self, work: PrefillBatch, layer: int, out: torch.Tensor) -> None:
        """Attention of the prompt chunks, into their rows of `out` [T, H, D]."""
        k, v, exponents = self.pages.layer(layer)
        batch, sources = work.batch, work.decoded
        if sources is not None and exponents is not None:
            if self._plain is None:  # one for all layers: each reads what it has just decoded
                self._plain = kv_fp8_dequant.Plain.empty(
                    sources.shape[0], k.shape[1], k.shape[2], self.config.head_dim, self.dtype,
                    batch.tables,
                )  # fmt: skip
            kv_fp8_dequant.decode(k, v, exponents, batch.tables, sources, self._plain)
            batch = self._plain.batch(batch)
            k, v, exponents = self._plain.pool[:, 0], self._plain.pool[:, 1], None
        prefill_attention.attend(
            self.q, k, v, batch, work.tiles, out, self.rules(layer), exponents=exponents,
            cut=work.cut,
        )  # fmt: skip

    def ends(self, layer: int) -> bool:
        """Whether only the wanted tokens go on behind the attention of a layer: the last one, where they are at
        most half of all. Of 28 layers that saves a prompt a 28th of what follows attention."""
        last = layer == self.config.layers - 1
        return last and self.wanted is not None and 2 * self.wanted.shape[0] <= self.tokens

    def end(self, x: torch.Tensor) -> torch.Tensor:
        """The wanted ones of rows [T, K]: from here on there are no others."""
        wanted, self.wanted = self.wanted, None
        assert wanted is not None
        self.tokens, self.residual = wanted.shape[0], self.residual[wanted]
        return x[wanted]

    @property
    def embedding_scale(self) -> float:
        """As the model's own arithmetic rounds it."""
        return float(torch.tensor(self.config.embedding_scale, dtype=self.dtype))

    def finish(
        self, y: torch.Tensor, gain: torch.Tensor, post: torch.Tensor | None = None
    ) -> torch.Tensor:
        residual = self.residual
        if self.wanted is not None:
            residual, y = residual[self.wanted], y[:, self.wanted].contiguous()
        return self.normed(y, residual, gain, post)

    def normed(
        self, y: torch.Tensor | None, residual: torch.Tensor, gain: torch.Tensor,
        post: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Rows [T, K] in the model's dtype: y joins the residual, and that is normed."""
        out = torch.empty(residual.shape, dtype=self.dtype, device=self.device)
        eps = self.config.eps
        if y is not None and post is not None:
            both = rms_norm_post.post_norm if self.kernels else rms_norm_post.reference
            both(y, residual, post, gain, out, eps)
        else:
            call = rms_norm.add_norm if self.kernels else rms_norm.reference
            call(y, residual, gain, out, eps)
        return out


def compute_logits(
    x: torch.Tensor, head: torch.Tensor | w8_pack.W8, cap: float = 0.0, *, kernels: bool
) -> torch.Tensor:
    """Logits fp32 [P, vocabulary] of last states x [P, K], `cap` as ModelConfig.head_cap; 2 to 64 rows go
    through the library on a GPU (259 to 273 us for 152,064 x 3,584 on an H200, against 293 to 351 of our
    kernel inside a step)."""
    if isinstance(head, w8_pack.W8):
        found = fp8_int8.logits(x, head, kernels=kernels)
    elif kernels and x.is_cuda and x.shape[0] > 1 and x.dtype != torch.float32:
        found = torch.mm(x, head.t(), out_dtype=torch.float32)
    else:
        found = _dense(x, head, kernels=kernels).float()
    return found.div_(cap).tanh_().mul_(cap) if cap else found


def _dense(x: torch.Tensor, weight: torch.Tensor, *, kernels: bool) -> torch.Tensor:
    """x w^T: fp32 from the kernel and the reference, the model's dtype from the library."""
    rows = x.shape[0]
    if not kernels:
        return skinny_gemm.reference(x, weight)
    if not 1 <= rows <= skinny_gemm.MAX_ROWS or x.dtype == torch.float32:
        return torch.matmul(x, weight.t())
    out = torch.empty(rows, weight.shape[0], device=x.device)
    skinny_gemm.product(x, weight, out)
    return out


class DenseLayers(_LayersBase):
    """Activations [T, K] in the model's dtype, for weights of any kind, of several too."""

    def embed(self, table: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        self.residual.copy_(table[self.inputs.ids.long()])
        if self.config.embedding_scale != 1.0:
            self.residual.mul_(self.embedding_scale)
        return self.normed(None, self.residual, gain)

    def product(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        if isinstance(weight, w8_pack.W8):
            return fp8_int8.product(
                x, weight, kernels=self.kernels, rounded=self.config.fp8_activations
            )
        if not isinstance(weight, w4_pack.W4):
            return _dense(x, weight, kernels=self.kernels)[None]
        return int4.product_of(x, weight, kernels=self.kernels)

    def attend(
        self, qkv: torch.Tensor, layer: int, bias: torch.Tensor | None, norms: HeadNorms | None
    ) -> torch.Tensor:
        self.store(qkv, layer, bias, norms)
        out = self.attention(layer)
        return self.end(out) if self.ends(layer) else out

    def add_norm(
        self, y: torch.Tensor, gain: torch.Tensor, post: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.normed(y, self.residual, gain, post)

    def gated(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        gate_up, gelu = self.product(x, weight), self.config.activation == "gelu_tanh"
        if not self.kernels:
            return activation.reference(gate_up, gelu=gelu).to(self.dtype)
        out = torch.empty(self.tokens, gate_up.shape[2] // 2, dtype=self.dtype, device=self.device)
        activation.gated(gate_up, out, gelu=gelu)
        return out


class Packed:
    """Activations of one W4 product, written when it is known which: in the order in which that weight's
    columns are stored. squares [T, K / 128]: the product divides by the rms of the row."""

    def __init__(
        self,
        write: Callable[[torch.Tensor | None], w4_activations.Rows],
        squares: torch.Tensor | None = None,
    ) -> None:
        self._write: Callable[[torch.Tensor | None], w4_activations.Rows] | None = write
        self.squares = squares

    def rows(self, order: torch.Tensor | None) -> w4_activations.Rows:
        """Write them; once, since that may add to the residual."""
        write, self._write = self._write, None
        assert write is not None, "a second product of the same activations"
        return write(order)


class PackedW4Layers(_LayersBase):
    """Activations as W4 products read them: at most w4.packed_rows tokens, every weight of a layer W4."""

    def __init__(
        self, config: ModelConfig, inputs: ModelInputs, pages: Pages, *, kernels: bool
    ) -> None:
        super().__init__(config, inputs, pages, kernels=kernels)
        self._held: dict[tuple[int, bool], w4_activations.Rows] = {}

    def embed(self, table: torch.Tensor, gain: torch.Tensor) -> Packed:
        return self._feed("embed", table, self.config.hidden, gain)

    def product(self, x: Packed, weight: Weight) -> torch.Tensor:
        assert isinstance(weight, w4_pack.W4)
        return int4.gemm(
            x.rows(weight.order), weight, squares=x.squares, eps=self.config.eps,
            kernels=self.kernels,
        )  # fmt: skip

    def attend(
        self, qkv: torch.Tensor, layer: int, bias: torch.Tensor | None, norms: HeadNorms | None
    ) -> Packed:
        self.store(qkv, layer, bias, norms)
        few, ends = self.inputs.few, self.ends(layer)
        if self.kernels and few is not None and few.tokens == self.tokens and not ends:
            partials = self.few(layer)

            def merge(order: torch.Tensor | None) -> w4_activations.Rows:
                rows = self._rows(self.config.heads * self.config.head_dim)
                decode_attention.merge(partials, rows, order=order)
                return rows

            return Packed(merge)
        out = self.attention(layer)
        if ends:
            out = self.end(out)
            self._held.clear()
        return self._feed("plain", out[None], out.shape[1])

    def add_norm(
        self, y: torch.Tensor, gain: torch.Tensor, post: torch.Tensor | None = None
    ) -> Packed:
        if post is None:
            return self._feed("norm", y, self.config.hidden, gain)
        k, eps, first = self.config.hidden, self.config.eps, post
        squares = self._squares(k)
        call = rms_norm_post.feed if self.kernels else rms_norm_post.feed_reference

        def write(order: torch.Tensor | None) -> w4_activations.Rows:
            rows = self._rows(k)
            call(y, self.residual, first, gain, rows, squares, eps, order=order)
            return rows

        return Packed(write, squares)

    def gated(self, x: Packed, weight: Weight) -> Packed:
        assert isinstance(weight, w4_pack.W4)
        read = x.rows(weight.order)
        gelu = self.config.activation == "gelu_tanh"

        def write(order: torch.Tensor | None) -> w4_activations.Rows:
            rows = self._rows(weight.features_out // 2, activated=True)
            int4.gemm_silu_mul(
                read, weight, rows, squares=x.squares, eps=self.config.eps, gelu=gelu, order=order,
                kernels=self.kernels,
            )  # fmt: skip
            return rows

        return Packed(write)

    def _feed(
        self,
        mode: w4_activations.Mode,
        source: torch.Tensor,
        k: int,
        gain: torch.Tensor | None = None,
    ) -> Packed:
        call = w4_activations.feed if self.kernels else w4_activations.reference
        squares = None if gain is None else self._squares(k)
        embeds = mode == "embed"

        def write(order: torch.Tensor | None) -> w4_activations.Rows:
            rows = self._rows(k)
            call(
                mode, source, rows, ids=self.inputs.ids if embeds else None,
                residual=None if gain is None else self.residual, weight=gain, squares=squares,
                factor=self.embedding_scale if embeds else 1.0, order=order,
            )  # fmt: skip
            return rows

        return Packed(write, squares)

    def _squares(self, k: int) -> torch.Tensor:
        return torch.empty(self.tokens, k // w4_pack.GROUP, device=self.device)

    def _rows(self, k: int, *, activated: bool = False) -> w4_activations.Rows:
        """One buffer for each width: a product has read it before the next kernel writes it, and what pads
        the rows is zeroed once. Not so of what is `activated`: the product itself writes that, and a model may
        be as wide there as what it reads."""
        key = k, activated
        if key not in self._held:
            self._held[key] = int4.empty_rows(self.tokens, k, self.device)
        return self._held[key]
