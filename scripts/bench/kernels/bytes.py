"""Checks and times the kernels for 8-bit weights, with their own and with many other tile configs.

python scripts/bench/bench_kernels.py bytes         kernels with their own configs, the head, many rows
python scripts/bench/bench_kernels.py byte_cuts     other configs, the best five of each printed
"""

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton

from localchat_cuda.kernels import fp8_int8, skinny_gemm
from localchat_cuda.kernels.fp8_int8 import gemm_dequant as w8_dequant
from localchat_cuda.kernels.fp8_int8 import gemm_fp8
from localchat_cuda.kernels.fp8_int8 import gemm_small as w8_small
from localchat_cuda.kernels.fp8_int8 import gemm_tiled as w8_tiled
from localchat_cuda.kernels.fp8_int8 import pack as w8_pack
from localchat_cuda.kernels.fp8_int8.pack import W8
from localchat_cuda.kernels.fp8_int8.tile_config import (
    SMALL_ROWS,
    W8TileConfig,
    small_config,
    tiled_config,
)
from localchat_cuda.weights.formats.weight import bytes_of
from scripts.bench.kernels.timing import (
    FLUSH_BYTES,
    GPU,
    HIDDEN,
    SHAPES,
    SMS,
    VOCABULARY,
    Results,
    error,
    prepare_compiling,
    timed,
)
from tests.support import float_checkpoints, fp8_reference

KINDS = {
    "row": w8_pack.e4m3_rows,
    "block": fp8_reference.e4m3_blocks,
    "whole": w8_pack.whole_rows,
    "mx": float_checkpoints.mx_weight,
}
LAYER_KINDS = ("row", "block", "mx")
ROWS = (1, 4, 8, 16, 32, 64)
MANY = (128, 512, 2048)
WRONG = 1e-3
"""Errors above this are no rounding: bf16 activations are the same on both sides."""


class Rotation:
    """Enough copies of one random weight that none stays in the L2 cache, and its inputs in bf16."""

    def __init__(self, kind: str, n: int, k: int) -> None:
        self.kind, self.n, self.k = kind, n, k
        first = KINDS[kind](torch.randn(n, k, device=GPU) * 0.02)
        self.weights = [first]
        while len(self.weights) * bytes_of(first) < FLUSH_BYTES:
            self.weights.append(W8(first.codes.clone(), first.scales.clone()))
        self.x = torch.randn(max(MANY), k, device=GPU, dtype=torch.bfloat16)

    def time(self, m: int, config: W8TileConfig) -> tuple[float, float]:
        """(microseconds, worst error of three runs); infinite time if a result is wrong."""
        x, decoder = self.x[:m], fp8_int8.decoder_of(GPU)
        wanted = w8_small.reference(x, self.weights[0])
        out = torch.empty(config.splits, m, self.n, device=GPU)
        call = partial(_form(config), x, decoder=decoder)
        off = 0.0
        for _ in range(3):
            out.fill_(float("nan"))
            call(self.weights[0], out, config)
            found = error(out.sum(0), wanted)
            off = max(off, found) if found == found else float("inf")
        if off > WRONG:
            return float("inf"), off
        count = max(len(self.weights), 24 // len(self.weights) * len(self.weights))
        turns = [self.weights[i % len(self.weights)] for i in range(count)]
        return timed([partial(call, weight, out, config) for weight in turns]) / count, off


def _form(config: W8TileConfig) -> Callable[..., None]:
    return w8_tiled.gemm if config.stages else w8_small.gemm


def cut_of(m: int, n: int, k: int) -> W8TileConfig:
    return small_config(m, n, k, SMS) if m <= SMALL_ROWS else tiled_config(m, n, k, SMS)


def report(
    name: str, rotation: Rotation, m: int, us: float, off: float, config: W8TileConfig
) -> None:
    rate = bytes_of(rotation.weights[0]) / us / 1e6
    print(
        f"{name} {rotation.kind} M={m}: {us:.2f} us {rate:.2f} TB/s err {off:.1e} {config}",
        flush=True,
    )


def as_cut() -> Results:
    """Every kernel with its own config; the head compared with the bf16 one; many rows in both ways."""
    found: Results = {}
    work = [(kind, *shape) for shape in SHAPES.values() for kind in LAYER_KINDS]
    work.append(("whole", VOCABULARY, HIDDEN))
    _compile_all([(kind, n, k, m, cut_of(m, n, k)) for kind, n, k in work for m in ROWS])
    for name, (n, k) in SHAPES.items():
        for kind in LAYER_KINDS:
            rotation = Rotation(kind, n, k)
            for m in ROWS:
                config = cut_of(m, n, k)
                us, off = rotation.time(m, config)
                report(name, rotation, m, us, off, config)
                found[f"{name}_{kind}_M{m}_us"] = us
            if kind != "mx":  # its activations are never rounded
                found |= many(name, rotation)
            del rotation
            torch.cuda.empty_cache()
    return found | head()


def head() -> Results:
    found: Results = {}
    rotation = Rotation("whole", VOCABULARY, HIDDEN)
    for m in ROWS:
        config = cut_of(m, VOCABULARY, HIDDEN)
        us, off = rotation.time(m, config)
        report("head", rotation, m, us, off, config)
        found[f"head_whole_M{m}_us"] = us
    weights = [torch.randn(VOCABULARY, HIDDEN, device=GPU, dtype=torch.bfloat16) for _ in range(2)]
    out = torch.empty(1, VOCABULARY, device=GPU)
    calls = [partial(skinny_gemm.gemm, rotation.x[:1], weight, out) for weight in weights * 3]
    found["head_bf16_M1_us"] = timed(calls) / 6
    print(f"head bf16 M=1: {found['head_bf16_M1_us']:.1f} us", flush=True)
    return found


def many(name: str, rotation: Rotation) -> Results:
    """Above 64 rows: FP8 tensor cores, dequantizing, and the library's bf16 gemm for comparison."""
    found: Results = {}
    weights, n, k = rotation.weights[:4], rotation.n, rotation.k
    scratch = torch.empty(n * k, device=GPU, dtype=torch.bfloat16)
    decoder = fp8_int8.decoder_of(GPU)
    for m in MANY:
        x = rotation.x[:m]
        off = error(gemm_fp8.gemm(x, weights[0]), fp8_reference.gemm(x, weights[0]))
        out = w8_dequant.gemm(x, weights[0], decoder=decoder)
        spread = error(out, w8_small.reference(x, weights[0]))
        eight = timed([partial(gemm_fp8.gemm, x, weight) for weight in weights]) / len(weights)
        dense = partial(w8_dequant.gemm, x, decoder=decoder)
        wide = timed([partial(dense, weight) for weight in weights]) / len(weights)
        alone = timed([partial(torch.matmul, x, scratch.view(n, k).t())] * 4) / 4
        print(
            f"{name} {rotation.kind} M={m}: w8a8 {eight:.1f} us err {off:.1e}, dequantized {wide:.1f} us "
            f"err {spread:.1e}, bf16 alone {alone:.1f} us", flush=True,
        )  # fmt: skip
        found[f"{name}_{rotation.kind}_M{m}_w8a8_us"] = eight
        found[f"{name}_{rotation.kind}_M{m}_dense_us"] = wide
    return found


def _cuts(m: int, n: int, k: int) -> Iterator[W8TileConfig]:
    if m <= w8_small.MAX_ROWS:
        yield from few_cuts(m, n, k)
    if m > SMALL_ROWS:
        yield from wide_cuts(n, k)


def few_cuts(m: int, n: int, k: int) -> Iterator[W8TileConfig]:
    """5 to 60 warps a multiprocessor."""
    bounds = (0, 64, 128) if m <= 8 else (0, 128) if m <= 16 else (0, 168)
    for blocks in (1, 2) if m <= 16 else (2, 4):
        for warps in (1, 2, 4):
            for splits in (1, 2, 3, 4, 7, 9):
                resident = n / (16 * blocks) * warps * splits / SMS
                fits = k % (128 * warps) == 0 and splits <= k // (128 * warps)
                if fits and resident >= 5 and (resident <= 60 or splits == 1):
                    for registers in bounds:
                        yield W8TileConfig(blocks, warps, splits, registers=registers)


def wide_cuts(n: int, k: int) -> Iterator[W8TileConfig]:
    for blocks, warps in ((4, 4), (8, 4), (8, 8)):
        for stages in (3, 4, 5):
            for splits in (1, 2, 3, 4, 7, 8):
                programs = n / (16 * blocks) * splits / SMS
                if splits <= k // 128 and programs >= 1 and (programs <= 8 or splits == 1):
                    yield W8TileConfig(blocks, warps, splits, stages)


def other_cuts(rows: tuple[int, ...] = (1, 16, 32)) -> Results:
    """The best of many configs for each shape; the best alone is often not the best in a whole model."""
    found: Results = {}
    work = {**SHAPES, "head": (VOCABULARY, HIDDEN)}
    kinds = {name: "whole" if name == "head" else "row" for name in work}
    tried = {
        (name, m): tuple(dict.fromkeys(_cuts(m, *shape)))
        for name, shape in work.items()
        for m in rows
    }
    _compile_all(
        [
            (kinds[name], *work[name], m, config)
            for (name, m), configs in tried.items()
            for config in configs
        ]
    )
    for name, (n, k) in work.items():
        rotation = Rotation(kinds[name], n, k)
        for m in rows:
            timings = []
            for config in tried[name, m]:
                with contextlib.suppress(triton.OutOfResources):
                    timings.append((*rotation.time(m, config), config))
            timings.sort(key=lambda timing: timing[0])
            for us, off, config in timings[:5]:
                report(name, rotation, m, us, off, config)
            found[f"{name}_M{m}_best_us"] = timings[0][0]
        del rotation
        torch.cuda.empty_cache()
    return found


Job = tuple[str, int, int, int, W8TileConfig]
"""Kind, N, K, rows, cut."""


def _compile_all(jobs: list[Job]) -> None:
    """Compile in parallel: Triton takes a second or two for each."""
    workers = min(14, os.cpu_count() or 1)
    with multiprocessing.get_context("spawn").Pool(workers, prepare_compiling) as pool:
        for _ in pool.imap_unordered(_compile, jobs, chunksize=2):
            pass
    print(f"compiled {len(jobs)} products", flush=True)


def _compile(job: Job) -> None:
    kind, n, k, m, config = job
    dtype = torch.uint8 if kind == "whole" else w8_pack.E4M3
    shape = (-(-n // 128), k // 128) if kind == "block" else (n,)
    scales = torch.empty(shape, device=GPU)
    if kind == "mx":
        scales = torch.empty(n, k // 32, dtype=torch.uint8, device=GPU)
    weight = W8(torch.empty(n, k, dtype=dtype, device=GPU), scales)
    x = torch.empty(m, k, device=GPU, dtype=torch.bfloat16)
    out = torch.empty(config.splits, m, n, device=GPU)
    with contextlib.suppress(triton.OutOfResources):
        _form(config)(x, weight, out, config, decoder=fp8_int8.decoder_of(GPU))
