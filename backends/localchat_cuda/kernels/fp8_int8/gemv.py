"""W8A16 gemv: y = x w^T for one row with 8-bit weights, without tensor cores.

No operand layout restricts the loads, so a warp reads long runs of few rows of the weight, the fastest pattern
for memory.

Letters: N output and K input features, G = K / 128.

    x    fp16 or bf16 [1, K] (in the interpreter also fp32)    pack.W8 of N x K, K in 128s
    out  fp32 [1, 1, N]

Codes become fp16, exactly, and products and sums are fp32: about three operations a weight, where the memory
bandwidth of an H200 allows seven. Grid (N / rows of a program). Row scales multiply the result, block scales
and those of MXFP8 sums of 16 columns. With PDL the first codes and their scales are loaded before the kernel
waits for x.
"""

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.fp8_int8.gemm_small import check
from localchat_cuda.kernels.fp8_int8.pack import BLOCK, W8
from localchat_cuda.kernels.fp8_int8.tile_config import GemvConfig
from localchat_cuda.kernels.fp8_int8.tile_ops import W8Shape, decode, power
from localchat_cuda.kernels.launch import KernelLaunch, cdiv, release, traits, wait


@triton.jit
def _codes(row, c, K: tl.constexpr, RUN: tl.constexpr):
    """Load codes of the program's rows, `RUN` columns from c * RUN on."""
    k = c * RUN + tl.arange(0, RUN)[None, :]
    if K % RUN == 0:
        return tl.load(row + k, eviction_policy="evict_first")
    else:
        return tl.load(row + k, mask=k < K, other=0, eviction_policy="evict_first")


@triton.jit
def _shares(scales, c, n, shape: tl.constexpr, RUN: tl.constexpr):
    """Load the block scale for each 16 of `RUN` columns from c * RUN on. MXFP8: for each row n, too."""
    K: tl.constexpr = shape.K
    if shape.SHARED:
        g = c * (RUN // 128) + tl.arange(0, RUN // 16) // 8
        return tl.load(scales + tl.minimum(g, K // 128 - 1))[None, :]
    elif shape.MX:
        g = c * (RUN // 128) + tl.arange(0, RUN // 16) // 8
        row = scales + tl.minimum(n, shape.N - 1)[:, None] * (K // 128)
        return tl.load(row + tl.minimum(g, K // 128 - 1)[None, :])
    else:
        return 1.0


@triton.jit
def _multiplied(w, x, shares, c, shape: tl.constexpr, RUN: tl.constexpr):
    """Compute sums of 16 columns each, times `shares` if columns have scales."""
    K: tl.constexpr = shape.K
    k = c * RUN + tl.arange(0, RUN)
    if K % RUN == 0:
        xs = tl.load(x + k).to(tl.float32)
    else:
        xs = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    product = decode(w, tl.float16, shape.WHOLE, shape.DECODER, True).to(tl.float32) * xs[None, :]
    # One thread adds up the 16 codes of its load, which leaves registers for more loads.
    parts = tl.sum(tl.reshape(product, (w.shape[0], RUN // 16, 16)), 2)
    if shape.SHARED:
        parts *= shares
    elif shape.MX:
        parts *= power(shares, tl.arange(0, RUN // 16)[None, :] // 2 % 4)
    return parts


@triton.jit
def _gemv_kernel(
    x,
    codes,
    scales,
    out,
    shape: tl.constexpr,
    tile: tl.constexpr,
    PDL: tl.constexpr,
):
    N: tl.constexpr = shape.N
    K: tl.constexpr = shape.K
    SHARED: tl.constexpr = shape.SHARED
    BY_ROW: tl.constexpr = not SHARED and not shape.MX
    ROWS: tl.constexpr = tile.rows
    RUN: tl.constexpr = tile.run
    release(PDL)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = codes + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K
    w = _codes(row, 0, K, RUN)
    if SHARED:
        # ROWS divides 128, so all rows of a program lie in one block
        scales += tl.program_id(0) * ROWS // 128 * (K // 128)
    elif BY_ROW:
        scale = tl.load(scales + n, mask=n < N, other=0.0)
    shares = _shares(scales, 0, n, shape, RUN)
    wait(PDL)
    acc = _multiplied(w, x, shares, 0, shape, RUN)
    for c in tl.range(1, tl.cdiv(K, RUN), 1, num_stages=1, loop_unroll_factor=tile.unroll):
        w = _codes(row, c, K, RUN)
        shares = _shares(scales, c, n, shape, RUN)
        acc += _multiplied(w, x, shares, c, shape, RUN)
    y = tl.sum(acc, 1)
    if BY_ROW:
        y *= scale
    tl.store(out + n, y, mask=n < N)


def gemv(
    x: torch.Tensor,
    weight: W8,
    out: torch.Tensor,
    config: GemvConfig,
    *,
    decoder: int,
) -> None:
    """Write the result into `out` [1, 1, N]; `decoder` as in tile_ops.py."""
    check(x, weight, out, 1, max_rows=1)
    if BLOCK % config.rows or config.run % BLOCK:
        raise ValueError(
            f"config: rows that divide {BLOCK} and a run in {BLOCK}s wanted, {config} given"
        )
    grid = (cdiv(weight.features_out, config.rows),)
    gpu = traits(weight.codes.device)
    KernelLaunch(_gemv_kernel, grid, gpu, config.warps, rows=1).run(
        x, weight.raw, weight.words, out, W8Shape.of(weight, decoder), config
    )
