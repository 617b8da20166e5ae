"""W4A16 gemm for 1 to 8 rows on the integer tensor cores: y = x w^T, weights read once.

Letters: M rows, N output and K input features, G = K / 128 column blocks. A row of x comes as 16-bit block
fixed point: one x_scale per column block and row, and each value split into two signed bytes, value =
x_scale * (256*high + low). Then sum_k code*x is a sum of small integers and exact; scale and zero
are applied once per group:

    y = sum_g scale * (x_scale * sum_k code*value - zero * x_scale * sum_k value)

The error is therefore that of rounding x to 16 bits within its column block (2.5e-5 relative on random x;
fp16: 2.1e-4).

    x       int8 [2M, K]: high bytes of row m in row 2m, low bytes in 2m+1, k in the packed order
    factors fp32 [G, MQ, 4], MQ = 4 for M <= 4, else 8: x_scale/16, x_scale * sum of values,
            8 * x_scale * sum over the block's upper half (which undoes the -8 of the high nibbles),
            unused. Groups of 64: x_scale/16, x_scale * sum of values of each group, unused; of 32 so, too,
            but [G, MQ, 8]

The kernel is that of gemm_few.py. The eight columns of the integer `mma` are (high, low) of four rows: 1 to
4 rows cost the same, and give the same bits. One `mma` takes 32 k, so the sums of smaller groups are
scaled apart with no more of them. Not supported: more than 8 rows. The integer arithmetic is our own, in the
spirit of LLM.int8() and QServe.
"""
# mypy: disable-error-code="assignment"
# (Triton unrolls loops over tuples that grow; no type says that)

import triton
import triton.language as tl

from localchat_cuda.kernels.int4.tile_ops import (
    by_feature,
    by_row,
    load_factors,
    load_right,
    nibbles,
    scale_of,
    side_scale,
    side_zero,
    zero_of,
)


def lanes(rows: int) -> int:
    """Return MQ, the rows that `factors` has room for."""
    return 4 if rows <= 4 else 8


def factors_of(group: int) -> int:
    """Return the last extent of `factors`; groups of 16 are of ggml/gemm_int8.py."""
    return {16: 16, 32: 8}.get(group, 4)


@triton.jit
def block_side(x, factors, group, part, rows, few: tl.constexpr):
    """Load what four rows of a column block are multiplied with: three factors, and two operands."""
    a = load_factors(factors, group, part, few, 4, 4, 1)
    b = load_factors(factors + 1, group, part, few, 4, 4, 1)
    c = load_factors(factors + 2, group, part, few, 4, 4, 1)
    low = load_right(x + group * 128, 8 * part, rows, few, 4, False)
    return a, b, c, low, load_right(x + group * 128 + 64, 8 * part, rows, few, 4, False)


@triton.jit
def group_side(x, factors, group, part, rows, few: tl.constexpr):
    """Load the same for smaller groups: a factor of all, then a factor and an operand of each."""
    S: tl.constexpr = 128 // few.GROUP
    H: tl.constexpr = S // 2
    F: tl.constexpr = 8 if few.GROUP == 32 else 4
    side = (load_factors(factors, group, part, few, 4, F, 1),)
    for s in tl.static_range(S):
        pointer = x + group * 128 + s // H * 64 + s % H * 8
        column = load_right(pointer, 8 * part, rows, few, 4, few.GROUP == 32)
        side = side + (load_factors(factors + 1 + s, group, part, few, 4, F, 1), column)
    return side


@triton.jit
def _values(total, WARPS: tl.constexpr):
    """Join the products of (high, low) of four rows: fp32 [16, 4] or [WARPS, 16, 4]."""
    if WARPS == 1:
        upper, lower = tl.split(tl.reshape(total, (16, 4, 2)))
    else:
        upper, lower = tl.split(tl.reshape(total, (WARPS, 16, 4, 2)))
    return (upper * 256 + lower).to(tl.float32)


@triton.jit
def add_block(sums, w, scale_zero, sides, few: tl.constexpr):
    """Add the products of a column block to the sums of all rows."""
    WARPS: tl.constexpr = few.tile.warps
    PARTS: tl.constexpr = few.MP // 4
    low, high = nibbles(w, few.ASM)
    scale = by_feature(scale_of(scale_zero), WARPS)
    zero = by_feature(zero_of(scale_zero), WARPS)
    added = ()
    for p in tl.static_range(PARTS):
        a, b, c, x0, x1 = sides[p]
        total = tl.dot(low, x0, out_dtype=tl.int32) * 16 + tl.dot(high, x1, out_dtype=tl.int32)
        value = _values(total, WARPS) * by_row(a, WARPS) + by_row(c, WARPS)
        added = added + (sums[p] + scale * (value - zero * by_row(b, WARPS)),)
    return added


@triton.jit
def _add_group(sums, w, words, sides, s: tl.constexpr, LESS: tl.constexpr, few: tl.constexpr):
    """Add the products of group s. `w` has codes, or 16 * (code - LESS)."""
    WARPS: tl.constexpr = few.tile.warps
    PARTS: tl.constexpr = few.MP // 4
    first, second, zeros = words
    scale = by_feature(side_scale(first, second, s), WARPS)
    zero = by_feature((side_zero(zeros, s) - LESS).to(tl.float32), WARPS)
    added = ()
    for p in tl.static_range(PARTS):
        a = sides[p][0]
        if LESS == 0:
            a = a * 16.0
        b = by_row(sides[p][1 + 2 * s], WARPS)
        value = _values(tl.dot(w, sides[p][2 + 2 * s], out_dtype=tl.int32), WARPS)
        added = added + (sums[p] + scale * (value * by_row(a, WARPS) - zero * b),)
    return added


@triton.jit
def add_groups(sums, w, words, sides, h: tl.constexpr, few: tl.constexpr):
    """Add the products of a tile: group h in low nibbles, another in high ones."""
    low, high = nibbles(w, few.ASM)
    sums = _add_group(sums, low, words, sides, h, 0, few)
    return _add_group(sums, high, words, sides, 64 // few.GROUP + h, 8, few)
