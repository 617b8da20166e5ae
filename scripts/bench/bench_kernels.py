"""Checks and times the CUDA kernels on one GPU.

    python scripts/bench/bench_kernels.py [PARTS]

Shapes are those of Qwen2.5-7B with AWQ weights, all random. Every kernel is checked against fp32 on
poisoned outputs before it is timed; times are medians of 7 replays of a CUDA graph over more than 450
MB of rotating weights, so that nothing comes from the L2 cache. PARTS: floors, products (the gemms),
chain, sampler, few (decode attention), many (prefill attention), coded (attention over 8-bit KV), head,
dense, overlap (dequantizing ahead), ordered (columns sorted for act-order), windows (shapes of Gemma
and Mistral), bytes (8-bit weights), groups (int4 gemms in groups of 128, 64 and 32), ggml (gemms of GGUF's
formats), experts (a layer of Qwen3-30B-A3B); chunks (Hopper GPUs) and byte_cuts (tile configs) only when named.
Prints a table, and JSON as the last line.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "backends"))

from localchat_cuda.kernels import skinny_gemm
from localchat_cuda.kernels.int4 import gemm_dequant as w4_dequant
from localchat_cuda.kernels.int4 import pack as w4_pack
from localchat_cuda.kernels.int4 import tile_config as w4_tile_config
from localchat_cuda.kernels.int4.tile_config import TileConfig
from localchat_cuda.weights.formats.weight import bytes_of
from scripts.bench.kernels.awkward import awkward
from scripts.bench.kernels.bytes import as_cut, other_cuts
from scripts.bench.kernels.chain import chain
from scripts.bench.kernels.chunks import chunks
from scripts.bench.kernels.coded import coded
from scripts.bench.kernels.draws import sampler
from scripts.bench.kernels.experts import experts_part
from scripts.bench.kernels.ggml import ggml_part
from scripts.bench.kernels.groups import groups
from scripts.bench.kernels.ordered import ordered
from scripts.bench.kernels.overlap import overlap
from scripts.bench.kernels.paged import few, many
from scripts.bench.kernels.timing import (
    FLUSH_BYTES,
    GPU,
    HIDDEN,
    SHAPES,
    VOCABULARY,
    Bench,
    Results,
    compile_ahead,
    cut_of,
    error,
    random_w4,
    timed,
)
from scripts.bench.kernels.windows import windows

PRODUCT_ROWS = (1, 4, 8, 16, 32, 33, 48, 64, 128, 256, 512)


@triton.jit  # type: ignore[untyped-decorator]
def _read_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202
    x,  # noqa: ANN001
    out,  # noqa: ANN001
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
):
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


def products() -> Results:
    found: Results = {}
    for name in SHAPES:
        bench = Bench(name)
        for m in PRODUCT_ROWS:
            variant = w4_tile_config.variant_for(m)
            shape, tile = cut_of(variant, m, bench.n, bench.k)
            us, off = bench.time(variant, m, shape, tile)
            rate = bytes_of(bench.weights[0]) / us / 1e6
            found[f"{name}_M{m}_us"] = us
            text = (
                f"product {name:8} M={m:3} {variant:5} {us:7.2f} us {rate:5.2f} TB/s err {off:.1e}"
            )
            print(text, shape, flush=True)
        del bench
        torch.cuda.empty_cache()
    return found


def jobs() -> list[tuple[str, str, int, TileConfig, int, bool]]:
    """The kernels that the parts `products` and `chain` will compile."""
    found: list[tuple[str, str, int, TileConfig, int, bool]] = []
    for name, (n, k) in SHAPES.items():
        for m in PRODUCT_ROWS:
            variant = w4_tile_config.variant_for(m)
            shape, tile = cut_of(variant, m, n, k)
            found.append((variant, name, m, shape, tile, False))
            if name in ("gate_up", "qkv") and m <= 128:
                found.append((variant, name, m, shape, tile, True))
    return found


def head() -> Results:
    found: Results = {}
    weights = [torch.randn(VOCABULARY, HIDDEN, device=GPU, dtype=torch.bfloat16) for _ in range(2)]
    for m in (1, 2, 8, 16, 32, 64):
        x = torch.randn(m, HIDDEN, device=GPU, dtype=torch.bfloat16)
        out = torch.full((m, VOCABULARY), float("nan"), device=GPU)
        skinny_gemm.gemm(x, weights[0], out)
        off = error(out, skinny_gemm.reference(x, weights[0]))
        us = timed([partial(skinny_gemm.gemm, x, w, out) for w in weights * 3]) / 6
        library = timed([partial(torch.matmul, x, w.t()) for w in weights * 3]) / 6
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
        weights = [random_w4(n, k) for _ in range(max(4, round(FLUSH_BYTES / (n * k / 2))))]
        whole = torch.empty(n, k, device=GPU, dtype=torch.float16)
        us = timed([partial(w4_dequant.dequantize, w, whole) for w in weights]) / len(weights)
        moved = bytes_of(weights[0]) + 2 * n * k
        print(f"dequantize {name}: {us:.1f} us, {moved / us / 1e6:.2f} TB/s read and written")
        found[f"dequantize_{name}_us"] = us
        for m in (128, 512, 2048):
            x = torch.randn(m, k, device=GPU, dtype=torch.float16)
            out = torch.full((m, n), float("nan"), device=GPU, dtype=torch.float16)
            w4_dequant.gemm(x, weights[0], out)
            off = error(out[:64], x[:64].float() @ w4_pack.dense(weights[0]).t())
            calls = [partial(w4_dequant.gemm, x, w, out) for w in weights[:4]]
            us = timed(calls) / 4
            library = timed([partial(torch.matmul, x, whole.t())] * 4) / 4
            text = f"{us:.1f} us, the product alone {library:.1f} us, err {off:.1e}"
            print(f"dense {name} M={m}: {text}", flush=True)
            found[f"dense_{name}_M{m}_us"] = us
    return found


PARTS: dict[str, Callable[[], Results]] = {
    "awkward": awkward,
    "floors": floors,
    "products": products,
    "chain": chain,
    "sampler": sampler,
    "few": few,
    "many": many,
    "coded": coded,
    "chunks": chunks,
    "head": head,
    "dense": dense,
    "overlap": overlap,
    "ordered": ordered,
    "windows": windows,
    "bytes": as_cut,
    "groups": groups,
    "ggml": ggml_part,
    "experts": experts_part,
    "byte_cuts": other_cuts,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}")
    wanted = parser.parse_args().parts or [
        part for part in PARTS if part not in ("chunks", "byte_cuts")
    ]
    torch.manual_seed(1)
    began = time.monotonic()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    if {"products", "chain"} & set(wanted):
        compile_ahead(jobs())
    found: dict[str, Results] = {}
    for part in wanted:
        print(f"-- {part}, {time.monotonic() - began:.0f} s")
        found[part] = PARTS[part]()
    print(f"-- done, {time.monotonic() - began:.0f} s")
    print(json.dumps({p: {k: round(v, 4) for k, v in r.items()} for p, r in found.items()}))


if __name__ == "__main__":
    main()
