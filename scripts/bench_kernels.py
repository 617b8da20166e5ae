"""Check and time the CUDA kernels on one GPU: PYTHONPATH=backends:. python scripts/bench_kernels.py
[parts]

Shapes are those of Qwen2.5-7B with AWQ weights, all random. Every product is checked against fp32
on poisoned outputs before it is timed; times are medians of 7 replays of a CUDA graph over more
than 450 MB of rotating weights, so that nothing comes out of the L2 cache. Parts (all when none is
named): floors, products, tune, chain, few, many, head, dense, sampler. A table on stdout, the last
line is JSON.
"""

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels import (
    attention,
    attention_few,
    attention_many,
    dense_few,
    norm,
    rope,
    sample,
    sample_state,
    w4_dense,
    w4_feed,
    w4_fp16,
    w4_int8,
    w4_many,
    w4_pack,
    w4_plan,
    w4_wgmma,
)
from localchat_cuda.kernels.w4_plan import Shape

from localchat.loop.backend import SamplingParams
from localchat.loop.noise import REACH, G, mix
from localchat.loop.sampling import Sampler

HIDDEN, FEED, HEADS, KEY_HEADS, D, VOCABULARY, LAYERS = 3584, 18944, 28, 4, 128, 152064, 28
SHAPES = {
    "gate_up": (2 * FEED, HIDDEN),
    "down": (HIDDEN, FEED),
    "qkv": ((HEADS + 2 * KEY_HEADS) * D, HIDDEN),
    "o": (HIDDEN, HIDDEN),
}
EPS, PAGE, SMS = 1e-6, 64, 132
FLUSH_BYTES = 450e6
GPU = torch.device("cuda")

Results = dict[str, float]


def timed(calls: list[Callable[[], None]], rounds: int = 7) -> float:
    """Microseconds of all calls together, replayed as one graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


def random_w4(n: int, k: int) -> w4_pack.W4:
    """Random codes; zeros near the middle and small scales keep a deep chain finite."""
    t, g = n // 16, k // 128
    codes = torch.randint(-128, 128, (t, g, 1024), dtype=torch.int8, device=GPU)
    scales = ((torch.rand(t, g, 16, device=GPU) + 0.5) * 0.2 / k**0.5).half().view(
        torch.int16
    ).int() & 0xFFFF
    zeros = torch.randint(7, 9, (t, g, 16), device=GPU).half().view(torch.int16).int()
    return w4_pack.W4(codes, (scales | (zeros << 16)).contiguous())


# ---------------------------------------------------------------- floors


@triton.jit
def _read_kernel(x, out, RUN: tl.constexpr, BLOCK: tl.constexpr):
    p = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.int32)
    for i in tl.range(0, RUN, BLOCK, num_stages=1):
        total ^= tl.load(x + p * RUN + i + tl.arange(0, BLOCK), eviction_policy="evict_first")
    tl.store(out + p, tl.xor_sum(total, 0))


def floors() -> Results:
    x = torch.randint(-9, 9, (1 << 28,), dtype=torch.int32, device=GPU)
    out = torch.empty(1 << 20, dtype=torch.int32, device=GPU)
    run = 8192
    us = timed([lambda: _read_kernel[(x.numel() // run,)](x, out, run, 4096, num_warps=8)])
    a = torch.randn(8192, 8192, device=GPU, dtype=torch.float16)
    product_us = timed([lambda: torch.matmul(a, a)] * 4) / 4
    return {
        "read_TB_s": x.numel() * 4 / us / 1e6,
        "fp16_TFLOP_s": 2 * 8192**3 / product_us / 1e6,
    }


# ---------------------------------------------------------------- W4 products


def rows_for(form: str, m: int, k: int) -> w4_feed.Rows:
    if form == "int8":
        return w4_feed.Int8Rows.empty(m, k, GPU)
    return w4_feed.HalfRows.empty(m, k, GPU, "lanes" if form == "fp16" else "slots")


def multiply(
    form: str,
    rows: w4_feed.Rows,
    weight: w4_pack.W4,
    out: torch.Tensor,
    shape: Shape,
    squares: torch.Tensor | None = None,
) -> None:
    if form == "many":
        assert isinstance(rows, w4_feed.HalfRows)
        cut = w4_many.Cut(shape, 128 if rows.x.shape[0] > 64 else 64)
        w4_many.product(rows, weight, out, cut, squares=squares, eps=EPS)
    elif isinstance(rows, w4_feed.Int8Rows):
        w4_int8.product(rows.x, rows.factors, weight, out, shape, squares=squares, eps=EPS)
    elif form == "fp16":
        w4_fp16.product(rows, weight, out, shape, squares=squares, eps=EPS)
    else:
        w4_wgmma.product(rows, weight, out, shape, squares=squares, eps=EPS)


def cut_of(form: str, m: int, n: int, k: int) -> Shape:
    if form == "many":
        return w4_many.cut_for(m, n, k, SMS).shape
    return w4_plan.shape_for(form, m, n, k, SMS)


class Bench:
    """Rotating copies of one weight, and its inputs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.n, self.k = SHAPES[name]
        first = random_w4(self.n, self.k)
        self.weights = [first]
        while len(self.weights) * first.bytes < FLUSH_BYTES:
            self.weights.append(random_w4(self.n, self.k))
        self.x = torch.randn(128, self.k, device=GPU)
        self.wanted = self.x @ w4_pack.dense(first).t()

    def time(self, form: str, m: int, shape: Shape) -> tuple[float, float]:
        """(microseconds, error) of one product; the error is checked before anything is timed."""
        rows = rows_for(form, m, self.k)
        w4_feed.quantize(self.x[:m], rows)
        out = torch.full((shape.splits, m, self.n), float("nan"), device=GPU)
        multiply(form, rows, self.weights[0], out, shape)
        off = error(out.sum(0), self.wanted[:m])
        if not off < 2e-3:
            return float("inf"), off
        count = max(len(self.weights), 24 // len(self.weights) * len(self.weights))
        calls = [
            lambda w=self.weights[i % len(self.weights)]: multiply(form, rows, w, out, shape)
            for i in range(count)
        ]
        return timed(calls) / count, off


def candidates(form: str, name: str, m: int) -> Iterator[Shape]:
    """Cuts worth trying on a 132-multiprocessor GPU."""
    n, k = SHAPES[name]
    if form == "wgmma":
        for blocks in (1, 2):
            for warps in (4, 8):
                for stages in (2, 3, 4):
                    for splits in {
                        "gate_up": (1, 2),
                        "down": (2, 4, 5, 8),
                        "qkv": (2, 4),
                        "o": (2, 4, 7),
                    }[name]:
                        shape = Shape(blocks, warps, stages, splits)
                        programs = n // (16 * blocks * warps) * splits
                        if shape.fits(n, k, wide=True) and 66 <= programs <= 1200:
                            yield shape
        return
    splits_of = {"gate_up": (1, 2), "down": (5, 9, 14), "qkv": (4, 7, 14), "o": (4, 7, 14)}[name]
    for blocks in (1, 2, 4):
        for warps in (1, 2, 4):
            for depth in (1, 2, 3):
                for splits in splits_of:
                    for registers in (64, 96, 128, 168):
                        shape = Shape(blocks, warps, depth, splits, registers)
                        resident = n // (16 * blocks) * warps * splits / SMS
                        loads = blocks * depth * (1 if m <= 4 else 2)
                        sensible = {
                            64: loads <= 2,
                            96: 2 <= loads <= 4,
                            128: 3 <= loads <= 6,
                            168: loads >= 4,
                        }
                        if shape.fits(n, k) and 8 <= resident <= 60 and sensible[registers]:
                            yield shape


def products(tune: bool) -> Results:
    found: Results = {}
    for name in SHAPES:
        bench = Bench(name)
        for m in (1, 4, 8, 16, 32, 64, 128):
            form = w4_plan.form_for(m)
            shape = cut_of(form, m, bench.n, bench.k)
            us, off = bench.time(form, m, shape)
            rate = bench.weights[0].bytes / us / 1e6
            found[f"{name}_M{m}_us"] = us
            print(
                f"product {name:8} M={m:3} {form:5} {us:7.2f} us {rate:5.2f} TB/s err {off:.1e}
                {shape}"
            )
            if tune and m in TUNED_ROWS:
                tune_one(bench, form, m)
            sys.stdout.flush()
        del bench
        torch.cuda.empty_cache()
    return found


TUNED_ROWS = (32, 64, 128)


def tune_one(bench: Bench, form: str, m: int) -> None:
    tried = []
    for shape in candidates(form, bench.name, m):
        try:
            tried.append((*bench.time(form, m, shape), shape))
        except triton.OutOfResources:
            continue
    tried.sort(key=lambda one: one[0])
    for us, off, shape in tried[:4]:
        print(f"  tuned {bench.name} M={m} {us:.2f} us err {off:.1e} {shape}")
    print(
        f"  tuned {bench.name} M={m} {len(tried)} tried, worst {tried[-1][0]:.1f}"
        if tried
        else "  none"
    )


def _compile(job: tuple[str, str, int, Shape, bool]) -> None:
    """In a process of its own: compile one product into Triton's cache, launching nothing."""
    form, name, m, shape, scaled = job
    run = triton.runtime.jit.JITFunction.run
    triton.runtime.jit.JITFunction.__getitem__ = lambda self, grid: (  # type: ignore[method-assign]
        lambda *a, **o: run(self, *a, grid=grid, warmup=True, **o)
    )
    n, k = SHAPES[name]
    weight = w4_pack.W4(
        torch.empty(n // 16, k // 128, 1024, dtype=torch.int8, device=GPU),
        torch.empty(n // 16, k // 128, 16, dtype=torch.int32, device=GPU),
    )
    squares = torch.empty(m, k // 128, device=GPU) if scaled else None
    multiply(
        form,
        rows_for(form, m, k),
        weight,
        torch.empty(shape.splits, m, n, device=GPU),
        shape,
        squares,
    )


def compile_ahead(tune: bool) -> None:
    """Every product of the run, in parallel: Triton compiles one in about a second."""
    jobs = []
    for name, (n, k) in SHAPES.items():
        for m in (1, 8, 16, 32, 64, 128):
            form = w4_plan.form_for(m)
            jobs.append((form, name, m, cut_of(form, m, n, k), False))
            if name in ("gate_up", "qkv"):
                jobs.append((form, name, m, cut_of(form, m, n, k), True))
            if tune and m in TUNED_ROWS:
                jobs += [(form, name, m, shape, False) for shape in candidates(form, name, m)]
    with multiprocessing.get_context("spawn").Pool(min(14, os.cpu_count() or 1)) as pool:
        for _ in pool.imap_unordered(_tolerant, jobs, chunksize=2):
            pass
    print(f"compiled {len(jobs)} products")


def _tolerant(job: tuple[str, str, int, Shape, bool]) -> None:
    try:
        _compile(job)
    except triton.OutOfResources:
        return


# ---------------------------------------------------------------- a whole model, layer by layer


@dataclass
class Cache:
    """KV pages of one layer for `streams` sequences of `length` tokens."""

    pool: torch.Tensor
    batch: attention.Batch
    positions: torch.Tensor
    length: int

    @staticmethod
    def make(streams: int, length: int, new: int = 1) -> "Cache":
        pages = -(-length // PAGE)
        pool = torch.randn(streams * pages, 2, KEY_HEADS, PAGE, D, device=GPU, dtype=torch.float16)
        tables = torch.randperm(streams * pages, device=GPU).int().view(streams, pages)
        whole = {"dtype": torch.int32, "device": GPU}
        batch = attention.Batch(
            torch.arange(streams, **whole) * new,
            torch.full((streams,), new, **whole),
            torch.full((streams,), length, **whole),
            torch.arange(streams, **whole),
            tables,
        )
        positions = torch.arange(length - new, length, **whole).repeat(streams)
        return Cache(pool, batch, positions, length)


@dataclass
class Layer:
    weights: dict[str, w4_pack.W4]
    norms: tuple[torch.Tensor, torch.Tensor]
    bias: torch.Tensor
    cache: Cache


@dataclass
class Chain:
    """A whole decode step of `m` streams at `length` tokens of context, but for the sampler."""

    m: int
    length: int
    layers: list[Layer]
    shapes: dict[str, Shape] = field(default_factory=dict)

    def __post_init__(self) -> None:
        m = self.m
        self.form = w4_plan.form_for(m)
        for name, (n, k) in SHAPES.items():
            self.shapes.setdefault(name, cut_of(self.form, m, n, k))
        self.ids = torch.arange(m, dtype=torch.int32, device=GPU)
        self.residual = torch.empty(m, HIDDEN, device=GPU)
        self.squares = torch.empty(m, HIDDEN // 128, device=GPU)
        self.rows = {name: rows_for(self.form, m, k) for name, (_, k) in SHAPES.items()}
        self.out = {
            name: torch.full((self.shapes[name].splits, m, n), float("nan"), device=GPU)
            for name, (n, _) in SHAPES.items()
        }
        self.q = torch.empty(m, HEADS, D, device=GPU, dtype=torch.float16)
        self.slots = torch.arange(m, dtype=torch.int32, device=GPU)
        splits = attention_few.splits_for(m, KEY_HEADS, 1, self.length, PAGE, SMS)
        self.partials = attention_few.Partials.empty(splits, m, HEADS, D, GPU)
        self.angles = rope.angles(8192, D, 1e6, GPU)
        self.cut = attention_few.cut_for(D, 16)
        self.last = torch.empty(m, HIDDEN, device=GPU, dtype=torch.float16)
        self.logits = torch.empty(m, VOCABULARY, device=GPU)
        self.logits_half = torch.empty(m, VOCABULARY, device=GPU, dtype=torch.float16)

    def product(self, name: str, weight: w4_pack.W4) -> None:
        squares = self.squares if name in ("qkv", "gate_up") else None
        multiply(self.form, self.rows[name], weight, self.out[name], self.shapes[name], squares)

    def feed(
        self, mode: w4_feed.Mode, source: torch.Tensor, to: str, weight: torch.Tensor | None = None
    ) -> None:
        held = (
            {}
            if mode == "silu"
            else {"residual": self.residual, "weight": weight, "squares": self.squares}
        )
        w4_feed.feed(mode, source, self.rows[to], ids=self.ids if mode == "embed" else None, **held)

    def layer(self, layer: Layer, after: torch.Tensor | None, parts: str = "attention") -> None:
        self.product("qkv", layer.weights["qkv"])
        k, v = layer.cache.pool[:, 0], layer.cache.pool[:, 1]
        batch = layer.cache.batch
        if parts in ("attention", "rope"):
            rope.rope_store(
                self.out["qkv"], self.angles, layer.cache.positions, self.slots, batch.tables,
                self.q, k, v, bias=layer.bias,
            )  # fmt: skip
        if parts in ("attention", "attend"):
            attention_few.attend(self.q, k, v, batch, 1, self.partials, cut=self.cut)
            attention_few.merge(self.partials, self.rows["o"])
        else:
            w4_feed.feed("plain", self.out["qkv"], self.rows["o"])
        self.product("o", layer.weights["o"])
        self.feed("norm", self.out["o"], "gate_up", layer.norms[1])
        self.product("gate_up", layer.weights["gate_up"])
        self.feed("silu", self.out["gate_up"], "down")
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
        norm.add_norm(self.out["down"], self.residual, self.layers[0].norms[0], self.last, EPS)
        if head is not None and self.m <= 64:
            dense_few.product(self.last, head, self.logits)
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
        mixed = attention.reference(q, pool[:, 0], pool[:, 1], batch, attention.Rules())
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
    embedding = torch.randn(256, HIDDEN, device=GPU).half()
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
    ):
        for layer in layers:
            layer.cache = Cache.make(m, length)
        step = Chain(m, length, layers)
        off = step.check(embedding)
        row = {"full": timed([lambda s=step: s.step(embedding, head)]) / 1e3}
        if length == 256:
            row["no_head"] = timed([lambda s=step: s.step(embedding, None)]) / 1e3
            row["no_attention"] = timed([lambda s=step: s.step(embedding, head, "none")]) / 1e3
        for key, ms in row.items():
            found[f"chain_M{m}_L{length}_{key}_ms"] = ms
        text = " ".join(f"{key} {ms:.3f}" for key, ms in row.items())
        print(
            f"chain M={m} context {length}: {text} ms, {m / row['full'] * 1e3:.0f} tok/s, err
            {off:.1e}", flush=True,
        )
    return found


MANY_PRODUCTS = [
    (Shape(blocks, warps, stages, splits), tile)
    for blocks, warps in ((1, 4), (2, 4), (1, 8))
    for stages in (3,)
    for splits in (1, 2, 4, 8)
    for tile in (32, 64, 128)
    if blocks * warps * tile <= 16 * 128
]


def prompts() -> Results:
    """Products of 64 to 512 rows by w4_many, cuts compared."""
    found: Results = {}
    for name in SHAPES:
        bench = Bench(name)
        x = torch.randn(512, bench.k, device=GPU)
        for m in (32, 64, 128, 256, 512):
            rows = w4_feed.HalfRows.empty(m, bench.k, GPU, "slots")
            w4_feed.quantize(x[:m], rows)
            wanted = x[:m] @ w4_pack.dense(bench.weights[0]).t()
            tried = []
            rule = w4_many.cut_for(m, bench.n, bench.k, SMS)
            for cut in {rule, *(w4_many.Cut(shape, tile) for shape, tile in MANY_PRODUCTS)}:
                programs = -(-m // cut.rows) * bench.n // (16 * cut.shape.blocks * cut.shape.warps)
                if not cut.shape.fits(bench.n, bench.k, wide=True) or cut.rows > m:
                    continue
                if cut != rule and not 100 <= programs * cut.shape.splits <= 1000:
                    continue
                out = torch.full((cut.shape.splits, m, bench.n), float("nan"), device=GPU)
                try:
                    w4_many.product(rows, bench.weights[0], out, cut)
                except triton.OutOfResources:
                    continue
                off = error(out.sum(0), wanted)
                for _ in range(5):
                    out.fill_(float("nan"))
                    w4_many.product(rows, bench.weights[0], out, cut)
                    off = max(off, error(out.sum(0), wanted))
                weights = (bench.weights * 4)[:24]
                us = timed([partial(w4_many.product, rows, w, out, cut) for w in weights], 3) / len(
                    weights
                )
                tried.append((us, off, cut))
                if cut == rule:
                    found[f"many_{name}_M{m}_us"] = us
            worst = max(tried, key=lambda one: one[1])
            print(f"  worst error {worst[1]:.1e} {worst[2]}")
            tried.sort(key=lambda one: one[0])
            mark = found[f"many_{name}_M{m}_us"]
            print(f"many {name} M={m}: rule {mark:.1f} us {rule}, {len(tried)} tried", flush=True)
            for us, off, cut in tried[:3]:
                flops = 2 * m * bench.n * bench.k / us / 1e6
                print(f"  {us:.1f} us {flops:.0f} TFLOP/s err {off:.1e} {cut}", flush=True)
        del bench
        torch.cuda.empty_cache()
    return found


def _compile_many(job: tuple[str, int, Shape, int]) -> None:
    name, m, shape, tile = job
    n, k = SHAPES[name]
    run = triton.runtime.jit.JITFunction.run
    triton.runtime.jit.JITFunction.__getitem__ = lambda self, grid: (  # type: ignore[method-assign]
        lambda *a, **o: run(self, *a, grid=grid, warmup=True, **o)
    )
    weight = w4_pack.W4(
        torch.empty(n // 16, k // 128, 1024, dtype=torch.int8, device=GPU),
        torch.empty(n // 16, k // 128, 16, dtype=torch.int32, device=GPU),
    )
    rows = w4_feed.HalfRows.empty(m, k, GPU, "slots")
    try:
        w4_many.product(
            rows, weight, torch.empty(shape.splits, m, n, device=GPU), w4_many.Cut(shape, tile)
        )
    except triton.OutOfResources:
        return


def compile_prompts() -> None:
    jobs = [
        (name, 512, shape, tile)
        for name, (n, k) in SHAPES.items()
        for shape, tile in MANY_PRODUCTS
        if shape.fits(n, k, wide=True)
        and any(
            100 <= -(-m // tile) * n // (16 * shape.blocks * shape.warps) * shape.splits <= 1000
            for m in (32, 64, 128, 256, 512)
        )
    ]
    with multiprocessing.get_context("spawn").Pool(min(15, os.cpu_count() or 1)) as pool:
        list(pool.imap_unordered(_compile_many, jobs, chunksize=2))
    print(f"compiled {len(jobs)} products of many rows")


def sampler() -> Results:
    """The sampler against the numpy contract, and its time."""
    found: Results = {}
    base = SamplingParams(temperature=0.8, top_p=1.0, min_p=0.0, top_logprobs=0)
    kinds = {
        "greedy": replace(base, temperature=0.0),
        "default": replace(base, temperature=0.7, top_p=0.95, min_p=0.05),
        "top_p": replace(base, top_p=0.95),
        "top_k": replace(base, top_k=40, top_p=0.9),
        "plain": base,
        "typical": replace(base, typical_p=0.9),
    }
    numpy_sampler = Sampler(VOCABULARY)
    for points in (1, 8, 32, 128):
        logits = torch.randn(points, VOCABULARY, device=GPU) * 2.5
        logits[:, :50] += torch.linspace(14, 4, 50, device=GPU)
        whole = {"dtype": torch.int32, "device": GPU}
        order = torch.arange(points, **whole)
        positions = order + 100
        scratch = sample_state.Scratch.empty(points, VOCABULARY, GPU)
        out = (
            torch.empty(points, **whole),
            torch.empty(points, device=GPU),
            torch.empty(points, device=GPU),
        )
        for name, kind in kinds.items():
            held = sample_state.Settings.empty(points, 4, GPU)
            for i in range(points):
                fill(held, i, replace(kind, seed=i * 977 + 5))
            go = partial(sample.draw, logits, order, order, positions, held, scratch, *out)
            out[0].fill_(-7)
            go()
            wrong = 0
            rows = logits[: min(points, 16)].cpu().numpy()
            for i, row in enumerate(rows):
                wanted = numpy_sampler.draw(row, replace(kind, seed=i * 977 + 5), i + 100)
                wrong += (
                    wanted.token != int(out[0][i]) or abs(wanted.logprob - float(out[1][i])) > 1e-4
                )
            us = timed([go] * 4) / 4
            found[f"sampler_{name}_{points}_us"] = us
            print(
                f"sampler {points:3} points, {name:8} {us:8.1f} us, {wrong} of {len(rows)} differ",
                flush=True,
            )
    return found


def fill(held: sample_state.Settings, i: int, p: SamplingParams) -> None:
    greedy = p.temperature < 1e-5
    reach = math.inf if p.typical_p < 1 else REACH * p.temperature
    drop = math.log(p.min_p) if p.min_p > 0 else -math.inf
    row = [0.0 if greedy else 1 / p.temperature, reach, p.typical_p, p.top_p, drop, 1.0, 0.0, 0.0]
    held.floats[i] = torch.tensor(row)
    held.top_k[i] = p.top_k
    key = mix((mix(p.seed + G) ^ p.choice) + G)
    held.keys[i] = key - 2**64 if key >= 2**63 else key


# ---------------------------------------------------------------- attention, head, dense


FEW_CUTS = (
    attention_few.Cut(64, 4, 3),
    attention_few.Cut(64, 4, 2),
    attention_few.Cut(64, 2, 3),
    attention_few.Cut(64, 2, 2),
    attention_few.Cut(64, 1, 2),
    attention_few.Cut(32, 2, 4),
    attention_few.Cut(32, 1, 3),
)


def few() -> Results:
    found: Results = {}
    work = (
        (1, 256, 1),
        (1, 7000, 1),
        (8, 256, 1),
        (8, 7000, 1),
        (32, 7000, 1),
        (128, 7000, 1),
        (1, 7000, 16),
    )
    for streams, length, new in work:
        one = streams * length * KEY_HEADS * D * 4
        count = max(1, min(40, round(FLUSH_BYTES / one)))
        caches = [Cache.make(streams, length, new) for _ in range(count)]
        q = torch.randn(streams * new, HEADS, D, device=GPU, dtype=torch.float16)
        blocks = triton.cdiv(HEADS // KEY_HEADS * new, 64)
        out = torch.full((streams * new, HEADS * D), float("nan"), device=GPU, dtype=torch.float16)
        usual = attention_few.splits_for(streams, KEY_HEADS, blocks, length, PAGE, SMS)
        k, v = caches[0].pool[:, 0], caches[0].pool[:, 1]
        some = head_of(caches[0].batch, 8)
        wanted = attention.reference(q[: 8 * new], k, v, some, attention.Rules())
        tried = []
        splits_tried = {usual, max(1, usual // 2), min(64, usual * 2)}
        for splits in sorted(splits_tried):
            partials = attention_few.Partials.empty(splits, streams * new, HEADS, D, GPU)
            for cut in FEW_CUTS:
                calls = [
                    partial(few_once, q, cache, new, partials, out, cut, merged)
                    for cache in caches
                    for merged in (True,)
                ]
                out.fill_(float("nan"))
                calls[0]()
                off = error(out[: 8 * new], wanted.view(wanted.shape[0], -1))
                us = timed(calls) / len(caches)
                tried.append((us, off, splits, cut))
                if splits == usual and cut == attention_few.cut_for(D, 16):
                    found[f"few_{streams}x{length}_new{new}_us"] = us
                    alone = [
                        partial(few_once, q, cache, new, partials, out, cut, False)
                        for cache in caches
                    ]
                    print(
                        f"  default {us:.2f} us, without merging {timed(alone) / len(caches):.2f}
                        us"
                    )
        tried.sort(key=lambda t: t[0])
        for us, off, splits, cut in tried[:5]:
            rate = one / us / 1e6
            print(
                f"few {streams:3} x {length} new {new:2} splits {splits:2} (usual {usual}) {cut}"
                f" {us:8.2f} us {rate:5.2f} TB/s err {off:.1e}",
                flush=True,
            )
        del caches, k, v
        torch.cuda.empty_cache()
    return found


def few_once(
    q: torch.Tensor,
    cache: Cache,
    new: int,
    partials: attention_few.Partials,
    out: torch.Tensor,
    cut: attention_few.Cut,
    merged: bool,
) -> None:
    attention_few.attend(q, cache.pool[:, 0], cache.pool[:, 1], cache.batch, new, partials, cut=cut)
    if merged:
        attention_few.merge(partials, out)


def head_of(batch: attention.Batch, count: int) -> attention.Batch:
    return attention.Batch(
        batch.starts[:count],
        batch.counts[:count],
        batch.lengths[:count],
        batch.slots[:count],
        batch.tables,
    )


MANY_CUTS = (
    attention_many.Cut(128, 64, 8, 2),
    attention_many.Cut(128, 64, 8, 3),
    attention_many.Cut(128, 64, 8, 4),
    attention_many.Cut(128, 64, 4, 3),
    attention_many.Cut(64, 64, 4, 3),
    attention_many.Cut(64, 64, 4, 2),
)


def many() -> Results:
    found: Results = {}
    for count, length in ((128, 128), (512, 512), (2048, 2048), (2048, 7000), (7000, 7000)):
        cache = Cache.make(1, length, count)
        q = torch.randn(count, HEADS, D, device=GPU, dtype=torch.float16)
        out = torch.empty_like(q)
        k, v = cache.pool[:, 0], cache.pool[:, 1]
        some = attention.Batch(
            cache.batch.starts + max(0, count - 256),
            cache.batch.counts.clamp(max=256),
            cache.batch.lengths,
            cache.batch.slots,
            cache.batch.tables,
        )
        wanted = attention.reference(q, k, v, some, attention.Rules())[-256:]
        pairs = count * (length - count) + count * (count + 1) / 2
        for cut in MANY_CUTS:
            listed = attention_many.tiles_of([count], [length], cut.rows)
            tiles = torch.tensor(listed, dtype=torch.int32, device=GPU)
            call = partial(attention_many.attend, q, k, v, cache.batch, tiles, out, cut=cut)
            out.fill_(float("nan"))
            call()
            off = error(out[-256:], wanted)
            us = timed([call] * 4) / 4
            rate = 4 * pairs * HEADS * D / us / 1e6
            print(
                f"many {count} of {length} {cut}: {us:9.1f} us {rate:6.0f} TFLOP/s err {off:.1e}",
                flush=True,
            )
            if cut == attention_many.cut_for(D):
                found[f"many_{count}of{length}_us"] = us
        torch_q, torch_k = (
            q.transpose(0, 1)[None],
            torch.randn(1, HEADS, count, D, device=GPU).half(),
        )
        sdpa = torch.nn.functional.scaled_dot_product_attention
        us = timed([lambda a=torch_q, b=torch_k: sdpa(a, b, b, is_causal=True)] * 4) / 4
        print(f"  torch's attention, {count} tokens without a past: {us:.1f} us", flush=True)
    return found


def head() -> Results:
    found: Results = {}
    weights = [torch.randn(VOCABULARY, HIDDEN, device=GPU, dtype=torch.bfloat16) for _ in range(2)]
    for m in (1, 2, 8, 16, 32, 64):
        x = torch.randn(m, HIDDEN, device=GPU, dtype=torch.bfloat16)
        out = torch.full((m, VOCABULARY), float("nan"), device=GPU)
        dense_few.product(x, weights[0], out)
        off = error(out, dense_few.reference(x, weights[0]))
        us = timed([lambda w=w: dense_few.product(x, w, out) for w in weights * 3]) / 6
        library = timed([lambda w=w: torch.matmul(x, w.t()) for w in weights * 3]) / 6
        rate = VOCABULARY * HIDDEN * 2 / us / 1e6
        print(
            f"head M={m:2} {us:7.1f} us {rate:5.2f} TB/s, cuBLAS {library:.1f} us, err {off:.1e}",
            flush=True,
        )
        found[f"head_M{m}_us"] = us
    return found


def dense() -> Results:
    found: Results = {}
    for name, (n, k) in SHAPES.items():
        weights = [random_w4(n, k) for _ in range(max(2, round(FLUSH_BYTES / (n * k / 2))))]
        whole = torch.empty(n * k, device=GPU, dtype=torch.float16)
        us = timed([lambda w=w: w4_dense.dequantize(w, whole.view(n, k)) for w in weights]) / len(
            weights
        )
        moved = weights[0].bytes + 2 * n * k
        for blocks in (1, 2, 8):
            grid = (n // 16, triton.cdiv(k // 128, blocks))
            calls = [
                partial(
                    w4_dense._dequantize_kernel[grid], w.codes.view(torch.int16), w.steps, whole, 0,
                    G=k // 128, ASM=True, BLOCKS=blocks, num_warps=1,
                )
                for w in weights
            ]  # fmt: skip
            print(f"  {blocks} groups a program: {timed(calls) / len(weights):.1f} us")
        print(f"dequantize {name}: {us:.1f} us, {moved / us / 1e6:.2f} TB/s read and written")
        found[f"dequantize_{name}_us"] = us
        for m in (128, 256, 512, 2048):
            x = torch.randn(m, k, device=GPU, dtype=torch.float16)
            out = torch.full((m, n), float("nan"), device=GPU, dtype=torch.float16)
            w4_dense.product(x, weights[0], out, whole)
            off = error(out[:64], x[:64].float() @ w4_pack.dense(weights[0]).t())
            row = {
                "whole": timed([partial(w4_dense.product, x, w, out, whole) for w in weights[:4]])
                / 4
            }
            held = whole.view(n, k)
            row["cublas"] = timed([lambda: torch.matmul(x, held.t())] * 4) / 4
            text = " ".join(f"{key} {value:.1f}" for key, value in row.items())
            print(f"dense {name} M={m}: {text} us, err {off:.1e}", flush=True)
            found[f"dense_{name}_M{m}_us"] = row["whole"]
    return found


PARTS: dict[str, Callable[[], Results]] = {
    "floors": floors,
    "products": lambda: products(tune=False),
    "tune": lambda: products(tune=True),
    "chain": chain,
    "prompts": prompts,
    "sampler": sampler,
    "few": few,
    "many": many,
    "head": head,
    "dense": dense,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}")
    wanted = parser.parse_args().parts or [part for part in PARTS if part != "tune"]
    torch.manual_seed(1)
    began = time.monotonic()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    found: dict[str, Results] = {}
    if {"products", "tune", "chain"} & set(wanted):
        compile_ahead("tune" in wanted)
    if "prompts" in wanted:
        compile_prompts()
    for part in wanted:
        print(f"-- {part}, {time.monotonic() - began:.0f} s")
        found[part] = PARTS[part]()
    print(f"-- done, {time.monotonic() - began:.0f} s")
    print(json.dumps({p: {k: round(v, 4) for k, v in r.items()} for p, r in found.items()}))


if __name__ == "__main__":
    main()
