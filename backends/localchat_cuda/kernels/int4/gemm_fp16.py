"""W4A16 gemm for up to 16 rows with fp16 activations on the tensor cores: y = x w^T.

Used for 9 to 16 rows, and as the simpler cross-check of the int8 variant below that. A code q
becomes the fp16 number 1024 + q or 64 + q by one masked operation on two weights at once (exact).
Per-group sums of x, computed once by the producer (activations.HalfRows), remove the constants, and
scale and zero are applied once per group in fp32:

    y = sum_g scale * (sum_k (offset + q) x - offset * sum x - zero * sum x)

    x       fp16 [M, K] in lane order (activations.HalfRows)     factors fp32 [2, G, MP], MP = 8 or 16
            Groups of 32 and 64 are of one offset each, which is added to their zero: factors [1, K / group, MP]
    out     fp32 [splits, M, N] partial sums; `squares` as in gemm_int8.py

The kernel is that of gemm_few.py. Accumulation in fp32; error against fp32 activations 2.1e-4
(fp16's own). Not supported: more than 16 rows. The masked unpacking is that of
FasterTransformer's and Marlin's fast conversion, arranged for our byte order.
"""
# mypy: disable-error-code="assignment"
# (Triton unrolls loops over tuples that grow; no type says that)

import triton
import triton.language as tl

from localchat_cuda.kernels.int4.tile_ops import (
    halves,
    load_columns,
    scale_of,
    side_scale,
    side_zero,
    zero_of,
)


@triton.jit
def _columns(x, first, rows, few: tl.constexpr, HALF: tl.constexpr):
    """Load the right operand of eight rows: a quarter of a group, 16 bytes a lane.

    With HALF it is an eighth, 8 bytes a lane. Columns past the last row repeat earlier ones, which avoids a
    mask. Their results are not stored.
    """
    m = (first + tl.arange(0, 8)) % rows
    return load_columns(x, m * few.K, few.tile.warps, 2, HALF)


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
                _columns(x + group * 128, 8 * p, rows, few, False),
                _columns(x + group * 128 + 32, 8 * p, rows, few, False),
                _columns(x + group * 128 + 64, 8 * p, rows, few, False),
                _columns(x + group * 128 + 96, 8 * p, rows, few, False),
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
                xa = _columns(pointer, 8 * p, rows, few, few.GROUP == 32)
                xb = _columns(pointer + 32, 8 * p, rows, few, few.GROUP == 32)
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
def multiply_half(outs, ws, ss, x, factors, rows, chunk, few: tl.constexpr, DEPTH: tl.constexpr):
    """Add the products of DEPTH chunks of column blocks."""
    if few.GROUP == 128:
        return _multiply_blocks(outs, ws, ss, x, factors, rows, chunk, few, DEPTH)
    else:
        return _multiply_groups(outs, ws, ss, x, factors, rows, chunk, few, DEPTH)
