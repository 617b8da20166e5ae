"""W4A16 gemm for up to 16 rows with fp16 activations on the tensor cores: y = x w^T.

Used for 9 to 16 rows, and as the simpler cross-check of the int8 variant below that. A code q
becomes the fp16 number 1024 + q or 64 + q by one masked operation on two weights at once (exact).
Per-group sums of x, computed once by the producer (activations.HalfRows), remove the constants, and
scale and zero are applied once per group in fp32:

    y = sum_g scale * (sum_k (offset + q) x - offset * sum x - zero * sum x)

    x       fp16 [M, K] in lane order (activations.HalfRows)     factors fp32 [2, G, MP], MP = 8 or 16
            Groups of 32 and 64 are of one offset each, which is added to their zero: factors [1, K / group, MP]
    out     fp32 [splits, M, N] partial sums; `squares` as in gemm_int8.py

Grid and tile config as in gemm_int8.py. Accumulation in fp32; error against fp32 activations 2.1e-4
(fp16's own). Not supported: more than 16 rows. The masked unpacking is that of
FasterTransformer's and Marlin's fast conversion, arranged for our byte order.
"""
# mypy: disable-error-code="assignment"
# (Triton unrolls loops over tuples that grow; no type says that)

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.int4.activations import HalfRows, check_rows, natural_order, padded
from localchat_cuda.kernels.int4.pack import BLOCK_K, W4, dense
from localchat_cuda.kernels.int4.tile_config import TileConfig
from localchat_cuda.kernels.int4.tile_ops import (
    Int4FewRows,
    halves,
    inverse_rms,
    load_half_pairs,
    load_pairs,
    load_scale_zeros,
    load_sides,
    scale_of,
    side_scale,
    side_zero,
    zero_of,
)
from localchat_cuda.kernels.launch import Launch, release, require, tensor_or, traits, wait

MAX_ROWS = 16


def reference(rows: HalfRows, weight: W4, squares: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Compute the gemm [M, N] in fp32 from fp16 rows in either order, with plain torch."""
    k = rows.x.shape[1]
    x = natural_order(rows.x, rows.order, rows.group).float()
    if squares is not None:
        x = x * torch.rsqrt(squares.sum(1, keepdim=True) / k + eps)
    return x @ dense(weight).t()


@triton.jit
def _columns(x, first, rows, few: tl.constexpr):
    """Load the right operand [32, 8] or [WARPS, 32, 8]: a quarter of a group for eight rows, 16 bytes a lane.

    Columns past the last row repeat earlier ones, which avoids a mask; their results are not stored.
    """
    WARPS: tl.constexpr = few.tile.warps
    k = tl.arange(0, 32)
    m = (first + tl.arange(0, 8)) % rows
    if WARPS == 1:
        tile = tl.load(x + m[:, None] * few.K + k[None, :])
        tile = tl.permute(tl.reshape(tile, (8, 4, 2, 2, 2)), (2, 3, 1, 4, 0))
        return tl.reshape(tile, (32, 8))
    else:
        warp = tl.arange(0, WARPS)
        tile = tl.load(x + m[:, None, None] * few.K + warp[None, :, None] * 128 + k[None, None, :])
        tile = tl.permute(tl.reshape(tile, (8, WARPS, 4, 2, 2, 2)), (1, 3, 4, 2, 5, 0))
        return tl.reshape(tile, (WARPS, 32, 8))


@triton.jit
def _half_columns(x, first, rows, few: tl.constexpr):
    """Load half of `_columns`, [16, 8] or [WARPS, 16, 8], 8 bytes per lane."""
    WARPS: tl.constexpr = few.tile.warps
    k = tl.arange(0, 16)
    k = k // 4 * 8 + k % 4
    m = (first + tl.arange(0, 8)) % rows
    if WARPS == 1:
        tile = tl.load(x + m[:, None] * few.K + k[None, :])
        tile = tl.permute(tl.reshape(tile, (8, 4, 2, 2)), (2, 1, 3, 0))
        return tl.reshape(tile, (16, 8))
    else:
        warp = tl.arange(0, WARPS)
        tile = tl.load(x + m[:, None, None] * few.K + warp[None, :, None] * 128 + k[None, None, :])
        tile = tl.permute(tl.reshape(tile, (8, WARPS, 4, 2, 2)), (1, 3, 2, 4, 0))
        return tl.reshape(tile, (WARPS, 16, 8))


@triton.jit
def _factor(factors, group, part, few: tl.constexpr, S: tl.constexpr):
    """Load factors of eight rows; those of neighbouring column blocks are S groups apart."""
    m = tl.arange(0, 8)
    if few.tile.warps == 1:
        return tl.load(factors + group * few.MP + part * 8 + m)
    else:
        warp = tl.arange(0, few.tile.warps)[:, None]
        return tl.load(factors + (group + warp * S) * few.MP + part * 8 + m[None, :])


@triton.jit
def _accumulate(out, a, b, c, d, scale, zero, total, offset, xa, xb, xc, xd, WARPS: tl.constexpr):
    if WARPS == 1:
        acc = tl.dot(a, xa, tl.broadcast_to(offset[None, :], out.shape))
    else:
        acc = tl.dot(a, xa, tl.broadcast_to(offset[:, None, :], out.shape))
    acc = tl.dot(b, xb, acc)
    acc = tl.dot(c, xc, acc)
    acc = tl.dot(d, xd, acc)
    if WARPS == 1:
        return out + scale[:, None] * (acc - zero[:, None] * total[None, :])
    else:
        return out + scale[:, :, None] * (acc - zero[:, :, None] * total[:, None, :])


@triton.jit
def _accumulate_group(out, a, b, xa, xb, scale, zero, total, WARPS: tl.constexpr):
    """Add the products of one group; `zero` includes the offset of its unpacked codes."""
    acc = tl.dot(b, xb, tl.dot(a, xa))
    if WARPS == 1:
        return out + scale[:, None] * (acc - zero[:, None] * total[None, :])
    else:
        return out + scale[:, :, None] * (acc - zero[:, :, None] * total[:, None, :])


@triton.jit
def _load(
    codes, scale_zeros, block, chunk, G: tl.constexpr, few: tl.constexpr, DEPTH: tl.constexpr
):
    """Return tiles of codes, and one or three words of scales and zeros.

    Groups of 32 have two tiles per block.
    """
    BLOCKS: tl.constexpr = few.tile.blocks
    WARPS: tl.constexpr = few.tile.warps
    ws = ()
    ss = ()
    for d in tl.static_range(DEPTH):
        for r in tl.static_range(BLOCKS):
            offset = (block + r) * G + (chunk + d) * WARPS
            if few.GROUP == 32:
                ws = ws + (
                    load_half_pairs(codes, offset * 512, WARPS),
                    load_half_pairs(codes, offset * 512 + 256, WARPS),
                )
            else:
                ws = ws + (load_pairs(codes, offset * 512, WARPS),)
            if few.GROUP == 128:
                ss = ss + (load_scale_zeros(scale_zeros, offset * 16, WARPS),)
            else:
                ss = ss + load_sides(
                    scale_zeros, block + r, (chunk + d) * WARPS, G, few.GROUP, WARPS
                )
    return ws, ss


@triton.jit
def _multiply_blocks(outs, ws, ss, x, factors, rows, chunk, few: tl.constexpr, DEPTH: tl.constexpr):
    BLOCKS: tl.constexpr = few.tile.blocks
    PARTS: tl.constexpr = few.MP // 8
    for d in tl.static_range(DEPTH):
        group = (chunk + d) * few.tile.warps
        side = ()
        for p in tl.static_range(PARTS):
            side = side + (
                _factor(factors, group, p, few, 1),
                _factor(factors + (few.K // 128) * few.MP, group, p, few, 1),
                _columns(x + group * 128, 8 * p, rows, few),
                _columns(x + group * 128 + 32, 8 * p, rows, few),
                _columns(x + group * 128 + 64, 8 * p, rows, few),
                _columns(x + group * 128 + 96, 8 * p, rows, few),
            )
        grown = ()
        for r in tl.static_range(BLOCKS):
            a, b, c, d_ = halves(ws[d * BLOCKS + r], few.ASM)
            scale = scale_of(ss[d * BLOCKS + r])
            zero = zero_of(ss[d * BLOCKS + r])
            for p in tl.static_range(PARTS):
                grown = grown + (
                    _accumulate(
                        outs[r * PARTS + p],
                        a,
                        b,
                        c,
                        d_,
                        scale,
                        zero,
                        side[6 * p],
                        side[6 * p + 1],
                        side[6 * p + 2],
                        side[6 * p + 3],
                        side[6 * p + 4],
                        side[6 * p + 5],
                        few.tile.warps,
                    ),
                )
        outs = grown
    return outs


@triton.jit
def _add_group(
    sums,
    a,
    b,
    side,
    first,
    second,
    zeros,
    s: tl.constexpr,
    OFFSET: tl.constexpr,
    PARTS: tl.constexpr,
    S: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Add the products of group s to the sums of all parts. a and b are OFFSET + code."""
    scale = side_scale(first, second, s)
    zero = (side_zero(zeros, s) + OFFSET).to(tl.float32)
    added = ()
    for p in tl.static_range(PARTS):
        total = side[3 * (p * S + s)]
        xa = side[3 * (p * S + s) + 1]
        xb = side[3 * (p * S + s) + 2]
        added = added + (_accumulate_group(sums[p], a, b, xa, xb, scale, zero, total, WARPS),)
    return added


@triton.jit
def _multiply_groups(outs, ws, ss, x, factors, rows, chunk, few: tl.constexpr, DEPTH: tl.constexpr):
    """Multiply the S groups of a column block. Half of them are low nibbles, half high ones."""
    BLOCKS: tl.constexpr = few.tile.blocks
    PARTS: tl.constexpr = few.MP // 8
    S: tl.constexpr = 128 // few.GROUP
    H: tl.constexpr = S // 2
    for d in tl.static_range(DEPTH):
        group = (chunk + d) * few.tile.warps
        side = ()
        for p in tl.static_range(PARTS):
            for s in tl.static_range(S):
                pointer = x + group * 128 + s // H * 64 + s % H * 4
                if few.GROUP == 32:
                    xa = _half_columns(pointer, 8 * p, rows, few)
                    xb = _half_columns(pointer + 32, 8 * p, rows, few)
                else:
                    xa = _columns(pointer, 8 * p, rows, few)
                    xb = _columns(pointer + 32, 8 * p, rows, few)
                side = side + (_factor(factors, group * S + s, p, few, S), xa, xb)
        grown = ()
        for r in tl.static_range(BLOCKS):
            sums = ()
            for p in tl.static_range(PARTS):
                sums = sums + (outs[r * PARTS + p],)
            first = ss[3 * (d * BLOCKS + r)]
            second = ss[3 * (d * BLOCKS + r) + 1]
            zeros = ss[3 * (d * BLOCKS + r) + 2]
            for h in tl.static_range(H):
                e, f, g, i = halves(ws[(d * BLOCKS + r) * H + h], few.ASM)
                sums = _add_group(
                    sums, e, f, side, first, second, zeros, h, 1024, PARTS, S, few.tile.warps
                )
                sums = _add_group(
                    sums, g, i, side, first, second, zeros, H + h, 64, PARTS, S, few.tile.warps
                )
            grown = grown + sums
        outs = grown
    return outs


@triton.jit
def _multiply(outs, ws, ss, x, factors, rows, chunk, few: tl.constexpr, DEPTH: tl.constexpr):
    if few.GROUP == 128:
        return _multiply_blocks(outs, ws, ss, x, factors, rows, chunk, few, DEPTH)
    else:
        return _multiply_groups(outs, ws, ss, x, factors, rows, chunk, few, DEPTH)


@triton.jit(do_not_specialize=["M"])
def _fp16_kernel(
    x, factors, codes, scale_zeros, out, squares, eps, M, few: tl.constexpr, PDL: tl.constexpr
):
    BLOCKS: tl.constexpr = few.tile.blocks
    WARPS: tl.constexpr = few.tile.warps
    DEPTH: tl.constexpr = few.tile.depth
    G: tl.constexpr = few.K // 128
    CHUNKS: tl.constexpr = G // WARPS
    PARTS: tl.constexpr = few.MP // 8
    release(PDL)
    block = tl.program_id(0) * BLOCKS
    split = tl.program_id(1)
    first = split * CHUNKS // few.tile.splits
    last = (split + 1) * CHUNKS // few.tile.splits
    outs = ()
    for _ in tl.static_range(BLOCKS * PARTS):
        if WARPS == 1:
            outs = outs + (tl.zeros((16, 8), tl.float32),)
        else:
            outs = outs + (tl.zeros((WARPS, 16, 8), tl.float32),)
    # The first chunk is peeled so that its loads are issued before the wait for the activations.
    ws, ss = _load(codes, scale_zeros, block, first, G, few, DEPTH)
    wait(PDL)
    outs = _multiply(outs, ws, ss, x, factors, M, first, few, DEPTH)
    first += DEPTH
    full_end = first + (last - first) // DEPTH * DEPTH
    for chunk in tl.range(first, full_end, DEPTH, num_stages=1):
        wl, sl = _load(codes, scale_zeros, block, chunk, G, few, DEPTH)
        outs = _multiply(outs, wl, sl, x, factors, M, chunk, few, DEPTH)
    if DEPTH > 1:
        for chunk in tl.range(full_end, last, 1, num_stages=1):
            wr, sr = _load(codes, scale_zeros, block, chunk, G, few, 1)
            outs = _multiply(outs, wr, sr, x, factors, M, chunk, few, 1)
    m = tl.arange(0, 8)
    n = tl.arange(0, 16)
    for r in tl.static_range(BLOCKS):
        for p in tl.static_range(PARTS):
            o = outs[r * PARTS + p]
            if WARPS > 1:
                o = tl.sum(o, 0)
            row = p * 8 + m
            if few.NORM:
                o = o * inverse_rms(squares, row, row < M, eps, G)[None, :]
            offsets = (split * M + row)[None, :] * few.N + ((block + r) * 16 + n)[:, None]
            tl.store(out + offsets, o, mask=(row < M)[None, :])


def gemm(
    rows: HalfRows,
    weight: W4,
    out: torch.Tensor,
    shape: TileConfig,
    *,
    squares: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Write the partial products into `out` [splits, M, N]; see the module docstring."""
    m = rows.x.shape[0]
    k = weight.features_in
    n = weight.features_out
    device = weight.codes.device
    if not 1 <= m <= MAX_ROWS or rows.order != "lanes":
        raise ValueError(f"rows: 1 to {MAX_ROWS} in lane order wanted, {m} in {rows.order}")
    check_rows(rows, m, k, device)
    if rows.group != weight.group:
        raise ValueError(f"rows: of groups of {weight.group} wanted, {rows.group} given")
    require("out", out, (shape.splits, m, n), (torch.float32,), device)
    if squares is not None:
        require("squares", squares, (m, k // BLOCK_K), (torch.float32,), device)
    shape.check(n, k)
    gpu = traits(device)
    few = Int4FewRows(n, k, padded(m), weight.group, shape, squares is not None, gpu.asm)
    weights = (weight.codes.view(torch.int16), weight.scale_zeros)
    grid = (n // (16 * shape.blocks), shape.splits)
    Launch(_fp16_kernel, grid, gpu, shape.warps, shape.registers, rows=1).run(
        rows.x, rows.factors, *weights, out, tensor_or(squares, out), eps, m, few
    )
