"""GEMM of 1 to 8 rows with ggml's block formats, on the integer tensor cores.

Letters: M rows, N output and K input features, B = ceil(K / 256) column blocks, S splits of K.

A row of x comes as 16-bit block fixed point, as in int4/gemm_int8.py: value = x_scale * (256 * high + low),
with an x_scale for 128 columns. Sums over a group are integers and exact, and with factors so are the sums over
half a column block of those times factors; the numbers of a block are applied once per half:

    y = sum_halves x_scale * (scale * sum_g factor_g * sum_k code * value
                              - minimum * sum_g least_g * sum_k value)

So the error is that of rounding x to 16 bits (2.5e-5 on random x), and no weight is rounded. NVFP4's e4m3
scales multiply the sums over groups in fp32, and the numbers of its rows the result.

    x       int8 [2M, K] and factors fp32 [K / 128, MQ, 16]: Int8Rows of int4/activations.py in groups of 16
    out     fp32 [S, M, C], of which N columns from `column` on are written; the norm as in int4/row_norm.py

Grid (T / blocks, S): a program owns `blocks` row tiles of 16, its `warps` warps take neighbouring column blocks
and are summed at the end. All loads of a column block come before their use, those of the first before the wait
for x. Groups of 16 columns are two `mma` of 32 with the other half of the codes zeroed. Requires K % 128 == 0.

Columns of their own: an `mma` has eight columns, in pairs for the high and the low bytes of a row, and each of
the four lanes that hold a row of the result scales one pair. 3 and 4 rows fill the pairs, 5 to 8 those of two
`mma`. R = 1 or 2 rows would leave lanes that repeat the scales of others, which cost more than the products. So
there, D = 4 / R groups have pairs of their own: an operand holds x of group d in the pairs d * R to (d + 1) * R
and zeros elsewhere, the products of D groups go to one accumulator, each lane scales one group, and the pairs
are summed at the end.

The integer arithmetic is in the spirit of llama.cpp's mmvq, which rounds x to 8 bits.
"""
# mypy: disable-error-code="assignment"
# (Triton unrolls loops over tuples that grow; no type says that)

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from localchat_cuda.ggml_forms import ROWS
from localchat_cuda.kernels.ggml.pack import GgmlTensor
from localchat_cuda.kernels.ggml.tile_ops import (
    byte,
    byte_of,
    e4m3_number,
    field,
    form_of,
    four_numbers,
    half,
    half_of,
    planes,
    row_numbers,
)
from localchat_cuda.kernels.int4.activations import Int8Rows, check_rows
from localchat_cuda.kernels.int4.row_norm import RowNorm, inverse_rms, norm_arguments
from localchat_cuda.kernels.int4.tile_config import TileConfig
from localchat_cuda.kernels.launch import KernelLaunch, cdiv, release, require, traits, wait

MAX_ROWS = 8


class BlockFewRows(NamedTuple):
    """Constants of the kernel. For the letters see the module docstring."""

    K: int
    MQ: int
    """Rows that `factors` has room for."""
    R: int
    """Rows with columns of their own; 4: rows in pairs of columns."""
    tile: TileConfig
    NORM: bool
    """Rows are divided by their rms."""


@triton.jit
def _block(chunk, warp, B: tl.constexpr, WARPS: tl.constexpr):
    """Column block of a warp: the last once more where there are fewer than warps."""
    if B % WARPS == 0:
        return chunk * WARPS + warp
    else:
        return tl.minimum(chunk * WARPS + warp, B - 1)


@triton.jit
def _tiles(plane, tile, chunk, B: tl.constexpr, WARPS: tl.constexpr, BITS: tl.constexpr):
    result = ()
    i = tl.arange(0, WARPS * 512)
    block = tile * B + _block(chunk, i // 512, B, WARPS)
    for j in tl.static_range(BITS):
        w = tl.load(plane + (block * BITS + j) * 512 + i % 512, eviction_policy="evict_first")
        w = tl.permute(tl.reshape(w, (WARPS, 8, 4, 2, 2, 4)), (0, 4, 1, 3, 2, 5))
        result = result + (tl.reshape(w, (WARPS, 16, 32)),)
    return result


@triton.jit
def _load_codes(weight, tile, tiles, chunk, B: tl.constexpr, few: tl.constexpr, form: tl.constexpr):
    """Return LOW and HIGH tiles [WARPS, 16, 32] per row tile.

    Each warp has a column block.
    """
    BLOCKS: tl.constexpr = few.tile.blocks
    result = ()
    for r in tl.static_range(BLOCKS):
        index = tl.minimum(tile + r, tiles - 1)
        result = result + _tiles(weight.low, index, chunk, B, few.tile.warps, form.LOW)
        result = result + _tiles(weight.high, index, chunk, B, few.tile.warps, form.HIGH)
    return result


@triton.jit
def _load_sides(weight, tile, tiles, chunk, B: tl.constexpr, few: tl.constexpr, form: tl.constexpr):
    """Return words [WARPS, 16] of sides per row tile.

    The words of the first half come first. The last word has the scales with factors.
    """
    BLOCKS: tl.constexpr = few.tile.blocks
    result = ()
    n = tl.arange(0, 16)[None, :]
    for r in tl.static_range(BLOCKS):
        beside = tl.minimum(tile + r, tiles - 1) * B
        beside += _block(chunk, tl.arange(0, few.tile.warps), B, few.tile.warps)[:, None]
        for index in tl.static_range(2 * form.WORDS):
            result = result + (
                tl.load(weight.sides + (beside * (2 * form.WORDS) + index) * 16 + n),
            )
        if form.FACTORS:
            result = result + (tl.load(weight.scales + beside * 16 + n),)
    return result


@triton.jit
def _columns(x, pointer, first, rows2, few: tl.constexpr):
    """Load two right operands [WARPS, 32, 8]: (high, low) of four rows, of two neighboring groups.

    `pointer` [WARPS] is the start of the first group.

    Columns past the last row repeat earlier ones; their results are not stored.
    """
    WARPS: tl.constexpr = few.tile.warps
    n = ((first + tl.arange(0, 8)) % rows2)[:, None, None] * few.K
    tile = tl.load(x + n + pointer[None, :, None] + tl.arange(0, 64)[None, None, :])
    # row, warp, quad, group, half, four columns
    tile = tl.permute(tl.reshape(tile, (8, WARPS, 4, 2, 2, 4)), (1, 4, 2, 5, 0, 3))
    return tl.split(tl.reshape(tile, (WARPS, 32, 8, 2)))


@triton.jit
def _factor(factors, index, which: tl.constexpr, part: tl.constexpr, MQ: tl.constexpr):
    """Load number `which` of four rows, [WARPS, 4]."""
    m = part * 4 + tl.arange(0, 4)
    return tl.load(factors + (index[:, None] * MQ + m[None, :]) * 16 + which)


@triton.jit
def _four_factors(factors, index, which: tl.constexpr, part: tl.constexpr, MQ: tl.constexpr):
    """Load numbers `which` to `which` + 3 of four rows, each [WARPS, 4]."""
    m = part * 4 + tl.arange(0, 4)
    pointers = factors + (index[:, None] * MQ + m[None, :]) * 16 + which
    four = tl.load(pointers[:, :, None] + tl.arange(0, 4)[None, None, :])
    even, odd = tl.split(tl.reshape(four, (four.shape[0], 4, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _pairs(total, WARPS: tl.constexpr):
    """Split products [WARPS, 16, 8] into those of high and of low bytes."""
    return tl.split(tl.reshape(total, (WARPS, 16, 4, 2)))


@triton.jit
def _halves_apart(codes, s: tl.constexpr, GROUP: tl.constexpr):
    """The codes of group s of 32 columns, others 0."""
    if GROUP == 32:
        return codes
    else:
        k = tl.arange(0, 32)[None, None, :]
        return tl.where((k >= 16) if s else (k < 16), codes, tl.zeros_like(codes))


@triton.jit
def _add_group(
    sums,
    codes,
    loaded,
    side,
    g: tl.constexpr,
    s: tl.constexpr,
    FIRST: tl.constexpr,
    PARTS: tl.constexpr,
    WARPS: tl.constexpr,
    form: tl.constexpr,
):
    """Add the products of group s of the 32 columns g to the sums of all parts."""
    group: tl.constexpr = g * (32 // form.GROUP) + s
    SIDE: tl.constexpr = 5 + (128 // form.GROUP if form.MINIMUM else 0)
    own = _halves_apart(codes, s, form.GROUP)
    if form.FACTORS:
        factor = byte(four_numbers(loaded[FIRST], group // 4), group % 4, form.ASM)
        if form.MINIMUM and form.GROUP == 16:
            minimum = (factor >> 4) & 15
            factor = factor & 15
        elif form.MINIMUM:
            minimum = byte(four_numbers(loaded[FIRST], 1), group, form.ASM)
    elif form.FLOATS:
        factor = e4m3_number(byte(four_numbers(loaded[FIRST], group // 4), group % 4, form.ASM))
    else:
        factor = half(four_numbers(loaded[FIRST], group // 2), group % 2)
        if form.MINIMUM:
            minimum = half(four_numbers(loaded[FIRST + 1], group // 2), group % 2)
    added = ()
    for p in tl.static_range(PARTS):
        total = tl.dot(own, side[p * SIDE + 1 + g], out_dtype=tl.int32)
        a = sums[2 * p]
        b = sums[2 * p + 1]
        if form.FACTORS:
            a += total * factor[:, :, None]
        else:
            upper, lower = _pairs(total, WARPS)
            a += (upper * 256 + lower).to(tl.float32) * factor[:, :, None]
        if form.MINIMUM:
            x = side[p * SIDE + 5 + group].to(tl.int32, bitcast=True)[:, None, :]
            if form.FACTORS:
                b += x * minimum[:, :, None]
            else:
                a -= x.to(tl.float32) * minimum[:, :, None]
        added = added + (a, b)
    return added


@triton.jit
def _codes(loaded, index: tl.constexpr, form: tl.constexpr):
    """Select the codes of 32 columns, by `index`, of a column block."""
    top = loaded[form.LOW + index * form.HIGH // 8] if form.HIGH else loaded[0]
    return field(loaded[index * form.LOW // 8], top, index, None, form)


@triton.jit
def _add_half(
    outs,
    tiles,
    loaded,
    side,
    there,
    h: tl.constexpr,
    PARTS: tl.constexpr,
    WARPS: tl.constexpr,
    form: tl.constexpr,
):
    """Add the products of half a column block to `outs` [WARPS, 16, 4] of all parts."""
    SIDE: tl.constexpr = 5 + (128 // form.GROUP if form.MINIMUM else 0)
    sums = ()
    for _ in tl.static_range(PARTS):
        if form.FACTORS:
            sums = sums + (tl.zeros((WARPS, 16, 8), tl.int32), tl.zeros((WARPS, 16, 4), tl.int32))
        else:
            sums = sums + (tl.zeros((WARPS, 16, 4), tl.float32), 0)
    for g in tl.static_range(4):
        codes = _codes(tiles, 4 * h + g, form)
        for s in tl.static_range(32 // form.GROUP):
            sums = _add_group(sums, codes, loaded, side, g, s, h * form.WORDS, PARTS, WARPS, form)
    grown = ()
    for p in tl.static_range(PARTS):
        x_scale = tl.where(there, side[p * SIDE], 0.0)[:, None, :]
        if form.FACTORS:
            scale = half(loaded[2 * form.WORDS], 0)[:, :, None]
            upper, lower = _pairs(sums[2 * p], WARPS)
            value = upper.to(tl.float32) * 256 + lower.to(tl.float32)
            out = outs[p] + value * (scale * (1.0 / (1 << form.SHIFT)) * x_scale)
            if form.MINIMUM:
                less = half(loaded[2 * form.WORDS], 1)[:, :, None]
                out -= sums[2 * p + 1].to(tl.float32) * (less * x_scale)
        else:
            out = outs[p] + sums[2 * p] * (x_scale * (1.0 / (1 << form.SHIFT)))
        grown = grown + (out,)
    return grown


@triton.jit
def _multiply(outs, codes, sides, x, factors, rows2, chunk, few: tl.constexpr, form: tl.constexpr):
    """Add the products of a column block for each warp.

    The operands are the results of `_load_codes` and `_load_sides`.
    """
    BLOCKS: tl.constexpr = few.tile.blocks
    PARTS: tl.constexpr = few.MQ // 4
    EACH: tl.constexpr = 2 * form.WORDS + (1 if form.FACTORS else 0)
    TILES: tl.constexpr = form.LOW + form.HIGH
    SUMS: tl.constexpr = 4 if form.GROUP == 32 else 8
    for h in tl.static_range(2):
        column = (chunk * few.tile.warps + tl.arange(0, few.tile.warps)) * 2 + h
        # beyond the last column: what is read there counts 0 times
        there = (column < few.K // 128)[:, None]
        group = tl.minimum(column, few.K // 128 - 1)
        side = ()
        for p in tl.static_range(PARTS):
            side = side + (_factor(factors, group, 0, p, few.MQ),)
            for g in tl.static_range(2):
                side = side + _columns(x, group * 128 + g * 64, 8 * p, rows2, few)
            if form.MINIMUM:
                side = side + _four_factors(factors, group, SUMS, p, few.MQ)
                if form.GROUP == 16:
                    side = side + _four_factors(factors, group, SUMS + 4, p, few.MQ)
        grown = ()
        for r in tl.static_range(BLOCKS):
            grown = grown + _add_half(
                outs[r * PARTS : (r + 1) * PARTS],
                codes[r * TILES : (r + 1) * TILES],
                sides[r * EACH : (r + 1) * EACH],
                side,
                there,
                h,
                PARTS,
                few.tile.warps,
                form,
            )
        outs = grown
    return outs


@triton.jit
def _columns_apart(x, pointer, g: tl.constexpr, few: tl.constexpr, GROUP: tl.constexpr):
    """Load x of 4 / R groups from g on. Each group and row has a pair of columns.

    `group` [WARPS] are the blocks. Returns [8, WARPS, 4, GROUP / 16, 4]. Groups of 16 have half an operand,
    which serves as both halves.
    """
    WARPS: tl.constexpr = few.tile.warps
    n = tl.arange(0, 8)
    group = g + n // (2 * few.R)
    if GROUP == 32:
        start = group // 2 * 64 + group % 2 * 8
    else:
        start = group // 4 * 64 + group % 4 * 4
    n = n % (2 * few.R) * few.K + start
    k = tl.arange(0, GROUP)
    k = k // (GROUP // 4) * 16 + k % (GROUP // 4)
    tile = tl.load(x + n[:, None, None] + pointer[None, :, None] * 128 + k[None, None, :])
    return tl.reshape(tile, (8, WARPS, 4, GROUP // 16, 4))


@triton.jit
def _own_columns(tile, d: tl.constexpr, few: tl.constexpr, form: tl.constexpr):
    """Build the right operand [WARPS, 32, 8] of 32 inputs.

    Their first group is number d of `tile`, and all others are 0.
    """
    WARPS: tl.constexpr = few.tile.warps
    sixteen = tl.arange(0, 2)[None, None, None, :, None]
    own = d + sixteen // (form.GROUP // 16)
    there = tl.arange(0, 8)[:, None, None, None, None] // (2 * few.R) == own
    mask = tl.where(there, -1, 0).to(tl.int8)
    shape: tl.constexpr = (8, WARPS, 4, 2, 4)
    tile = tl.broadcast_to(tile, shape)
    mask = tl.broadcast_to(mask, shape)
    if form.ASM:  # four bytes at once
        tile = tl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;", "=r,r,r", [tile, mask], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        tile = tile & mask
    return tl.reshape(tl.permute(tile, (1, 3, 2, 4, 0)), (WARPS, 32, 8))


@triton.jit
def _add_apart(
    out, tiles, loaded, columns, side, h: tl.constexpr, few: tl.constexpr, form: tl.constexpr
):
    """Add the products of half a column block to `out` [WARPS, 16, 4]. Each pair gets those of its groups."""
    WARPS: tl.constexpr = few.tile.warps
    D: tl.constexpr = 4 // few.R
    PER: tl.constexpr = 32 // form.GROUP
    FIRST: tl.constexpr = h * form.WORDS
    sums = tl.zeros((WARPS, 16, 4), tl.float32)
    for j in tl.static_range(128 // form.GROUP // D):
        total = tl.zeros((WARPS, 16, 8), tl.int32)
        for i in tl.static_range(D // PER):
            codes = _codes(tiles, 4 * h + j * (D // PER) + i, form)
            own = _own_columns(columns[j], i * PER, few, form)
            total = tl.dot(codes, own, total, out_dtype=tl.int32)
        upper, lower = _pairs(total, WARPS)
        value = upper * 256 + lower
        lane = (tl.arange(0, 4) // few.R)[None, None, :]
        if form.FACTORS:
            packed = four_numbers(loaded[FIRST], j * D // 4)[:, :, None]
            factor = byte_of(packed, j * D % 4 + lane, form.ASM)
            scale = half(loaded[2 * form.WORDS], 0)[:, :, None]
            if form.MINIMUM:
                if form.GROUP == 16:
                    minimum = (factor >> 4) & 15
                    factor = factor & 15
                else:
                    packed = four_numbers(loaded[FIRST], 1)[:, :, None]
                    minimum = byte_of(packed, j * D + lane, form.ASM)
                less = half(loaded[2 * form.WORDS], 1)[:, :, None]
                x = side[1 + j].to(tl.int32, bitcast=True)[:, None, :]
                # below 2^31: 32 values of 15 bits by codes of 5 and factors of 6
                sums += (value * factor).to(tl.float32) * scale
                sums -= (x * minimum).to(tl.float32) * less
            else:
                sums += value.to(tl.float32) * (factor.to(tl.float32) * scale)
        elif form.FLOATS:
            packed = four_numbers(loaded[FIRST], j * D // 4)[:, :, None]
            sums += value.to(tl.float32) * e4m3_number(byte_of(packed, j * D % 4 + lane, form.ASM))
        else:
            sums += value.to(tl.float32) * half_of(loaded[FIRST], j * D, lane, form.ASM)
            if form.MINIMUM:
                x = side[1 + j].to(tl.int32, bitcast=True).to(tl.float32)[:, None, :]
                sums -= x * (half_of(loaded[FIRST + 1], j * D, lane, form.ASM) * (1 << form.SHIFT))
    return out + sums * (side[0] * (1.0 / (1 << form.SHIFT)))[:, None, :]


@triton.jit
def _multiply_apart(outs, codes, sides, x, factors, chunk, few: tl.constexpr, form: tl.constexpr):
    """Multiply for R rows, 1 or 2, with separate columns for 4 / R groups."""
    BLOCKS: tl.constexpr = few.tile.blocks
    EACH: tl.constexpr = 2 * form.WORDS + (1 if form.FACTORS else 0)
    TILES: tl.constexpr = form.LOW + form.HIGH
    D: tl.constexpr = 4 // few.R
    CHAINS: tl.constexpr = 128 // form.GROUP // D
    pair = tl.arange(0, 4)
    side = ()
    columns = ()
    for h in tl.static_range(2):
        column = (chunk * few.tile.warps + tl.arange(0, few.tile.warps)) * 2 + h
        group = (
            column if few.K % (256 * few.tile.warps) == 0 else tl.minimum(column, few.K // 128 - 1)
        )
        numbers = factors + (group[:, None] * few.MQ + pair[None, :] % few.R) * 16
        x_scale = tl.load(numbers)
        if few.K % (256 * few.tile.warps) != 0:
            x_scale = tl.where((column < few.K // 128)[:, None], x_scale, 0.0)
        side = side + (x_scale,)
        for j in tl.static_range(CHAINS):
            columns = columns + (_columns_apart(x, group, j * D, few, form.GROUP),)
            if form.MINIMUM:
                own = (4 if form.GROUP == 32 else 8) + j * D + pair // few.R
                side = side + (tl.load(numbers + own[None, :]),)
    SIDE: tl.constexpr = 1 + (CHAINS if form.MINIMUM else 0)
    for h in tl.static_range(2):
        grown = ()
        for r in tl.static_range(BLOCKS):
            grown = grown + (
                _add_apart(
                    outs[r],
                    codes[r * TILES : (r + 1) * TILES],
                    sides[r * EACH : (r + 1) * EACH],
                    columns[h * CHAINS : (h + 1) * CHAINS],
                    side[h * SIDE : (h + 1) * SIDE],
                    h,
                    few,
                    form,
                ),
            )
        outs = grown
    return outs


@triton.jit
def _multiply_rows(outs, codes, sides, x, factors, M, chunk, few: tl.constexpr, form: tl.constexpr):
    if few.R == 4:
        return _multiply(outs, codes, sides, x, factors, 2 * M, chunk, few, form)
    else:
        return _multiply_apart(outs, codes, sides, x, factors, chunk, few, form)


@triton.jit(do_not_specialize=["M", "N", "C", "column"])
def _few_kernel(
    x,
    factors,
    weight,
    out,
    squares,
    eps,
    M,
    N,
    C,
    column,
    few: tl.constexpr,
    form: tl.constexpr,
    PDL: tl.constexpr,
):
    WARPS: tl.constexpr = few.tile.warps
    R: tl.constexpr = few.R
    BLOCKS: tl.constexpr = few.tile.blocks
    B: tl.constexpr = (few.K + 255) // 256
    CHUNKS: tl.constexpr = (B + WARPS - 1) // WARPS
    PARTS: tl.constexpr = few.MQ // 4
    release(PDL)
    tiles = (N + 15) // 16
    tile = tl.program_id(0) * BLOCKS
    split = tl.program_id(1)
    first = split * CHUNKS // few.tile.splits
    last = (split + 1) * CHUNKS // few.tile.splits
    outs = ()
    for _ in tl.static_range(BLOCKS * PARTS):
        outs = outs + (tl.zeros((WARPS, 16, 4), tl.float32),)
    # The first chunk is peeled so that its loads are issued before the wait for the activations.
    codes = _load_codes(weight, tile, tiles, first, B, few, form)
    own = _load_sides(weight, tile, tiles, first, B, few, form)
    numbers = ()
    if form.FLOATS:
        for r in tl.static_range(BLOCKS):
            numbers = numbers + (row_numbers(weight.scales, tile + r, tiles, 1),)
    wait(PDL)
    outs = _multiply_rows(outs, codes, own, x, factors, M, first, few, form)
    if few.tile.splits < CHUNKS:  # Triton takes seconds to compile even loops that never run.
        for chunk in tl.range(first + 1, last, 1, num_stages=1):
            more = _load_codes(weight, tile, tiles, chunk, B, few, form)
            beside = _load_sides(weight, tile, tiles, chunk, B, few, form)
            outs = _multiply_rows(outs, more, beside, x, factors, M, chunk, few, form)
    m = tl.arange(0, R)
    for r in tl.static_range(BLOCKS):
        for p in tl.static_range(PARTS):
            o = tl.sum(outs[r * PARTS + p], 0)
            if R < 4:
                o = tl.sum(tl.reshape(o, (16, 4 // R, R)), 1)
            if form.FLOATS:
                o *= numbers[r][:, None]
            row = p * 4 + m
            if few.NORM:
                o = o * inverse_rms(squares, row, row < M, eps, few.K // 128)[None, :]
            n = (tile + r) * 16 + tl.arange(0, 16)
            offsets = ((split * M + row) * C)[None, :] + column + n[:, None]
            tl.store(out + offsets, o, mask=(row < M)[None, :] & (n < N)[:, None])


def gemm(
    rows: Int8Rows,
    weight: GgmlTensor,
    out: torch.Tensor,
    config: TileConfig,
    column: int = 0,
    norm: RowNorm | None = None,
) -> None:
    """Write partial sums into `out` [S, M, C] from `column` on; see the module docstring."""
    m = rows.x.shape[0] // 2
    n = weight.features_out
    k = weight.features_in
    device = weight.low.device
    if not 1 <= m <= MAX_ROWS or rows.group != 16 or k % 128:
        raise ValueError(
            f"rows: 1 to {MAX_ROWS} in groups of 16 of whole 128 columns wanted, "
            f"{m} in groups of {rows.group} of {k} given"
        )
    check_rows(rows, m, k, device)
    require("out", out, (config.splits, m, None), device, torch.float32)
    if not 0 <= column <= out.shape[2] - n:
        raise ValueError(f"column: {n} columns from {column} of {out.shape[2]} wanted")
    squares, eps = norm_arguments(norm, m, k, out)
    gpu = traits(device)
    few = BlockFewRows(k, rows.factors.shape[1], m if m <= 2 else 4, config, norm is not None)
    tensors = (rows.x, rows.factors, planes(weight), out, squares)
    grid = (cdiv(n, ROWS * config.blocks), config.splits)
    KernelLaunch(_few_kernel, grid, gpu, config.warps, config.registers, rows=1).run(
        *tensors, eps, m, n, out.shape[2], column, few, form_of(weight, gpu)
    )
