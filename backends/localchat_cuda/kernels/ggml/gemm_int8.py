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
The integer arithmetic is in the spirit of llama.cpp's mmvq, which rounds x to 8 bits.
"""
# mypy: disable-error-code="assignment"
# (Triton unrolls loops over tuples that grow; no type says that)

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from localchat_cuda.ggml_forms import BLOCK, ROWS
from localchat_cuda.kernels.ggml.pack import GgmlTensor, GgmlWeight, dense
from localchat_cuda.kernels.ggml.tile_ops import byte, field, four_numbers, half
from localchat_cuda.kernels.int4.activations import Int8Rows, check_rows, natural_int8
from localchat_cuda.kernels.int4.tile_config import TileConfig
from localchat_cuda.kernels.int4.tile_ops import inverse_rms
from localchat_cuda.kernels.launch import options, power_of_two, require, set_carveout, traits

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
def _tiles(plane, tile, chunk, B: tl.constexpr, WARPS: tl.constexpr, BITS: tl.constexpr):
    found = ()
    i = tl.arange(0, WARPS * 512)
    block = tile * B + tl.minimum(chunk * WARPS + i // 512, B - 1)
    for j in tl.static_range(BITS):
        w = tl.load(plane + (block * BITS + j) * 512 + i % 512, eviction_policy="evict_first")
        w = tl.permute(tl.reshape(w, (WARPS, 8, 4, 2, 2, 4)), (0, 4, 1, 3, 2, 5))
        found = found + (tl.reshape(w, (WARPS, 16, 32)),)
    return found


@triton.jit
def _load(
    low, high, sides, scales, tile, chunk, B: tl.constexpr, WARPS: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, WORDS: tl.constexpr, FACTORS: tl.constexpr,
):  # fmt: skip
    """Return LOW and HIGH tiles [WARPS, 16, 32] of a column block for each warp, then words [WARPS, 16] of
    sides, those of the first half first, and a word of scales with factors."""
    found = _tiles(low, tile, chunk, B, WARPS, LOW) + _tiles(high, tile, chunk, B, WARPS, HIGH)
    n = tl.arange(0, 16)[None, :]
    beside = tile * B + tl.minimum(chunk * WARPS + tl.arange(0, WARPS), B - 1)[:, None]
    for word in tl.static_range(2 * WORDS):
        found = found + (tl.load(sides + (beside * (2 * WORDS) + word) * 16 + n),)
    if FACTORS:
        found = found + (tl.load(scales + beside * 16 + n),)
    return found


@triton.jit
def _columns(x, at, first, rows2, K: tl.constexpr, WARPS: tl.constexpr):
    """Load the right operand [WARPS, 32, 8]: (high, low) of four rows, `at` [WARPS] where the group begins.

    Columns past the last row repeat earlier ones; their results are not stored."""
    k = tl.arange(0, 32)
    k = k // 8 * 16 + k % 8
    n = ((first + tl.arange(0, 8)) % rows2)[:, None, None] * K
    tile = tl.load(x + n + at[None, :, None] + k[None, None, :])
    tile = tl.permute(tl.reshape(tile, (8, WARPS, 4, 2, 4)), (1, 3, 2, 4, 0))
    return tl.reshape(tile, (WARPS, 32, 8))


@triton.jit
def _factor(factors, at, which: tl.constexpr, part: tl.constexpr, MQ: tl.constexpr):
    """Load number `which` of four rows, [WARPS, 4]."""
    m = part * 4 + tl.arange(0, 4)
    return tl.load(factors + (at[:, None] * MQ + m[None, :]) * 16 + which)


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
    sums, codes, loaded, side, g: tl.constexpr, s: tl.constexpr, FIRST: tl.constexpr,
    PARTS: tl.constexpr, WARPS: tl.constexpr, GROUP: tl.constexpr, FACTORS: tl.constexpr,
    MINIMUM: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add the products of group s of the 32 columns g to the sums of all parts."""
    group: tl.constexpr = g * (32 // GROUP) + s
    SIDE: tl.constexpr = 5 + (128 // GROUP if MINIMUM else 0)
    own = _halves_apart(codes, s, GROUP)
    if FACTORS:
        factor = byte(four_numbers(loaded[FIRST], group // 4), group % 4, ASM)
        if MINIMUM and GROUP == 16:
            least = (factor >> 4) & 15
            factor = factor & 15
        elif MINIMUM:
            least = byte(four_numbers(loaded[FIRST], 1), group, ASM)
    else:
        factor = half(four_numbers(loaded[FIRST], group // 2), group % 2)
        if MINIMUM:
            least = half(four_numbers(loaded[FIRST + 1], group // 2), group % 2)
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
                b += x * least[:, :, None]
            else:
                a -= x.to(tl.float32) * least[:, :, None]
        added = added + (a, b)
    return added


@triton.jit
def _codes(
    loaded, at: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SHIFT: tl.constexpr,
    TABLE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Codes of the 32 columns `at` of a column block."""
    top = loaded[LOW + at * HIGH // 8] if HIGH else loaded[0]
    return field(loaded[at * LOW // 8], top, at, None, LOW, HIGH, SHIFT, TABLE, ASM)


@triton.jit
def _add_half(
    outs, loaded, side, there, h: tl.constexpr, PARTS: tl.constexpr, WARPS: tl.constexpr,
    GROUP: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, WORDS: tl.constexpr,
    SHIFT: tl.constexpr, FACTORS: tl.constexpr, MINIMUM: tl.constexpr, TABLE: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Add the products of half a column block to outs [WARPS, 16, 4] of all parts."""
    SIDE: tl.constexpr = 5 + (128 // GROUP if MINIMUM else 0)
    sums = ()
    for _ in tl.static_range(PARTS):
        if FACTORS:
            sums = sums + (tl.zeros((WARPS, 16, 8), tl.int32), tl.zeros((WARPS, 16, 4), tl.int32))
        else:
            sums = sums + (tl.zeros((WARPS, 16, 4), tl.float32), 0)
    for g in tl.static_range(4):
        codes = _codes(loaded, 4 * h + g, LOW, HIGH, SHIFT, TABLE, ASM)
        for s in tl.static_range(32 // GROUP):
            sums = _add_group(
                sums, codes, loaded, side, g, s, LOW + HIGH + h * WORDS, PARTS, WARPS, GROUP, FACTORS,
                MINIMUM, ASM,
            )  # fmt: skip
    grown = ()
    for p in tl.static_range(PARTS):
        x_scale = tl.where(there, side[p * SIDE], 0.0)[:, None, :]
        if FACTORS:
            scale = half(loaded[LOW + HIGH + 2 * WORDS], 0)[:, :, None]
            upper, lower = _pairs(sums[2 * p], WARPS)
            value = upper.to(tl.float32) * 256 + lower.to(tl.float32)
            out = outs[p] + value * (scale * (1.0 / (1 << SHIFT)) * x_scale)
            if MINIMUM:
                less = half(loaded[LOW + HIGH + 2 * WORDS], 1)[:, :, None]
                out -= sums[2 * p + 1].to(tl.float32) * (less * x_scale)
        else:
            out = outs[p] + sums[2 * p] * (x_scale * (1.0 / (1 << SHIFT)))
        grown = grown + (out,)
    return grown


@triton.jit
def _multiply(
    outs, loaded, x, factors, rows2, chunk, K: tl.constexpr, MQ: tl.constexpr, BLOCKS: tl.constexpr,
    WARPS: tl.constexpr, GROUP: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    WORDS: tl.constexpr, SHIFT: tl.constexpr, FACTORS: tl.constexpr, MINIMUM: tl.constexpr,
    TABLE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add the products of a column block for each warp; `loaded` has what `_load` returns, of all row tiles."""
    PARTS: tl.constexpr = MQ // 4
    EACH: tl.constexpr = LOW + HIGH + 2 * WORDS + (1 if FACTORS else 0)
    for h in tl.static_range(2):
        column = (chunk * WARPS + tl.arange(0, WARPS)) * 2 + h
        # beyond the last column: what is read there counts 0 times
        there = (column < K // 128)[:, None]
        at = tl.minimum(column, K // 128 - 1)
        side = ()
        for p in tl.static_range(PARTS):
            side = side + (_factor(factors, at, 0, p, MQ),)
            for g in tl.static_range(4):
                start = at * 128 + g // 2 * 64 + g % 2 * 8
                side = side + (_columns(x, start, 8 * p, rows2, K, WARPS),)
            if MINIMUM:
                for s in tl.static_range(128 // GROUP):
                    side = side + (_factor(factors, at, (4 if GROUP == 32 else 8) + s, p, MQ),)
        grown = ()
        for r in tl.static_range(BLOCKS):
            grown = grown + _add_half(
                outs[r * PARTS : (r + 1) * PARTS], loaded[r * EACH : (r + 1) * EACH], side, there, h,
                PARTS, WARPS, GROUP, LOW, HIGH, WORDS, SHIFT, FACTORS, MINIMUM, TABLE, ASM,
            )  # fmt: skip
        outs = grown
    return outs


@triton.jit(do_not_specialize=["M", "N", "C", "column"])
def _few_kernel(
    x, factors, low, high, sides, scales, out, squares, eps, M, N, C, column, K: tl.constexpr,
    MQ: tl.constexpr, SPLITS: tl.constexpr, BLOCKS: tl.constexpr, WARPS: tl.constexpr,
    GROUP: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, WORDS: tl.constexpr,
    SHIFT: tl.constexpr, FACTORS: tl.constexpr, MINIMUM: tl.constexpr, TABLE: tl.constexpr,
    NORM: tl.constexpr, G_POW2: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
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
    loaded = ()
    for r in tl.static_range(BLOCKS):
        loaded = loaded + _load(
            low, high, sides, scales, tl.minimum(tile + r, tiles - 1), first, B, WARPS, LOW, HIGH,
            WORDS, FACTORS,
        )  # fmt: skip
    if PDL:
        gdc_wait()
    outs = _multiply(
        outs, loaded, x, factors, 2 * M, first, K, MQ, BLOCKS, WARPS, GROUP, LOW, HIGH, WORDS, SHIFT,
        FACTORS, MINIMUM, TABLE, ASM,
    )  # fmt: skip
    for chunk in tl.range(first + 1, last, 1, num_stages=1):
        more = ()
        for r in tl.static_range(BLOCKS):
            more = more + _load(
                low, high, sides, scales, tl.minimum(tile + r, tiles - 1), chunk, B, WARPS, LOW, HIGH,
                WORDS, FACTORS,
            )  # fmt: skip
        outs = _multiply(
            outs, more, x, factors, 2 * M, chunk, K, MQ, BLOCKS, WARPS, GROUP, LOW, HIGH, WORDS, SHIFT,
            FACTORS, MINIMUM, TABLE, ASM,
        )  # fmt: skip
    m = tl.arange(0, 4)
    for r in tl.static_range(BLOCKS):
        for p in tl.static_range(PARTS):
            o = tl.sum(outs[r * PARTS + p], 0)
            row = p * 4 + m
            if NORM:
                o = o * inverse_rms(squares, row, row < M, eps, K // 128, G_POW2)[None, :]
            n = (tile + r) * 16 + tl.arange(0, 16)
            at = ((split * M + row) * C)[None, :] + column + n[:, None]
            tl.store(out + at, o, mask=(row < M)[None, :] & (n < N)[:, None])


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


@lru_cache(maxsize=512)
def tile_config_for(rows: int, n: int, k: int, sms: int) -> TileConfig:
    """Choose the tile config of a weight: as many splits as fill the multiprocessors once.

    Up to 8 rows fewer with more registers are faster where there are splits at all (H200, 3,584 features: 5.8
    and 6.9 us of 3,584 columns, 22.3 and 25.3 of 18,944), and slower where there are none.
    """
    column_blocks = -(-k // BLOCK)
    warps = 2 if column_blocks > 1 else 1
    programs = -(-n // ROWS) * warps
    if rows <= 4:
        splits, registers = round(32 * sms / programs), 64
    else:
        splits = math.ceil(13.5 * sms / programs)
        registers = 128 if splits > 1 else 96
    return TileConfig(1, warps, 1, max(1, min(splits, -(-column_blocks // warps), 16)), registers)


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
    m, n, k, device = (
        rows.x.shape[0] // 2,
        weight.features_out,
        weight.features_in,
        weight.low.device,
    )
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
        out if squares is None else squares,
        eps,
        m,
        n,
        out.shape[2],
        column,
        MQ=rows.factors.shape[1],
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
