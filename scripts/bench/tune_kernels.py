"""Tries many tile configs of the W4 gemms on one GPU and prints the best.

    python scripts/bench/tune_kernels.py gate_up:8 down:8 qkv:512

Each argument is a weight of Qwen2.5-7B and a number of rows. The best config alone is often not the
best in the chain of a whole model: try winners there (bench_kernels.py chain) before you change
kernels/int4/tile_config.py.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "backends"))

from localchat_cuda.kernels.int4.tile_config import GemmVariant, TileConfig, variant_for
from scripts.bench.kernels.timing import SHAPES, SMS, Bench, compile_ahead

SPLITS = {"gate_up": (1, 2, 3), "down": (5, 9, 14), "qkv": (4, 7, 14), "o": (4, 7, 14)}
WIDE_SPLITS = {"gate_up": (1, 2), "down": (2, 4, 5, 8), "qkv": (2, 4, 8), "o": (2, 4, 7)}
LOADS = {64: (1, 2), 96: (2, 4), 128: (3, 6), 168: (4, 12)}
"""Registers bound -> 1 KB loads on their way for each warp for which it makes sense."""


def narrow(name: str, m: int) -> Iterator[TileConfig]:
    """Configs of the int8 and fp16 kernels: several row blocks, warps along K, chunks ahead, splits of K."""
    n, k = SHAPES[name]
    shapes = (
        TileConfig(blocks, warps, depth, splits, registers)
        for blocks in (1, 2, 4)
        for warps in (1, 2, 4)
        for depth in (1, 2, 3)
        for splits in SPLITS[name]
        for registers, (low, high) in LOADS.items()
        if low <= blocks * depth * (1 if m <= 4 else 2) <= high
    )
    for shape in shapes:
        resident = n // (16 * shape.blocks) * shape.warps * shape.splits / SMS
        if shape.fits(n, k) and 8 <= resident <= 60:
            yield shape


def wide(name: str) -> Iterator[TileConfig]:
    """Configs of the tiled kernel: 64 to 256 output features a program."""
    n, k = SHAPES[name]
    for blocks, warps in ((1, 4), (2, 4), (1, 8)):
        for stages in (3, 4):
            for splits in WIDE_SPLITS[name]:
                shape = TileConfig(blocks, warps, stages, splits)
                if shape.fits(n, k, wide=True):
                    yield shape


def tiles(variant: GemmVariant, m: int) -> tuple[int, ...]:
    """Rows of a tile; 0 if the kernel takes all."""
    return tuple(t for t in (32, 64, 128) if t <= max(32, m)) if variant == "tiled" else (0,)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", nargs="+", help="weight:rows")
    parser.add_argument("--form", help="int8, fp16 or many; the usual one when left out")
    arguments = parser.parse_args()
    work: list[tuple[str, int, GemmVariant]] = []
    for item in arguments.work:
        name, _, rows = item.partition(":")
        work.append((name, int(rows), arguments.form or variant_for(int(rows))))
    configs = {
        (name, m, variant): [
            (shape, tile)
            for shape in (narrow(name, m) if variant in ("int8", "fp16") else wide(name))
            for tile in tiles(variant, m)
        ]
        for name, m, variant in work
    }
    compile_ahead(
        [
            (variant, name, m, shape, tile, False)
            for (name, m, variant), tried in configs.items()
            for shape, tile in tried
        ]
    )
    best = {}
    for (name, m, variant), tried in configs.items():
        bench = Bench(name, max(512, m))
        timings = []
        for shape, tile in tried:
            with contextlib.suppress(triton.OutOfResources):
                timings.append((*bench.time(variant, m, shape, tile), shape, tile))
        timings.sort(key=lambda timing: timing[0])
        wrong = [timing for timing in timings if timing[0] == float("inf")]
        print(f"{name} M={m} {variant}: {len(timings)} cuts tried, {len(wrong)} wrong {wrong[:2]}")
        for us, off, shape, tile in timings[:5]:
            print(f"  {us:.2f} us err {off:.1e} {shape} tile {tile}", flush=True)
        best[f"{name}:{m}"] = round(timings[0][0], 2)
        del bench
        torch.cuda.empty_cache()
    print(json.dumps(best))


if __name__ == "__main__":
    main()
