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
    load_columns,
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
def _factor(factors, group, part, few: tl.constexpr, F: tl.constexpr):
    m = tl.arange(0, 4)
    if few.tile.warps == 1:
        return tl.load(factors + group * (few.MP * F) + part * (4 * F) + m * F)
    else:
        warp = tl.arange(0, few.tile.warps)[:, None]
        return tl.load(factors + (group + warp) * (few.MP * F) + part * (4 * F) + m[None, :] * F)


@triton.jit
def _columns(x, first, rows, few: tl.constexpr, HALF: tl.constexpr):
    """Load the right operand: (high, low) of four rows, 64 columns or with HALF 32.

    Columns past the last row repeat earlier ones, which avoids a mask; their results are not stored.
    """
    n = (first + tl.arange(0, 8)) % rows
    return load_columns(x, n * few.K, few.tile.warps, 4, HALF)


@triton.jit
def _accumulate_group(out, w, x, scale, zero, a, b, WARPS: tl.constexpr):
    """Add the products of one group. a: scale of the products of x and codes as unpacked."""
    total = tl.dot(w, x, out_dtype=tl.int32)
    if WARPS == 1:
        upper, lower = tl.split(tl.reshape(total, (16, 4, 2)))
        value = (upper * 256 + lower).to(tl.float32)
        return out + scale[:, None] * (value * a[None, :] - zero[:, None] * b[None, :])
    else:
        upper, lower = tl.split(tl.reshape(total, (WARPS, 16, 4, 2)))
        value = (upper * 256 + lower).to(tl.float32)
        return out + scale[:, :, None] * (value * a[:, None, :] - zero[:, :, None] * b[:, None, :])


@triton.jit
def _accumulate(out, low, high, scale, zero, a, b, c, x0, x1, WARPS: tl.constexpr):
    total = tl.dot(low, x0, out_dtype=tl.int32) * 16 + tl.dot(high, x1, out_dtype=tl.int32)
    if WARPS == 1:
        upper, lower = tl.split(tl.reshape(total, (16, 4, 2)))
        value = (upper * 256 + lower).to(tl.float32)
        return out + scale[:, None] * (value * a[None, :] + c[None, :] - zero[:, None] * b[None, :])
    else:
        upper, lower = tl.split(tl.reshape(total, (WARPS, 16, 4, 2)))
        value = (upper * 256 + lower).to(tl.float32)
        part = value * a[:, None, :] + c[:, None, :] - zero[:, :, None] * b[:, None, :]
        return out + scale[:, :, None] * part


@triton.jit
def _add_group(
    sums,
    w,
    side,
    first,
    second,
    zeros,
    s: tl.constexpr,
    LESS: tl.constexpr,
    PARTS: tl.constexpr,
    S: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Add the products of group s to the sums of all parts. `w` has codes, or 16 * (code - LESS)."""
    scale = side_scale(first, second, s)
    zero = (side_zero(zeros, s) - LESS).to(tl.float32)
    added = ()
    for p in tl.static_range(PARTS):
        a = side[p * (1 + 2 * S)]
        if LESS == 0:
            a = a * 16.0
        b = side[p * (1 + 2 * S) + 1 + 2 * s]
        x = side[p * (1 + 2 * S) + 2 + 2 * s]
        added = added + (_accumulate_group(sums[p], w, x, scale, zero, a, b, WARPS),)
    return added


@triton.jit
def _multiply_groups(outs, ws, ss, x, factors, rows, chunk, few: tl.constexpr, DEPTH: tl.constexpr):
    """Multiply the S groups of a column block. Half of them are low nibbles, half high ones."""
    BLOCKS: tl.constexpr = few.tile.blocks
    PARTS: tl.constexpr = few.MP // 4
    S: tl.constexpr = 128 // few.GROUP
    H: tl.constexpr = S // 2
    F: tl.constexpr = 8 if few.GROUP == 32 else 4
    for d in tl.static_range(DEPTH):
        group = (chunk + d) * few.tile.warps
        side = ()
        for p in tl.static_range(PARTS):
            side = side + (_factor(factors, group, p, few, F),)
            for s in tl.static_range(S):
                pointer = x + group * 128 + s // H * 64 + s % H * 8
                column = _columns(pointer, 8 * p, rows, few, few.GROUP == 32)
                side = side + (_factor(factors + 1 + s, group, p, few, F), column)
        grown = ()
        for r in tl.static_range(BLOCKS):
            sums = ()
            for p in tl.static_range(PARTS):
                sums = sums + (outs[r * PARTS + p],)
            first = ss[3 * (d * BLOCKS + r)]
            second = ss[3 * (d * BLOCKS + r) + 1]
            zeros = ss[3 * (d * BLOCKS + r) + 2]
            for h in tl.static_range(H):
                low, high = nibbles(ws[(d * BLOCKS + r) * H + h], few.ASM)
                sums = _add_group(
                    sums, low, side, first, second, zeros, h, 0, PARTS, S, few.tile.warps
                )
                sums = _add_group(
                    sums, high, side, first, second, zeros, H + h, 8, PARTS, S, few.tile.warps
                )
            grown = grown + sums
        outs = grown
    return outs


@triton.jit
def _multiply_blocks(outs, ws, ss, x, factors, rows, chunk, few: tl.constexpr, DEPTH: tl.constexpr):
    BLOCKS: tl.constexpr = few.tile.blocks
    PARTS: tl.constexpr = few.MP // 4
    for d in tl.static_range(DEPTH):
        group = (chunk + d) * few.tile.warps
        side = ()
        for p in tl.static_range(PARTS):
            side = side + (
                _factor(factors, group, p, few, 4),
                _factor(factors + 1, group, p, few, 4),
                _factor(factors + 2, group, p, few, 4),
                _columns(x + group * 128, 8 * p, rows, few, False),
                _columns(x + group * 128 + 64, 8 * p, rows, few, False),
            )
        grown = ()
        for r in tl.static_range(BLOCKS):
            low, high = nibbles(ws[d * BLOCKS + r], few.ASM)
            scale = scale_of(ss[d * BLOCKS + r])
            zero = zero_of(ss[d * BLOCKS + r])
            for p in tl.static_range(PARTS):
                grown = grown + (
                    _accumulate(
                        outs[r * PARTS + p],
                        low,
                        high,
                        scale,
                        zero,
                        side[5 * p],
                        side[5 * p + 1],
                        side[5 * p + 2],
                        side[5 * p + 3],
                        side[5 * p + 4],
                        few.tile.warps,
                    ),
                )
        outs = grown
    return outs


@triton.jit
def multiply_bytes(outs, ws, ss, x, factors, rows, chunk, few: tl.constexpr, DEPTH: tl.constexpr):
    """Add the products of DEPTH chunks of column blocks."""
    if few.GROUP == 128:
        return _multiply_blocks(outs, ws, ss, x, factors, rows, chunk, few, DEPTH)
    else:
        return _multiply_groups(outs, ws, ss, x, factors, rows, chunk, few, DEPTH)
