"""Times a whole decode step of a 7B model without the sampler, in one CUDA graph.

Every kernel runs, layer after layer, on real data flow.
"""

from dataclasses import dataclass, field, replace
from functools import partial

import torch

from localchat_cuda.kernels import int4, rms_norm, rope, skinny_gemm
from localchat_cuda.kernels.attention import decode as decode_attention
from localchat_cuda.kernels.attention import reference as attention_reference
from localchat_cuda.kernels.int4 import activations as w4_activations
from localchat_cuda.kernels.int4 import pack as w4_pack
from localchat_cuda.kernels.int4 import tile_config as w4_tile_config
from localchat_cuda.kernels.int4.row_norm import RowNorm
from scripts.bench.kernels.timing import (
    EPS,
    GPU,
    HEADS,
    HIDDEN,
    KEY_HEADS,
    LAYERS,
    PAGE,
    SHAPES,
    SMS,
    VOCABULARY,
    D,
    Results,
    error,
    random_w4,
    timed,
)


@dataclass
class Cache:
    """KV pages of one layer for `streams` sequences of `length` tokens."""

    pool: torch.Tensor
    batch: attention_reference.AttentionBatch
    positions: torch.Tensor
    length: int

    @staticmethod
    def make(streams: int, length: int, new: int = 1) -> "Cache":
        pages = -(-length // PAGE)
        pool = torch.randn(streams * pages, 2, KEY_HEADS, PAGE, D, device=GPU, dtype=torch.float16)
        tables = torch.randperm(streams * pages, device=GPU).int().view(streams, pages)
        order = torch.arange(streams, dtype=torch.int32, device=GPU)
        batch = attention_reference.AttentionBatch(
            order * new,
            torch.full_like(order, new),
            torch.full_like(order, length),
            order,
            tables,
        )
        positions = torch.arange(length - new, length, dtype=torch.int32, device=GPU)
        return Cache(pool, batch, positions.repeat(streams), length)


@dataclass
class Layer:
    weights: dict[str, w4_pack.W4]
    norms: tuple[torch.Tensor, torch.Tensor]
    bias: torch.Tensor
    cache: Cache


@dataclass
class Chain:
    """A whole decode step of `m` streams at `length` tokens of context, without the sampler."""

    m: int
    length: int
    layers: list[Layer]
    out: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        m = self.m
        self.ids = torch.arange(m, dtype=torch.int32, device=GPU)
        self.residual = torch.empty(m, HIDDEN, device=GPU)
        self.squares = torch.empty(m, HIDDEN // 128, device=GPU)
        self.rows = {name: int4.empty_activations(m, k, GPU) for name, (_, k) in SHAPES.items()}
        self.q = torch.empty(m, HEADS, D, device=GPU, dtype=torch.float16)
        self.slots = torch.arange(m, dtype=torch.int32, device=GPU)
        splits = decode_attention.splits_for(m, KEY_HEADS, 1, self.length, PAGE, SMS)
        self.partials = decode_attention.Partials.empty(splits, m, HEADS, D, GPU)
        self.angles = rope.angles(8192, D, 1e6, GPU)
        self.cut = decode_attention.tile_config_for(D, 16)
        self.last = torch.empty(m, HIDDEN, device=GPU, dtype=torch.float16)
        self.logits = torch.empty(m, VOCABULARY, device=GPU)
        self.logits_half = torch.empty(m, VOCABULARY, device=GPU, dtype=torch.float16)

    def product(self, name: str, weight: w4_pack.W4) -> None:
        norm = RowNorm(self.squares, EPS) if name in ("qkv", "gate_up") else None
        self.out[name] = int4.gemm(self.rows[name], weight, norm)

    def feed(
        self,
        mode: w4_activations.Mode,
        source: torch.Tensor,
        to: str,
        weight: torch.Tensor | None = None,
    ) -> None:
        w4_activations.prepare(
            mode, source, self.rows[to], ids=self.ids if mode == "embed" else None,
            residual=self.residual, weight=weight, squares=self.squares,
        )  # fmt: skip

    def activated(self, weight: w4_pack.W4) -> None:
        """gate and up, and the input of `down` computed from them."""
        read, into = self.rows["gate_up"], self.rows["down"]
        int4.gemm_silu_mul(read, weight, into, RowNorm(self.squares, EPS))

    def layer(self, layer: Layer, after: torch.Tensor | None, parts: str = "attention") -> None:
        """`parts`: what of the layer runs; `products`: only the gemms, repeatedly on the same activations."""
        if parts == "products":
            for name in SHAPES:
                if name == "gate_up" and w4_tile_config.variant_for(self.m) == "tiled":
                    self.activated(layer.weights[name])
                else:
                    self.product(name, layer.weights[name])
            return
        self.product("qkv", layer.weights["qkv"])
        k, v = layer.cache.pool[:, 0], layer.cache.pool[:, 1]
        batch = layer.cache.batch
        if parts in ("attention", "rope"):
            rope.rope_store(
                self.out["qkv"], self.angles, layer.cache.positions, self.slots, batch.tables,
                self.q, k, v, bias=layer.bias,
            )  # fmt: skip
        if parts in ("attention", "attend"):
            decode_attention.attend(self.q, k, v, batch, 1, self.partials, config=self.cut)
            decode_attention.merge(self.partials, self.rows["o"])
        else:
            w4_activations.prepare("plain", self.out["qkv"], self.rows["o"])
        self.product("o", layer.weights["o"])
        self.feed("norm", self.out["o"], "gate_up", layer.norms[1])
        self.activated(layer.weights["gate_up"])
        self.product("down", layer.weights["down"])
        if after is not None:
            self.feed("norm", self.out["down"], "qkv", after)

    def step(
        self, embedding: torch.Tensor, head: torch.Tensor | None, parts: str = "attention"
    ) -> None:
        self.feed("embed", embedding, "qkv", self.layers[0].norms[0])
        for i, layer in enumerate(self.layers):
            last = i + 1 == len(self.layers)
            self.layer(layer, None if last else self.layers[i + 1].norms[0], parts)
        rms_norm.add_norm(self.out["down"], self.residual, self.layers[0].norms[0], self.last, EPS)
        if head is not None and self.m <= 64:
            skinny_gemm.gemm(self.last, head, self.logits)
        elif head is not None:
            torch.matmul(self.last, head.t(), out=self.logits_half)

    def check(self, embedding: torch.Tensor) -> float:
        """Error of one layer's residual against fp32 and dense weights."""
        one = replace(self, layers=self.layers[:1])
        one.step(embedding, None)
        layer, h = self.layers[0], embedding[self.ids.long()].float()

        def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.float()

        dense = {name: w4_pack.dense(w).t() for name, w in layer.weights.items()}
        pool, batch = layer.cache.pool.clone(), layer.cache.batch
        q = torch.empty_like(self.q, dtype=torch.float32)
        rope.reference(
            (normed(h, layer.norms[0]) @ dense["qkv"])[None], self.angles, layer.cache.positions,
            self.slots, batch.tables, q, pool[:, 0], pool[:, 1], bias=layer.bias,
        )  # fmt: skip
        mixed = attention_reference.reference(
            q, pool[:, 0], pool[:, 1], batch, attention_reference.Rules()
        )
        h = h + mixed.view(self.m, -1) @ dense["o"]
        gate, up = (normed(h, layer.norms[1]) @ dense["gate_up"]).chunk(2, -1)
        h = h + (torch.nn.functional.silu(gate) * up) @ dense["down"]
        return error(one.residual, h)


def make_layers(streams: int, length: int) -> list[Layer]:
    def gain() -> torch.Tensor:
        return (torch.rand(HIDDEN, device=GPU) + 0.5).half()

    bias = torch.randn(SHAPES["qkv"][0], device=GPU).half()
    return [
        Layer(
            {s: random_w4(*SHAPES[s]) for s in SHAPES},
            (gain(), gain()),
            bias,
            Cache.make(streams, length),
        )
        for _ in range(LAYERS)
    ]


def chain() -> Results:
    found: Results = {}
    embedding = torch.randn(512, HIDDEN, device=GPU).half()
    head = torch.randn(VOCABULARY, HIDDEN, device=GPU, dtype=torch.float16) * 0.02
    layers = make_layers(1, 64)
    for m, length in (
        (1, 256),
        (1, 7000),
        (2, 256),
        (4, 256),
        (8, 256),
        (8, 7000),
        (16, 256),
        (32, 256),
        (64, 256),
        (128, 256),
        (256, 256),
        (384, 256),
        (512, 256),
    ):
        for layer in layers:
            layer.cache = Cache.make(m, length)
        step = Chain(m, length, layers)
        off = step.check(embedding)
        row = {"full": timed([partial(step.step, embedding, head)]) / 1e3}
        if length == 256:
            row["no_head"] = timed([partial(step.step, embedding, None)]) / 1e3
            row["no_attention"] = timed([partial(step.step, embedding, head, "none")]) / 1e3
            row["products"] = timed([partial(step.step, embedding, None, "products")]) / 1e3
        for key, ms in row.items():
            found[f"chain_M{m}_L{length}_{key}_ms"] = ms
        text = " ".join(f"{key} {ms:.3f}" for key, ms in row.items())
        rate = m / row["full"] * 1e3
        print(
            f"chain M={m} context {length}: {text} ms, {rate:.0f} tok/s, err {off:.1e}", flush=True
        )
    return found
