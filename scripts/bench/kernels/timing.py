"""Times and checks kernels: helpers, the shapes of Qwen2.5-7B, and one W4 gemm of any kernel."""

import contextlib
import multiprocessing
import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
import triton

from localchat_cuda.kernels.int4 import activations as w4_activations
from localchat_cuda.kernels.int4 import gemm_few as w4_few
from localchat_cuda.kernels.int4 import gemm_tiled as w4_tiled
from localchat_cuda.kernels.int4 import pack as w4_pack
from localchat_cuda.kernels.int4 import tile_config as w4_tile_config
from localchat_cuda.kernels.int4.row_norm import RowNorm
from localchat_cuda.kernels.int4.tile_config import TileConfig
from localchat_cuda.weights.formats.weight import bytes_of
from tests.support import int4_reference

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

Results: TypeAlias = dict[str, float]


def timed(calls: Sequence[Callable[[], object]], rounds: int = 7) -> float:
    """Microseconds of all calls together, replayed as one graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def memory_rate() -> float:
    """Bytes a second of the GPU's memory, by the data sheets of H200 and H100."""
    return 4.8e12 if "H200" in torch.cuda.get_device_name() else 3.35e12


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


def random_w4(n: int, k: int, group: int = 128) -> w4_pack.W4:
    """Random 4-bit values; zeros near the middle and small scales keep a deep chain finite."""
    t, g = n // 16, k // 128
    codes = torch.randint(-128, 128, (t, g, 1024), dtype=torch.int8, device=GPU)
    scales = (torch.rand(n, k // group, device=GPU) + 0.5) * 0.2 / k**0.5
    zeros = torch.randint(7, 9, (n, k // group), device=GPU)
    return w4_pack.W4(codes, w4_pack.pack_sides(scales, zeros, group), group=group)


def rows_for(variant: str, m: int, k: int, group: int = 128) -> w4_activations.Rows:
    if variant == "int8":
        return w4_activations.Int8Rows.empty(m, k, GPU, group)
    order: w4_activations.Order = "lanes" if variant == "fp16" else "slots"
    return w4_activations.HalfRows.empty(m, k, GPU, order, group)


def cut_of(variant: str, m: int, n: int, k: int) -> tuple[TileConfig, int]:
    """The tile config that the library would take, and the rows of a tile (0: all)."""
    if variant == "tiled":
        config = w4_tiled.tile_config_for(m, n, k, SMS)
        return config.shape, config.rows
    return w4_tile_config.tile_config_for(variant, m, n, k, SMS), 0


def multiply(
    variant: str,
    rows: w4_activations.Rows,
    weight: w4_pack.W4,
    out: torch.Tensor,
    shape: TileConfig,
    norm: RowNorm | None = None,
    tile: int = 0,
) -> None:
    if isinstance(rows, w4_activations.Int8Rows) or variant == "fp16":
        w4_few.gemm(rows, weight, out, shape, norm)
    else:
        config = w4_tiled.TiledGemmConfig(shape, tile)
        w4_tiled.gemm(rows, weight, out, config, norm=norm)


class Bench:
    """Rotating copies of one weight, and its inputs."""

    def __init__(self, name: str, rows: int = 512, group: int = 128) -> None:
        self.name, self.group = name, group
        self.n, self.k = SHAPES[name]
        first = random_w4(self.n, self.k, group)
        self.weights = [first]
        while len(self.weights) * bytes_of(first) < FLUSH_BYTES:
            self.weights.append(random_w4(self.n, self.k, group))
        self.x = torch.randn(rows, self.k, device=GPU)
        self.wanted = self.x @ w4_pack.dense(first).t()

    def time(self, variant: str, m: int, shape: TileConfig, tile: int = 0) -> tuple[float, float]:
        """(microseconds, worst error of five runs); infinite time if the result is wrong."""
        rows = rows_for(variant, m, self.k, self.group)
        int4_reference.quantize(self.x[:m], rows)
        out = torch.empty(shape.splits, m, self.n, device=GPU)
        off = 0.0
        for _ in range(5):
            out.fill_(float("nan"))
            multiply(variant, rows, self.weights[0], out, shape, None, tile)
            found = error(out.sum(0), self.wanted[:m])
            off = max(off, found) if found == found else float("inf")
        if off > 2e-3:
            return float("inf"), off
        copies = len(self.weights)
        count = max(copies, 24 // copies * copies)
        calls = [
            partial(multiply, variant, rows, self.weights[i % copies], out, shape, None, tile)
            for i in range(count)
        ]
        return timed(calls) / count, off


def prepare_compiling() -> None:
    """Make launches compile into Triton's cache and run nothing, in a separate process."""
    run = triton.runtime.jit.JITFunction.run
    triton.runtime.jit.JITFunction.__getitem__ = lambda self, grid: (
        lambda *a, **o: run(self, *a, grid=grid, warmup=True, **o)
    )


def compile_product(job: tuple[str, str, int, TileConfig, int, bool]) -> None:
    """Compile one (kernel, weight, rows, shape, tile, norm), unless it does not fit the GPU."""
    variant, name, m, shape, tile, scaled = job
    n, k = SHAPES[name]
    weight = w4_pack.W4(
        torch.empty(n // 16, k // 128, 1024, dtype=torch.int8, device=GPU),
        torch.empty(n // 16, k // 128, 16, dtype=torch.int32, device=GPU),
    )
    norm = RowNorm(torch.empty(m, k // 128, device=GPU), EPS) if scaled else None
    out = torch.empty(shape.splits, m, n, device=GPU)
    with contextlib.suppress(triton.OutOfResources):
        multiply(variant, rows_for(variant, m, k), weight, out, shape, norm, tile)


def compile_ahead(jobs: list[tuple[str, str, int, TileConfig, int, bool]]) -> None:
    """Compile all jobs in parallel: Triton takes about a second for each."""
    workers = min(14, os.cpu_count() or 1)
    with multiprocessing.get_context("spawn").Pool(workers, prepare_compiling) as pool:
        for _ in pool.imap_unordered(compile_product, jobs, chunksize=2):
            pass
    print(f"compiled {len(jobs)} products", flush=True)
