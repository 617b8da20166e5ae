"""W4A16 product for 17 to 128 rows: y = x w^T on Hopper's warpgroup instructions, weights as the
left operand straight from registers, x through shared memory by Triton's own pipeline.

As w4_fp16.py in its arithmetic, its partial sums and its factors; the differences:

    x       fp16 [M, K] in slot order (w4_feed.HalfRows): rows of the right operand are contiguous
    factors fp32 [2, G, MP], MP = 32, 64 or 128

Grid (N / (16 * blocks * warps), splits); a program owns 16 * blocks * warps output features, its
warps side by side along N, 4 warps being the 64 rows of one instruction. `depth` is the number of
pipeline stages. On GPUs before Hopper Triton compiles the same source to `mma`. Not supported: more
than 128 rows.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from localchat_cuda.kernels.int4.activations import HalfRows, check_rows, padded
from localchat_cuda.kernels.int4.pack import GROUP, W4
from localchat_cuda.kernels.int4.tile_ops import halves, inverse_rms, scale_of, zero_of
from localchat_cuda.kernels.int4.tiling import TileConfig
from localchat_cuda.kernels.launch import options, power_of_two, require, traits

MAX_ROWS = 128


@triton.jit(do_not_specialize=["M"])
def _wgmma_kernel(
    x,
    factors,
    codes,
    steps,
    out,
    squares,
    eps,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    MP: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    G_POW2: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    G: tl.constexpr = K // 128
    BN: tl.constexpr = 16 * BLOCKS * WARPS
    if PDL:
        gdc_launch_dependents()
    first_block = tl.program_id(0) * (BLOCKS * WARPS)
    split = tl.program_id(1)
    n = tl.arange(0, BN)
    m = tl.arange(0, MP)
    k = tl.arange(0, 32)
    # (blocks, half, warp, lane, bytes): a warp reads two runs of 512 bytes of its own row block
    i = tl.arange(0, BN * 32)
    run = i % 256 + i // 256 % WARPS * (G * 512) + i // (256 * WARPS) % 2 * 256
    run += i // (512 * WARPS) * (WARPS * G * 512)
    step_at = n // 16 * (G * 16) + n % 16
    row_at = (m % M)[None, :] * K + k[:, None]
    total = tl.zeros((BN, MP), tl.float32)
    if PDL:
        gdc_wait()
    for g in tl.range(split * G // SPLITS, (split + 1) * G // SPLITS, 1, num_stages=STAGES):
        w = tl.load(codes + (first_block * G + g) * 512 + run, eviction_policy="evict_first")
        w = tl.reshape(w, (BLOCKS, 2, WARPS, 8, 4, 2, 2, 2))
        w = tl.reshape(tl.permute(w, (0, 2, 6, 3, 1, 5, 4, 7)), (BN, 32))
        a, b, c, d = halves(w, ASM)
        step = tl.load(steps + (first_block * G + g) * 16 + step_at)
        sums = tl.load(factors + g * MP + m)
        offset = tl.load(factors + (G + g) * MP + m)
        xg = x + g * 128 + row_at
        acc = tl.dot(a, tl.load(xg), tl.broadcast_to(offset[None, :], (BN, MP)))
        acc = tl.dot(b, tl.load(xg + 32), acc)
        acc = tl.dot(c, tl.load(xg + 64), acc)
        acc = tl.dot(d, tl.load(xg + 96), acc)
        total += scale_of(step)[:, None] * (acc - zero_of(step)[:, None] * sums[None, :])
    if NORM:
        total = total * inverse_rms(squares, m, m < M, eps, G, G_POW2)[None, :]
    at = (split * M + m)[None, :] * N + (first_block * 16 + n)[:, None]
    tl.store(out + at, total, mask=(m < M)[None, :])


def product(
    rows: HalfRows,
    weight: W4,
    out: torch.Tensor,
    shape: TileConfig,
    *,
    squares: torch.Tensor | None = None,
    eps: float = 0.0,
    pdl: bool = True,
) -> None:
    """Write the partial products into `out` [splits, M, N]; reference: w4_fp16.reference."""
    m, k, n = rows.x.shape[0], weight.features_in, weight.features_out
    device = weight.codes.device
    if not 1 <= m <= MAX_ROWS or rows.order != "slots":
        raise ValueError(f"rows: 1 to {MAX_ROWS} in slot order wanted, {m} in {rows.order}")
    check_rows(rows, m, k, device)
    require("out", out, (shape.splits, m, n), (torch.float32,), device)
    if squares is not None:
        require("squares", squares, (m, k // GROUP), (torch.float32,), device)
    shape.check(n, k, wide=True)
    way = traits(device)
    pdl = pdl and way.pdl
    _wgmma_kernel[(n // (16 * shape.blocks * shape.warps), shape.splits)](
        rows.x,
        rows.factors,
        weight.codes.view(torch.int16),
        weight.steps,
        out,
        out if squares is None else squares,
        eps,
        m,
        N=n,
        K=k,
        MP=padded(m),
        SPLITS=shape.splits,
        BLOCKS=shape.blocks,
        WARPS=shape.warps,
        STAGES=shape.depth,
        NORM=squares is not None,
        G_POW2=power_of_two(k // GROUP),
        ASM=way.asm,
        PDL=pdl,
        **options(pdl, shape.warps, registers=shape.registers),
    )
