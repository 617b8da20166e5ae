"""W4A16 gemm for 1 to 16 rows on the tensor cores: y = x w^T, weights read once.

Letters: M rows, N output and K input features, G = K / 128 column blocks. Rows and arithmetic of up to 8 rows
are those of gemm_int8.py, of up to 16 those of gemm_fp16.py.

    out     fp32 [splits, M, N]: partial sums over ranges of K; the reader adds them, always in the
            same order; optionally scaled by 1/rms of the row (row_norm.py)

Grid (N / (16*blocks), splits); a program owns `blocks` row blocks of 16, its `warps` warps take
neighbouring column blocks and are summed at the end; `depth` chunks of `warps` column blocks are loaded
before the first is used. Loads before the wait: CUTLASS's use of programmatic dependent launch.
"""
# mypy: disable-error-code="assignment"
# (Triton unrolls loops over tuples that grow; no type says that)

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.int4 import gemm_fp16, gemm_int8
from localchat_cuda.kernels.int4.activations import Int8Rows, Rows, check_rows, room_of
from localchat_cuda.kernels.int4.pack import W4
from localchat_cuda.kernels.int4.row_norm import RowNorm, inverse_rms, norm_arguments
from localchat_cuda.kernels.int4.tile_config import TileConfig
from localchat_cuda.kernels.int4.tile_ops import Int4FewRows, load_block
from localchat_cuda.kernels.launch import KernelLaunch, release, require, traits, wait

INT8_ROWS = 8
HALF_ROWS = 16
"""Largest row counts of both formats."""


@triton.jit
def _load(
    codes, scale_zeros, block, chunk, G: tl.constexpr, few: tl.constexpr, DEPTH: tl.constexpr
):
    """Return tiles of codes, and their scales and zeros, of each block of DEPTH chunks."""
    # Triton 3.6 takes no field of a tuple as the bound of `static_range`.
    BLOCKS: tl.constexpr = few.tile.blocks
    WARPS: tl.constexpr = few.tile.warps
    SIDES: tl.constexpr = few.GROUP != 128
    # Elements of a word: codes are read as int16 or as bytes.
    N: tl.constexpr = 2 if few.HALF else 4
    ws = ()
    ss = ()
    for d in tl.static_range(DEPTH):
        for r in tl.static_range(BLOCKS):
            column = (chunk + d) * WARPS
            w, s = load_block(codes, scale_zeros, block + r, column, G, few.GROUP, SIDES, WARPS, N)
            ws = ws + (w,)
            ss = ss + (s,)
    return ws, ss


@triton.jit
def _side(x, factors, group, part, rows, few: tl.constexpr):
    """Load what a part of the rows is multiplied with."""
    if few.HALF and few.GROUP == 128:
        return gemm_fp16.block_side(x, factors, group, part, rows, few)
    elif few.HALF:
        return gemm_fp16.group_side(x, factors, group, part, rows, few)
    elif few.GROUP == 128:
        return gemm_int8.block_side(x, factors, group, part, rows, few)
    else:
        return gemm_int8.group_side(x, factors, group, part, rows, few)


@triton.jit
def _add_block(sums, w, words, sides, h: tl.constexpr, few: tl.constexpr):
    """Add the products of tile h of a block to the sums of all rows."""
    if few.HALF and few.GROUP == 128:
        return gemm_fp16.add_block(sums, w, words[0], sides, few)
    elif few.HALF:
        return gemm_fp16.add_groups(sums, w, words, sides, h, few)
    elif few.GROUP == 128:
        return gemm_int8.add_block(sums, w, words[0], sides, few)
    else:
        return gemm_int8.add_groups(sums, w, words, sides, h, few)


@triton.jit
def _multiply(outs, ws, ss, x, factors, rows, chunk, few: tl.constexpr, DEPTH: tl.constexpr):
    """Add the products of DEPTH chunks of column blocks."""
    BLOCKS: tl.constexpr = few.tile.blocks
    PARTS: tl.constexpr = few.MP // (8 if few.HALF else 4)
    TILES: tl.constexpr = 2 if few.GROUP == 32 else 1
    for d in tl.static_range(DEPTH):
        group = (chunk + d) * few.tile.warps
        sides = ()
        for p in tl.static_range(PARTS):
            sides = sides + (_side(x, factors, group, p, rows, few),)
        grown = ()
        for r in tl.static_range(BLOCKS):
            sums = ()
            for p in tl.static_range(PARTS):
                sums = sums + (outs[r * PARTS + p],)
            tiles = ws[d * BLOCKS + r]
            words = ss[d * BLOCKS + r]
            for h in tl.static_range(TILES):
                sums = _add_block(sums, tiles[h], words, sides, h, few)
            grown = grown + sums
        outs = grown
    return outs


@triton.jit(do_not_specialize=["M"])
def _few_kernel(
    x, factors, codes, scale_zeros, out, squares, eps, M, few: tl.constexpr, PDL: tl.constexpr
):
    BLOCKS: tl.constexpr = few.tile.blocks
    WARPS: tl.constexpr = few.tile.warps
    DEPTH: tl.constexpr = few.tile.depth
    G: tl.constexpr = few.K // 128
    CHUNKS: tl.constexpr = G // WARPS
    # Rows of a product, whose columns are two bytes of four rows, or eight rows.
    ROWS: tl.constexpr = 8 if few.HALF else 4
    PARTS: tl.constexpr = few.MP // ROWS
    release(PDL)
    block = tl.program_id(0) * BLOCKS
    split = tl.program_id(1)
    # Chunks of each split if all have as many. Triton takes seconds to compile even loops that never run.
    EACH: tl.constexpr = CHUNKS // few.tile.splits
    EVEN: tl.constexpr = CHUNKS % few.tile.splits == 0
    first = split * CHUNKS // few.tile.splits
    last = (split + 1) * CHUNKS // few.tile.splits
    # Rows of x, of which int8 has two for one of the result.
    rows = M if few.HALF else 2 * M
    outs = ()
    for _ in tl.static_range(BLOCKS * PARTS):
        if WARPS == 1:
            outs = outs + (tl.zeros((16, ROWS), tl.float32),)
        else:
            outs = outs + (tl.zeros((WARPS, 16, ROWS), tl.float32),)
    # The first chunk is peeled so that its loads are issued before the wait for the activations.
    ws, ss = _load(codes, scale_zeros, block, first, G, few, DEPTH)
    wait(PDL)
    outs = _multiply(outs, ws, ss, x, factors, rows, first, few, DEPTH)
    first += DEPTH
    full_end = first + (last - first) // DEPTH * DEPTH
    if not (EVEN and EACH == DEPTH):
        for chunk in tl.range(first, full_end, DEPTH, num_stages=1):
            wl, sl = _load(codes, scale_zeros, block, chunk, G, few, DEPTH)
            outs = _multiply(outs, wl, sl, x, factors, rows, chunk, few, DEPTH)
    if DEPTH > 1 and not (EVEN and EACH % DEPTH == 0):
        for chunk in tl.range(full_end, last, 1, num_stages=1):
            wr, sr = _load(codes, scale_zeros, block, chunk, G, few, 1)
            outs = _multiply(outs, wr, sr, x, factors, rows, chunk, few, 1)
    m = tl.arange(0, ROWS)
    n = tl.arange(0, 16)
    for r in tl.static_range(BLOCKS):
        for p in tl.static_range(PARTS):
            o = outs[r * PARTS + p]
            if WARPS > 1:
                o = tl.sum(o, 0)
            row = p * ROWS + m
            if few.NORM:
                o = o * inverse_rms(squares, row, row < M, eps, G)[None, :]
            offsets = (split * M + row)[None, :] * few.N + ((block + r) * 16 + n)[:, None]
            tl.store(out + offsets, o, mask=(row < M)[None, :])


def gemm(
    rows: Rows, weight: W4, out: torch.Tensor, shape: TileConfig, norm: RowNorm | None = None
) -> None:
    """Write the partial products into `out` [splits, M, N]; see the module docstring.

    `shape.splits` must be out's first extent. HalfRows are in lane order.
    """
    k = weight.features_in
    n = weight.features_out
    device = weight.codes.device
    codes = weight.codes
    m = rows.x.shape[0]
    if isinstance(rows, Int8Rows):
        m //= 2
        fits = 1 <= m <= INT8_ROWS
    else:
        codes = codes.view(torch.int16)
        fits = 1 <= m <= HALF_ROWS and rows.order == "lanes"
    if not fits:
        raise ValueError(
            f"rows: 1 to {INT8_ROWS} of int8 or {HALF_ROWS} in lane order wanted, {m} given"
        )
    if rows.group != weight.group:
        raise ValueError(f"rows: of groups of {weight.group} wanted, {rows.group} given")
    check_rows(rows, m, k, device)
    require("out", out, (shape.splits, m, n), device, torch.float32)
    squares, eps = norm_arguments(norm, m, k, out)
    shape.check(n, k)
    gpu = traits(device)
    is_half = not isinstance(rows, Int8Rows)
    few = Int4FewRows(n, k, is_half, room_of(rows), weight.group, shape, norm is not None, gpu.asm)
    grid = (n // (16 * shape.blocks), shape.splits)
    KernelLaunch(_few_kernel, grid, gpu, shape.warps, shape.registers, rows=1).run(
        rows.x, rows.factors, codes, weight.scale_zeros, out, squares, eps, m, few
    )
