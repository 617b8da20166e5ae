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
    by_feature,
    by_row,
    halves,
    load_factors,
    load_right,
    scale_of,
    side_scale,
    side_zero,
    zero_of,
)


@triton.jit
def block_side(x, factors, group, part, rows, few: tl.constexpr):
    """Load what eight rows of a column block are multiplied with: two factors, and four operands."""
    total = load_factors(factors, group, part, few, 8, 1, 1)
    offset = load_factors(factors + (few.K // 128) * few.MP, group, part, few, 8, 1, 1)
    xa = load_right(x + group * 128, 8 * part, rows, few, 2, False)
    xb = load_right(x + group * 128 + 32, 8 * part, rows, few, 2, False)
    xc = load_right(x + group * 128 + 64, 8 * part, rows, few, 2, False)
    return (
        total,
        offset,
        xa,
        xb,
        xc,
        load_right(x + group * 128 + 96, 8 * part, rows, few, 2, False),
    )


@triton.jit
def group_side(x, factors, group, part, rows, few: tl.constexpr):
    """Load the same for smaller groups: a factor and two operands of each."""
    S: tl.constexpr = 128 // few.GROUP
    H: tl.constexpr = S // 2
    side = ()
    for s in tl.static_range(S):
        pointer = x + group * 128 + s // H * 64 + s % H * 4
        xa = load_right(pointer, 8 * part, rows, few, 2, few.GROUP == 32)
        xb = load_right(pointer + 32, 8 * part, rows, few, 2, few.GROUP == 32)
        side = side + (load_factors(factors, group * S + s, part, few, 8, 1, S), xa, xb)
    return side


@triton.jit
def add_block(sums, w, scale_zero, sides, few: tl.constexpr):
    """Add the products of a column block to the sums of all rows."""
    WARPS: tl.constexpr = few.tile.warps
    PARTS: tl.constexpr = few.MP // 8
    a, b, c, d = halves(w, few.ASM)
    scale = by_feature(scale_of(scale_zero), WARPS)
    zero = by_feature(zero_of(scale_zero), WARPS)
    added = ()
    for p in tl.static_range(PARTS):
        total, offset, xa, xb, xc, xd = sides[p]
        acc = tl.dot(a, xa, tl.broadcast_to(by_row(offset, WARPS), sums[p].shape))
        acc = tl.dot(b, xb, acc)
        acc = tl.dot(c, xc, acc)
        acc = tl.dot(d, xd, acc)
        added = added + (sums[p] + scale * (acc - zero * by_row(total, WARPS)),)
    return added


@triton.jit
def _add_group(sums, a, b, words, sides, s: tl.constexpr, OFFSET: tl.constexpr, few: tl.constexpr):
    """Add the products of group s. a and b are OFFSET + code."""
    WARPS: tl.constexpr = few.tile.warps
    PARTS: tl.constexpr = few.MP // 8
    first, second, zeros = words
    scale = by_feature(side_scale(first, second, s), WARPS)
    zero = by_feature((side_zero(zeros, s) + OFFSET).to(tl.float32), WARPS)
    added = ()
    for p in tl.static_range(PARTS):
        total = by_row(sides[p][3 * s], WARPS)
        acc = tl.dot(b, sides[p][3 * s + 2], tl.dot(a, sides[p][3 * s + 1]))
        added = added + (sums[p] + scale * (acc - zero * total),)
    return added


@triton.jit
def add_groups(sums, w, words, sides, h: tl.constexpr, few: tl.constexpr):
    """Add the products of a tile: group h in low nibbles, another in high ones."""
    a, b, c, d = halves(w, few.ASM)
    sums = _add_group(sums, a, b, words, sides, h, 1024, few)
    return _add_group(sums, c, d, words, sides, 64 // few.GROUP + h, 64, few)
