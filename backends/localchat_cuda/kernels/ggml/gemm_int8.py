"""GEMM of 1 to 8 rows with ggml's block formats, on the integer tensor cores.

Letters: M rows, N output and K input features, B = ceil(K / 256) column blocks, S splits of K.

A row of x comes as 16-bit block fixed point, as in int4/gemm_int8.py: value = x_scale * (256 * high + low),
with an x_scale for 128 columns. Sums over a group are integers and exact, and with factors so are the sums over
half a column block of those times factors; the numbers of a block are applied once per half:

    y = sum_halves x_scale * (scale * sum_g factor_g * sum_k code * value
                              - minimum * sum_g least_g * sum_k value)

So the error is that of rounding x to 16 bits (2.5e-5 on random x), and no weight is rounded.

    x       int8 [2M, K] and factors fp32 [K / 128, MQ, 16]: Int8Rows of int4/activations.py in groups of 16
    out     fp32 [S, M, C], of which N columns from `column` on are written; `squares` as in int4/gemm_int8.py

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

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from localchat_cuda.ggml_forms import ROWS
from localchat_cuda.kernels.ggml.pack import GgmlTensor, GgmlWeight, dense
from localchat_cuda.kernels.ggml.tile_ops import byte, byte_of, field, four_numbers, half, half_of
from localchat_cuda.kernels.int4.activations import Int8Rows, check_rows, natural_int8
from localchat_cuda.kernels.int4.tile_config import TileConfig
from localchat_cuda.kernels.int4.tile_ops import inverse_rms
from localchat_cuda.kernels.launch import (
    options,
    power_of_two,
    require,
    set_carveout,
    tensor_or,
    traits,
)

MAX_ROWS = 8


def reference(
    rows: Int8Rows, weight: GgmlTensor | GgmlWeight, squares: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Compute the gemm [M, N] in fp32 from the quantized rows, with plain torch."""
    x = natural_int8(rows)
    if squares is not None:
        x = x * torch.rsqrt(squares.sum(1, keepdim=True) / x.shape[1] + eps)
    return x @ dense(weight).t()


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
def _load_codes(
    low,
    high,
    tile,
    tiles,
    chunk,
    B: tl.constexpr,
    BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
):
    """Return LOW and HIGH tiles [WARPS, 16, 32] per row tile.

    Each warp has a column block.
    """
    result = ()
    for r in tl.static_range(BLOCKS):
        index = tl.minimum(tile + r, tiles - 1)
        result = result + _tiles(low, index, chunk, B, WARPS, LOW)
        result = result + _tiles(high, index, chunk, B, WARPS, HIGH)
    return result


@triton.jit
def _load_sides(
    sides,
    scales,
    tile,
    tiles,
    chunk,
    B: tl.constexpr,
    BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
    WORDS: tl.constexpr,
    FACTORS: tl.constexpr,
):
    """Return words [WARPS, 16] of sides per row tile.

    The words of the first half come first. The last word has the scales with factors.
    """
    result = ()
    n = tl.arange(0, 16)[None, :]
    for r in tl.static_range(BLOCKS):
        beside = tl.minimum(tile + r, tiles - 1) * B
        beside += _block(chunk, tl.arange(0, WARPS), B, WARPS)[:, None]
        for index in tl.static_range(2 * WORDS):
            result = result + (tl.load(sides + (beside * (2 * WORDS) + index) * 16 + n),)
        if FACTORS:
            result = result + (tl.load(scales + beside * 16 + n),)
    return result


@triton.jit
def _columns(x, pointer, first, rows2, K: tl.constexpr, WARPS: tl.constexpr):
    """Load the right operand [WARPS, 32, 8]: (high, low) of four rows.

    `pointer` [WARPS] is the start of the group.

    Columns past the last row repeat earlier ones; their results are not stored.
    """
    k = tl.arange(0, 32)
    k = k // 8 * 16 + k % 8
    n = ((first + tl.arange(0, 8)) % rows2)[:, None, None] * K
    tile = tl.load(x + n + pointer[None, :, None] + k[None, None, :])
    tile = tl.permute(tl.reshape(tile, (8, WARPS, 4, 2, 4)), (1, 3, 2, 4, 0))
    return tl.reshape(tile, (WARPS, 32, 8))


@triton.jit
def _factor(factors, index, which: tl.constexpr, part: tl.constexpr, MQ: tl.constexpr):
    """Load number `which` of four rows, [WARPS, 4]."""
    m = part * 4 + tl.arange(0, 4)
    return tl.load(factors + (index[:, None] * MQ + m[None, :]) * 16 + which)


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
    GROUP: tl.constexpr,
    FACTORS: tl.constexpr,
    MINIMUM: tl.constexpr,
    ASM: tl.constexpr,
):
    """Add the products of group s of the 32 columns g to the sums of all parts."""
    group: tl.constexpr = g * (32 // GROUP) + s
    SIDE: tl.constexpr = 5 + (128 // GROUP if MINIMUM else 0)
    own = _halves_apart(codes, s, GROUP)
    if FACTORS:
        factor = byte(four_numbers(loaded[FIRST], group // 4), group % 4, ASM)
        if MINIMUM and GROUP == 16:
            minimum = (factor >> 4) & 15
            factor = factor & 15
        elif MINIMUM:
            minimum = byte(four_numbers(loaded[FIRST], 1), group, ASM)
    else:
        factor = half(four_numbers(loaded[FIRST], group // 2), group % 2)
        if MINIMUM:
            minimum = half(four_numbers(loaded[FIRST + 1], group // 2), group % 2)
    added = ()
    for p in tl.static_range(PARTS):
        total = tl.dot(own, side[p * SIDE + 1 + g], out_dtype=tl.int32)
        a = sums[2 * p]
        b = sums[2 * p + 1]
        if FACTORS:
            a += total * factor[:, :, None]
        else:
            upper, lower = _pairs(total, WARPS)
            a += (upper * 256 + lower).to(tl.float32) * factor[:, :, None]
        if MINIMUM:
            x = side[p * SIDE + 5 + group].to(tl.int32, bitcast=True)[:, None, :]
            if FACTORS:
                b += x * minimum[:, :, None]
            else:
                a -= x.to(tl.float32) * minimum[:, :, None]
        added = added + (a, b)
    return added


@triton.jit
def _codes(
    loaded,
    index: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SHIFT: tl.constexpr,
    TABLE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Select the codes of 32 columns, by `index`, of a column block."""
    top = loaded[LOW + index * HIGH // 8] if HIGH else loaded[0]
    return field(loaded[index * LOW // 8], top, index, None, LOW, HIGH, SHIFT, TABLE, ASM)


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
    GROUP: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    WORDS: tl.constexpr,
    SHIFT: tl.constexpr,
    FACTORS: tl.constexpr,
    MINIMUM: tl.constexpr,
    TABLE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Add the products of half a column block to `outs` [WARPS, 16, 4] of all parts."""
    SIDE: tl.constexpr = 5 + (128 // GROUP if MINIMUM else 0)
    sums = ()
    for _ in tl.static_range(PARTS):
        if FACTORS:
            sums = sums + (tl.zeros((WARPS, 16, 8), tl.int32), tl.zeros((WARPS, 16, 4), tl.int32))
        else:
            sums = sums + (tl.zeros((WARPS, 16, 4), tl.float32), 0)
    for g in tl.static_range(4):
        codes = _codes(tiles, 4 * h + g, LOW, HIGH, SHIFT, TABLE, ASM)
        for s in tl.static_range(32 // GROUP):
            sums = _add_group(
                sums,
                codes,
                loaded,
                side,
                g,
                s,
                h * WORDS,
                PARTS,
                WARPS,
                GROUP,
                FACTORS,
                MINIMUM,
                ASM,
            )
    grown = ()
    for p in tl.static_range(PARTS):
        x_scale = tl.where(there, side[p * SIDE], 0.0)[:, None, :]
        if FACTORS:
            scale = half(loaded[2 * WORDS], 0)[:, :, None]
            upper, lower = _pairs(sums[2 * p], WARPS)
            value = upper.to(tl.float32) * 256 + lower.to(tl.float32)
            out = outs[p] + value * (scale * (1.0 / (1 << SHIFT)) * x_scale)
            if MINIMUM:
                less = half(loaded[2 * WORDS], 1)[:, :, None]
                out -= sums[2 * p + 1].to(tl.float32) * (less * x_scale)
        else:
            out = outs[p] + sums[2 * p] * (x_scale * (1.0 / (1 << SHIFT)))
        grown = grown + (out,)
    return grown


@triton.jit
def _multiply(
    outs,
    codes,
    sides,
    x,
    factors,
    rows2,
    chunk,
    K: tl.constexpr,
    MQ: tl.constexpr,
    BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
    GROUP: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    WORDS: tl.constexpr,
    SHIFT: tl.constexpr,
    FACTORS: tl.constexpr,
    MINIMUM: tl.constexpr,
    TABLE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Add the products of a column block for each warp.

    The operands are the results of `_load_codes` and `_load_sides`.
    """
    PARTS: tl.constexpr = MQ // 4
    EACH: tl.constexpr = 2 * WORDS + (1 if FACTORS else 0)
    TILES: tl.constexpr = LOW + HIGH
    for h in tl.static_range(2):
        column = (chunk * WARPS + tl.arange(0, WARPS)) * 2 + h
        # beyond the last column: what is read there counts 0 times
        there = (column < K // 128)[:, None]
        group = tl.minimum(column, K // 128 - 1)
        side = ()
        for p in tl.static_range(PARTS):
            side = side + (_factor(factors, group, 0, p, MQ),)
            for g in tl.static_range(4):
                start = group * 128 + g // 2 * 64 + g % 2 * 8
                side = side + (_columns(x, start, 8 * p, rows2, K, WARPS),)
            if MINIMUM:
                for s in tl.static_range(128 // GROUP):
                    side = side + (_factor(factors, group, (4 if GROUP == 32 else 8) + s, p, MQ),)
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
                WARPS,
                GROUP,
                LOW,
                HIGH,
                WORDS,
                SHIFT,
                FACTORS,
                MINIMUM,
                TABLE,
                ASM,
            )
        outs = grown
    return outs


@triton.jit
def _columns_apart(
    x,
    pointer,
    g: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    WARPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Load x of 4 / R groups from g on. Each group and row has a pair of columns.

    `group` [WARPS] are the blocks. Returns [8, WARPS, 4, GROUP / 16, 4]. Groups of 16 have half an operand,
    which serves as both halves.
    """
    n = tl.arange(0, 8)
    group = g + n // (2 * R)
    if GROUP == 32:
        start = group // 2 * 64 + group % 2 * 8
    else:
        start = group // 4 * 64 + group % 4 * 4
    n = n % (2 * R) * K + start
    k = tl.arange(0, GROUP)
    k = k // (GROUP // 4) * 16 + k % (GROUP // 4)
    tile = tl.load(x + n[:, None, None] + pointer[None, :, None] * 128 + k[None, None, :])
    return tl.reshape(tile, (8, WARPS, 4, GROUP // 16, 4))


@triton.jit
def _own_columns(
    tile,
    d: tl.constexpr,
    R: tl.constexpr,
    WARPS: tl.constexpr,
    GROUP: tl.constexpr,
    ASM: tl.constexpr,
):
    """Build the right operand [WARPS, 32, 8] of 32 inputs.

    Their first group is number d of `tile`, and all others are 0.
    """
    sixteen = tl.arange(0, 2)[None, None, None, :, None]
    own = d + sixteen // (GROUP // 16)
    there = tl.arange(0, 8)[:, None, None, None, None] // (2 * R) == own
    mask = tl.where(there, -1, 0).to(tl.int8)
    shape: tl.constexpr = (8, WARPS, 4, 2, 4)
    tile = tl.broadcast_to(tile, shape)
    mask = tl.broadcast_to(mask, shape)
    if ASM:  # four bytes at once
        tile = tl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;", "=r,r,r", [tile, mask], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        tile = tile & mask
    return tl.reshape(tl.permute(tile, (1, 3, 2, 4, 0)), (WARPS, 32, 8))


@triton.jit
def _add_apart(
    out,
    tiles,
    loaded,
    columns,
    side,
    h: tl.constexpr,
    R: tl.constexpr,
    WARPS: tl.constexpr,
    GROUP: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    WORDS: tl.constexpr,
    SHIFT: tl.constexpr,
    FACTORS: tl.constexpr,
    MINIMUM: tl.constexpr,
    TABLE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Add the products of half a column block to `out` [WARPS, 16, 4]. Each pair gets those of its groups."""
    D: tl.constexpr = 4 // R
    PER: tl.constexpr = 32 // GROUP
    FIRST: tl.constexpr = h * WORDS
    sums = tl.zeros((WARPS, 16, 4), tl.float32)
    for j in tl.static_range(128 // GROUP // D):
        total = tl.zeros((WARPS, 16, 8), tl.int32)
        for i in tl.static_range(D // PER):
            codes = _codes(tiles, 4 * h + j * (D // PER) + i, LOW, HIGH, SHIFT, TABLE, ASM)
            own = _own_columns(columns[j], i * PER, R, WARPS, GROUP, ASM)
            total = tl.dot(codes, own, total, out_dtype=tl.int32)
        upper, lower = _pairs(total, WARPS)
        value = upper * 256 + lower
        lane = (tl.arange(0, 4) // R)[None, None, :]
        if FACTORS:
            packed = four_numbers(loaded[FIRST], j * D // 4)[:, :, None]
            factor = byte_of(packed, j * D % 4 + lane, ASM)
            scale = half(loaded[2 * WORDS], 0)[:, :, None]
            if MINIMUM:
                if GROUP == 16:
                    minimum = (factor >> 4) & 15
                    factor = factor & 15
                else:
                    packed = four_numbers(loaded[FIRST], 1)[:, :, None]
                    minimum = byte_of(packed, j * D + lane, ASM)
                less = half(loaded[2 * WORDS], 1)[:, :, None]
                x = side[1 + j].to(tl.int32, bitcast=True)[:, None, :]
                # below 2^31: 32 values of 15 bits by codes of 5 and factors of 6
                sums += (value * factor).to(tl.float32) * scale
                sums -= (x * minimum).to(tl.float32) * less
            else:
                sums += value.to(tl.float32) * (factor.to(tl.float32) * scale)
        else:
            sums += value.to(tl.float32) * half_of(loaded[FIRST], j * D, lane, ASM)
            if MINIMUM:
                x = side[1 + j].to(tl.int32, bitcast=True).to(tl.float32)[:, None, :]
                sums -= x * (half_of(loaded[FIRST + 1], j * D, lane, ASM) * (1 << SHIFT))
    return out + sums * (side[0] * (1.0 / (1 << SHIFT)))[:, None, :]


@triton.jit
def _multiply_apart(
    outs,
    codes,
    sides,
    x,
    factors,
    chunk,
    K: tl.constexpr,
    MQ: tl.constexpr,
    R: tl.constexpr,
    BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
    GROUP: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    WORDS: tl.constexpr,
    SHIFT: tl.constexpr,
    FACTORS: tl.constexpr,
    MINIMUM: tl.constexpr,
    TABLE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Multiply for R rows, 1 or 2, with separate columns for 4 / R groups."""
    EACH: tl.constexpr = 2 * WORDS + (1 if FACTORS else 0)
    TILES: tl.constexpr = LOW + HIGH
    D: tl.constexpr = 4 // R
    CHAINS: tl.constexpr = 128 // GROUP // D
    pair = tl.arange(0, 4)
    side = ()
    columns = ()
    for h in tl.static_range(2):
        column = (chunk * WARPS + tl.arange(0, WARPS)) * 2 + h
        group = column if K % (256 * WARPS) == 0 else tl.minimum(column, K // 128 - 1)
        numbers = factors + (group[:, None] * MQ + pair[None, :] % R) * 16
        x_scale = tl.load(numbers)
        if K % (256 * WARPS) != 0:
            x_scale = tl.where((column < K // 128)[:, None], x_scale, 0.0)
        side = side + (x_scale,)
        for j in tl.static_range(CHAINS):
            columns = columns + (_columns_apart(x, group, j * D, R, K, WARPS, GROUP),)
            if MINIMUM:
                own = (4 if GROUP == 32 else 8) + j * D + pair // R
                side = side + (tl.load(numbers + own[None, :]),)
    SIDE: tl.constexpr = 1 + (CHAINS if MINIMUM else 0)
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
                    R,
                    WARPS,
                    GROUP,
                    LOW,
                    HIGH,
                    WORDS,
                    SHIFT,
                    FACTORS,
                    MINIMUM,
                    TABLE,
                    ASM,
                ),
            )
        outs = grown
    return outs


@triton.jit
def _multiply_rows(
    outs,
    codes,
    sides,
    x,
    factors,
    M,
    chunk,
    K: tl.constexpr,
    MQ: tl.constexpr,
    R: tl.constexpr,
    BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
    GROUP: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    WORDS: tl.constexpr,
    SHIFT: tl.constexpr,
    FACTORS: tl.constexpr,
    MINIMUM: tl.constexpr,
    TABLE: tl.constexpr,
    ASM: tl.constexpr,
):
    if R == 4:
        return _multiply(
            outs,
            codes,
            sides,
            x,
            factors,
            2 * M,
            chunk,
            K,
            MQ,
            BLOCKS,
            WARPS,
            GROUP,
            LOW,
            HIGH,
            WORDS,
            SHIFT,
            FACTORS,
            MINIMUM,
            TABLE,
            ASM,
        )
    else:
        return _multiply_apart(
            outs,
            codes,
            sides,
            x,
            factors,
            chunk,
            K,
            MQ,
            R,
            BLOCKS,
            WARPS,
            GROUP,
            LOW,
            HIGH,
            WORDS,
            SHIFT,
            FACTORS,
            MINIMUM,
            TABLE,
            ASM,
        )


@triton.jit(do_not_specialize=["M", "N", "C", "column"])
def _few_kernel(
    x,
    factors,
    low,
    high,
    sides,
    scales,
    out,
    squares,
    eps,
    M,
    N,
    C,
    column,
    K: tl.constexpr,
    MQ: tl.constexpr,
    R: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
    GROUP: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    WORDS: tl.constexpr,
    SHIFT: tl.constexpr,
    FACTORS: tl.constexpr,
    MINIMUM: tl.constexpr,
    TABLE: tl.constexpr,
    NORM: tl.constexpr,
    G_POW2: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    B: tl.constexpr = (K + 255) // 256
    CHUNKS: tl.constexpr = (B + WARPS - 1) // WARPS
    PARTS: tl.constexpr = MQ // 4
    if PDL:
        gdc_launch_dependents()
    tiles = (N + 15) // 16
    tile = tl.program_id(0) * BLOCKS
    split = tl.program_id(1)
    first = split * CHUNKS // SPLITS
    last = (split + 1) * CHUNKS // SPLITS
    outs = ()
    for _ in tl.static_range(BLOCKS * PARTS):
        outs = outs + (tl.zeros((WARPS, 16, 4), tl.float32),)
    # The first chunk is peeled so that its loads are issued before the wait for the activations.
    codes = _load_codes(low, high, tile, tiles, first, B, BLOCKS, WARPS, LOW, HIGH)
    own = _load_sides(sides, scales, tile, tiles, first, B, BLOCKS, WARPS, WORDS, FACTORS)
    if PDL:
        gdc_wait()
    outs = _multiply_rows(
        outs,
        codes,
        own,
        x,
        factors,
        M,
        first,
        K,
        MQ,
        R,
        BLOCKS,
        WARPS,
        GROUP,
        LOW,
        HIGH,
        WORDS,
        SHIFT,
        FACTORS,
        MINIMUM,
        TABLE,
        ASM,
    )
    for chunk in tl.range(first + 1, last, 1, num_stages=1):
        more = _load_codes(low, high, tile, tiles, chunk, B, BLOCKS, WARPS, LOW, HIGH)
        beside = _load_sides(sides, scales, tile, tiles, chunk, B, BLOCKS, WARPS, WORDS, FACTORS)
        outs = _multiply_rows(
            outs,
            more,
            beside,
            x,
            factors,
            M,
            chunk,
            K,
            MQ,
            R,
            BLOCKS,
            WARPS,
            GROUP,
            LOW,
            HIGH,
            WORDS,
            SHIFT,
            FACTORS,
            MINIMUM,
            TABLE,
            ASM,
        )
    m = tl.arange(0, R)
    for r in tl.static_range(BLOCKS):
        for p in tl.static_range(PARTS):
            o = tl.sum(outs[r * PARTS + p], 0)
            if R < 4:
                o = tl.sum(tl.reshape(o, (16, 4 // R, R)), 1)
            row = p * 4 + m
            if NORM:
                o = o * inverse_rms(squares, row, row < M, eps, K // 128, G_POW2)[None, :]
            n = (tile + r) * 16 + tl.arange(0, 16)
            offsets = ((split * M + row) * C)[None, :] + column + n[:, None]
            tl.store(out + offsets, o, mask=(row < M)[None, :] & (n < N)[:, None])


def constants(weight: GgmlTensor) -> dict[str, int | bool]:
    """Constants of the kernels for a number format."""
    form = weight.form
    low, high = form.planes
    return {
        "K": weight.features_in,
        "GROUP": form.group,
        "LOW": low,
        "HIGH": high,
        "WORDS": weight.sides.shape[2],
        "SHIFT": 8 - form.bits if form.offset else 0,
        "FACTORS": form.factors,
        "MINIMUM": form.minimum,
        "TABLE": form.table,
    }


def arguments(weight: GgmlTensor) -> tuple[torch.Tensor, ...]:
    """Tensors of the weight in the kernels' order; another stands for one that is missing."""
    return (
        weight.low,
        weight.low if weight.high is None else weight.high,
        weight.sides,
        weight.sides if weight.scales is None else weight.scales,
    )


def gemm(
    rows: Int8Rows,
    weight: GgmlTensor,
    out: torch.Tensor,
    config: TileConfig,
    column: int = 0,
    *,
    squares: torch.Tensor | None = None,
    eps: float = 0.0,
    pdl: bool = True,
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
    require("out", out, (config.splits, m, None), (torch.float32,), device)
    if not 0 <= column <= out.shape[2] - n:
        raise ValueError(f"column: {n} columns from {column} of {out.shape[2]} wanted")
    if squares is not None:
        require("squares", squares, (m, k // 128), (torch.float32,), device)
    gpu = traits(device)
    pdl = pdl and gpu.pdl
    kernel = _few_kernel[(triton.cdiv(n, ROWS * config.blocks), config.splits)](
        rows.x,
        rows.factors,
        *arguments(weight),
        out,
        tensor_or(squares, out),
        eps,
        m,
        n,
        out.shape[2],
        column,
        MQ=rows.factors.shape[1],
        R=m if m <= 2 else 4,
        SPLITS=config.splits,
        BLOCKS=config.blocks,
        WARPS=config.warps,
        NORM=squares is not None,
        G_POW2=power_of_two(k // 128),
        ASM=gpu.asm,
        PDL=pdl,
        **constants(weight),
        **options(pdl, config.warps, registers=config.registers),
    )
    set_carveout(kernel)
