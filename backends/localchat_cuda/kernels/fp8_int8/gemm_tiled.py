"""W8A16 gemm for 17 to 64 rows: y = x w^T with 8-bit weights.

The weights go through shared memory, by Triton's own pipeline. Arguments and partial sums as in gemm_small.py.
A program owns 16 * blocks output features and a split of K, in steps of 128; weights are copied as bytes into
shared memory, decoded in registers, and are the left operand of Hopper's warpgroup instructions (before Hopper
the same source compiles to `mma`); x is the right one, padded to 32 or 64 rows by repeating some. Grid (N / (16
* blocks), S). Accumulation in fp32. Not supported: more than 64 rows (gemm_dequant.py).
"""

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.fp8_int8.gemm_small import check
from localchat_cuda.kernels.fp8_int8.pack import W8
from localchat_cuda.kernels.fp8_int8.tile_config import W8TileConfig
from localchat_cuda.kernels.fp8_int8.tile_ops import W8Shape, decode, decode_mx, mx_factor
from localchat_cuda.kernels.launch import KernelLaunch, cdiv, power_of_two, release, traits, wait

MAX_ROWS = 64


@triton.jit
def _landed(acc, DECODER: tl.constexpr):
    """Return acc unchanged, but make Triton wait for the multiplication: see int4/gemm_tiled.py.

    Otherwise the next weights may overwrite its registers.
    """
    if DECODER == 0:
        return acc
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit(do_not_specialize=["M"])
def _tiled_kernel(
    x,
    codes,
    scales,
    out,
    M,
    shape: tl.constexpr,
    tile: tl.constexpr,
    MP: tl.constexpr,
    FOUR: tl.constexpr,
    PDL: tl.constexpr,
):
    N: tl.constexpr = shape.N
    K: tl.constexpr = shape.K
    BN: tl.constexpr = 16 * tile.blocks
    SPLITS: tl.constexpr = tile.splits
    G: tl.constexpr = K // 128
    release(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    split = tl.program_id(1)
    k = tl.arange(0, 128)
    m = tl.arange(0, MP)
    row = codes + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    column = x + (m % M)[None, :] * K + k[:, None]
    total = tl.zeros((BN, MP), tl.float32)
    wait(PDL)
    for g in tl.range(split * G // SPLITS, (split + 1) * G // SPLITS, 1, num_stages=tile.stages):
        w = tl.load(row + g * 128, eviction_policy="evict_first")
        if shape.MX:
            words = tl.load(scales + tl.minimum(n, N - 1) * G + g)
            exponents = (words[:, None] >> (8 * (k // 32))[None, :]) & 255
            w = decode_mx(w, mx_factor(exponents), x.dtype.element_ty, shape.DECODER, FOUR)
        else:
            w = decode(w, x.dtype.element_ty, shape.WHOLE, shape.DECODER, FOUR)
        xs = tl.load(column + g * 128)
        if shape.SHARED:
            scale = tl.load(scales + tl.minimum(n, N - 1) // 128 * G + g)
            total += tl.dot(w, xs, input_precision="ieee") * scale[:, None]
        else:
            total = _landed(tl.dot(w, xs, total, input_precision="ieee"), shape.DECODER)
    if not shape.SHARED and not shape.MX:
        total = total * tl.load(scales + n, mask=n < N, other=0.0)[:, None]
    offsets = (split * M + m).to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out + offsets, total, mask=(m < M)[None, :] & (n < N)[:, None])


def gemm(
    x: torch.Tensor,
    weight: W8,
    out: torch.Tensor,
    config: W8TileConfig,
    *,
    decoder: int,
) -> None:
    """Write the partial sums into `out` [S, M, N]; reference: gemm_small.reference."""
    check(x, weight, out, config.splits, max_rows=MAX_ROWS)
    m, (n, k) = x.shape[0], weight.codes.shape
    config.check(n, k)
    gpu = traits(weight.codes.device)
    grid = (cdiv(n, 16 * config.blocks), config.splits)
    KernelLaunch(_tiled_kernel, grid, gpu, config.warps, config.registers).run(
        *(x, weight.raw, weight.words, out, m, W8Shape.of(weight, decoder), config),
        MP=max(16, power_of_two(m)),
        FOUR=not gpu.pdl,
    )
