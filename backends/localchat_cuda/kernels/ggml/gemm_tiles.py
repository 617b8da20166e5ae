"""GEMM of many rows, and dequantization, with ggml's block formats as constants of one tile.

Letters: M rows, N output and K input features, S splits of K, B = ceil(K / 256), T = ceil(N / 16).

    x    fp16 or bf16 [M, K] (in the interpreter also fp32)    pack.GgmlTensor of N x K
    out  fp32 [S, M, C], of which `gemm` writes N columns from `column` on

Weights are dequantized to fp16 in registers, in the layout of tensor-core operands, and multiplied at once: one
accumulator, as in int4/gemm_tiled.py. So they are rounded to fp16, by 3.5e-4 of a product, as those are that
`dequantize` writes for the library; with bf16 rows to that. Sums are fp32.

Grid (row tiles, T / (blocks * warps), S), row tiles fastest, so that neighbours share weights in the L2 cache.
Requires K % 32 == 0. Any M.
"""
# mypy: disable-error-code="assignment, misc"
# (Triton unrolls loops over tuples that grow; no type says that)

from functools import lru_cache

import torch
import triton
import triton.language as tl

from localchat_cuda.ggml_forms import ROWS
from localchat_cuda.kernels.ggml.pack import GgmlTensor, GgmlWeight, dense
from localchat_cuda.kernels.ggml.tile_ops import (
    byte,
    e4m3_number,
    field,
    form_of,
    four_numbers,
    half,
    half_bits,
    planes,
    row_numbers,
    scaled,
)
from localchat_cuda.kernels.int4.gemm_tiled import TiledGemmConfig, landed
from localchat_cuda.kernels.int4.tile_config import TileConfig
from localchat_cuda.kernels.launch import (
    KernelLaunch,
    cdiv,
    launch_kernel,
    release,
    require,
    traits,
    wait,
)

_DEQUANTIZED_TILES = 4


def reference(x: torch.Tensor, weight: GgmlTensor | GgmlWeight) -> torch.Tensor:
    """Compute the gemm [M, N] in fp32 with plain torch."""
    return x.float() @ dense(weight).t()


@triton.jit
def _tile(
    plane, first, h, j: tl.constexpr, T, B: tl.constexpr, BITS: tl.constexpr, TILES: tl.constexpr
):
    """Load bytes of 32 columns j of half block h as a left operand [16 * TILES, 32].

    Also returns where the half starts in each byte.
    """
    i = tl.arange(0, TILES * 512)
    tile = tl.minimum(first + i // 512, T - 1)
    offset = h // 2 if BITS == 1 else h * (BITS // 2) + j * BITS // 8
    w = tl.load(plane + (tile.to(tl.int64) * (B * BITS) + offset) * 512 + i % 512)
    w = tl.permute(tl.reshape(w, (TILES, 8, 4, 2, 2, 4)), (0, 4, 1, 3, 2, 5))
    return tl.reshape(w, (16 * TILES, 32))


@triton.jit
def _sides(
    weight, first, h, g: tl.constexpr, T, B: tl.constexpr, form: tl.constexpr, TILES: tl.constexpr
):
    """Load scales and minimums of group g of half block h, fp32 [16 * TILES]. Missing minimums are 0."""
    row = tl.arange(0, 16 * TILES)
    tile = tl.minimum(first + row // 16, T - 1)
    words = weight.sides + (tile * (2 * B) + h) * (form.WORDS * 16) + row % 16
    minimum = tl.zeros((16 * TILES,), tl.float32)
    if form.FACTORS:
        pair = tl.load(weight.scales + (tile * B + h // 2) * 16 + row % 16)
        own = tl.load(words)
        factor = byte(four_numbers(own, g // 4), g % 4, form.ASM)
        if form.MINIMUM and form.GROUP == 16:
            minimum = ((factor >> 4) & 15).to(tl.float32) * half(pair, 1)
            factor = factor & 15
        elif form.MINIMUM:
            minimum = byte(four_numbers(own, 1), g, form.ASM).to(tl.float32) * half(pair, 1)
        scale = factor.to(tl.float32) * half(pair, 0)
    elif form.FLOATS:
        own = tl.load(words)
        scale = e4m3_number(byte(four_numbers(own, g // 4), g % 4, form.ASM))
    else:
        scale = half(four_numbers(tl.load(words), g // 2), g % 2)
        if form.MINIMUM:
            minimum = half(four_numbers(tl.load(words + 16), g // 2), g % 2)
    return scale, minimum


@triton.jit
def _half_sides(
    weight, first, h, g: tl.constexpr, T, B: tl.constexpr, form: tl.constexpr, TILES: tl.constexpr
):
    """`_sides` of a form whose factors are bytes, rounded to fp16: both numbers of a row in one operation."""
    row = tl.arange(0, 16 * TILES)
    tile = tl.minimum(first + row // 16, T - 1)
    pair = tl.load(weight.scales + (tile * B + h // 2) * 16 + row % 16)
    own = tl.load(weight.sides + (tile * (2 * B) + h) * 16 + row % 16)
    factor = four_numbers(own, g // 4)
    packed_minimum = four_numbers(own, 1) if form.MINIMUM else factor
    if form.ASM:
        # 0x6480 is 1152, as in `scaled`
        offset = tl.full(pair.shape, -0x1B7F1B80, tl.int32)
        both = tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            prmt.b32 t, $1, $2, $5;
            lop3.b32 t, t, 0x00ff00ff, 0x64806480, 0x6a;
            add.rn.f16x2 t, t, $4;
            mul.rn.f16x2 $0, t, $3;
            }""",
            "=r,r,r,r,r,n",
            [factor, packed_minimum, pair, offset, (g % 4) * 0x101 + 0x400],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        scale = (byte(factor, g % 4, form.ASM).to(tl.float32) * half(pair, 0)).to(tl.float16)
        minimum = (byte(packed_minimum, g % 4, form.ASM).to(tl.float32) * half(pair, 1)).to(
            tl.float16
        )
        both = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        both |= minimum.to(tl.int16, bitcast=True).to(tl.int32) << 16
    minimum = half_bits(both, 1) if form.MINIMUM else tl.zeros(pair.shape, tl.float16)
    return half_bits(both, 0), minimum


@triton.jit
def _spread(first, second, form: tl.constexpr, TILES: tl.constexpr):
    """Return the sides [16 * TILES] of a tile's two groups of 32 columns."""
    low = tl.broadcast_to(first[:, None], (16 * TILES, 32))
    if form.GROUP == 32:
        return low
    else:
        k = tl.broadcast_to(tl.arange(0, 32)[None, :], (16 * TILES, 32))
        return tl.where(k < 16, low, tl.broadcast_to(second[:, None], (16 * TILES, 32)))


@triton.jit
def _weights(
    weight,
    first,
    h,
    j: tl.constexpr,
    T,
    B: tl.constexpr,
    form: tl.constexpr,
    TILES: tl.constexpr,
    HALF: tl.constexpr,
    STORED: tl.constexpr,
):
    """Dequantize 32 columns j of half block h: [16 * TILES, 32] in fp16 (`HALF`), or exactly in fp32.

    STORED: columns in the order in which they are stored, see `_tiles_kernel`. NVFP4 is exact in both, but
    the caller has to multiply it by `row_numbers`."""
    PER: tl.constexpr = 32 // form.GROUP
    lower = _tile(weight.low, first, h, j, T, B, form.LOW, TILES)
    upper = lower
    if form.HIGH:
        upper = _tile(weight.high, first, h, j, T, B, form.HIGH, TILES)
    codes = field(lower, upper, j, h % 2 * 4 if form.HIGH == 1 else None, form)
    result = ()
    for s in tl.static_range(PER):
        if HALF and form.FACTORS and (form.GROUP == 32 or not form.MINIMUM):
            scale, minimum = _half_sides(weight, first, h, j * PER + s, T, B, form, TILES)
        else:
            scale, minimum = _sides(weight, first, h, j * PER + s, T, B, form, TILES)
        result = result + (scale, minimum)
    if HALF:
        w = scaled(
            codes,
            _spread(result[0].to(tl.float16), result[2 * PER - 2].to(tl.float16), form, TILES),
            _spread(result[1].to(tl.float16), result[2 * PER - 1].to(tl.float16), form, TILES),
            form,
        )
    else:
        w = codes.to(tl.float32) * (1.0 / (1 << form.SHIFT))
        w *= _spread(result[0], result[2 * PER - 2], form, TILES)
        if form.MINIMUM:
            w -= _spread(result[1], result[2 * PER - 1], form, TILES)
    if STORED:
        return w
    # (half, quad, pair, e) to the order of columns, which is that of `mma`
    w = tl.permute(tl.reshape(w, (16 * TILES, 2, 4, 2, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(w, (16 * TILES, 32))


@triton.jit
def _added(acc, w, x_row, pointers, k, K: tl.constexpr):
    """Add the products of w with the columns `at + k` of x."""
    if K % 128 == 0:
        xs = tl.load(x_row + pointers)
    else:
        xs = tl.load(x_row + pointers, mask=(pointers + k < K)[:, None], other=0.0)
    return tl.dot(w, xs, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["M", "N", "C", "column"])
def _tiles_kernel(
    x,
    weight,
    out,
    M,
    N,
    C,
    column,
    K: tl.constexpr,
    config: tl.constexpr,
    form: tl.constexpr,
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """WHOLE: one product for each half, since one on warpgroups waits for its end and for the loads of x.

    Else four, of columns as stored: a lane's four neighbours are what `mma` takes from a type of one byte."""
    ROWS: tl.constexpr = config.rows
    TILES: tl.constexpr = config.shape.blocks * config.shape.warps
    SPLITS: tl.constexpr = config.shape.splits
    B: tl.constexpr = (K + 255) // 256
    HALVES: tl.constexpr = (K + 127) // 128
    release(PDL)
    T = (N + 15) // 16
    first = tl.program_id(1) * TILES
    split = tl.program_id(2)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, 128 if WHOLE else 32)
    if not WHOLE:
        k = k // 16 * 16 + k // 2 % 2 * 8 + k // 4 % 4 * 2 + k % 2
    x_row = x + tl.minimum(m, M - 1)[None, :] * K + k[:, None]
    acc = tl.zeros((16 * TILES, ROWS), tl.float32)
    if form.FLOATS:
        numbers = row_numbers(weight.scales, first, T, TILES)
    wait(PDL)
    start = split * HALVES // SPLITS
    end = (split + 1) * HALVES // SPLITS
    for h in tl.range(start, end, 1, num_stages=config.shape.depth):
        ws = ()
        for j in tl.static_range(4):
            w = _weights(
                weight, first, h, j, T, B, form, TILES, x.dtype.element_ty != tl.float32, not WHOLE
            ).to(x.dtype.element_ty)
            if WHOLE:
                ws = ws + (w,)
            else:
                acc = _added(acc, w, x_row, h * 128 + j * 32, k, K)
        if WHOLE:
            w = tl.join(tl.join(ws[0], ws[2]), tl.join(ws[1], ws[3]))
            w = tl.reshape(tl.permute(w, (0, 2, 3, 1)), (16 * TILES, 128))
            acc = landed(_added(acc, w, x_row, h * 128, k, K), form.ASM)
    if form.FLOATS:
        acc *= numbers[:, None]
    n = first * 16 + tl.arange(0, 16 * TILES)
    target = out + ((split * M + m).to(tl.int64) * C)[None, :] + column + n[:, None]
    tl.store(target, acc, mask=(m < M)[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["N"])
def _dequantize_kernel(weight, out, N, K: tl.constexpr, TILES: tl.constexpr, form: tl.constexpr):
    B: tl.constexpr = (K + 255) // 256
    T = (N + 15) // 16
    first = tl.program_id(0) * TILES
    h = tl.program_id(1)
    n = first * 16 + tl.arange(0, 16 * TILES)
    k = tl.arange(0, 32)
    target = out + n.to(tl.int64)[:, None] * K + k[None, :]
    for j in tl.static_range(4):
        w = _weights(weight, first, h, j, T, B, form, TILES, False, False)
        if form.FLOATS:
            w *= row_numbers(weight.scales, first, T, TILES)[:, None]
        column = h * 128 + j * 32
        inside = (n < N)[:, None] & (column + k < K)[None, :]
        tl.store(target + column, w.to(out.dtype.element_ty), mask=inside)


@lru_cache(maxsize=512)
def tile_config_for(rows: int, n: int, k: int, sms: int) -> TiledGemmConfig:
    """Choose tiles, and as many splits along K as give each multiprocessor several programs.

    A program computes 32 or 64 rows by 64 features, or by 128 if that leaves enough programs. H200, gate and up
    of a 7B in Q4_K, 32 rows: 36 us; with 64 features 47; without splits, whose last wave is nearly empty, 44.
    """
    tile_rows = 32 if rows <= 32 else 64
    max_splits = max(1, min(-(-k // 128) // 4, 14))
    wide_programs = -(-n // 128)
    if rows <= 32:
        is_wide = wide_programs * max_splits >= 2.5 * sms
        programs_per_sm = 4
    else:
        is_wide = rows <= 64 and wide_programs >= 4 * sms
        # Programs of several row tiles share weights.
        programs_per_sm = 3 if rows <= 64 else 6
    blocks = 2 if is_wide else 1
    programs = -(-n // (64 * blocks)) * -(-rows // tile_rows)
    splits = max(1, min(round(programs_per_sm * sms / programs), max_splits))
    depth = 4 if tile_rows == 32 * blocks else 3
    return TiledGemmConfig(TileConfig(blocks, 4, depth, splits), tile_rows)


def gemm(
    x: torch.Tensor,
    weight: GgmlTensor,
    out: torch.Tensor,
    config: TiledGemmConfig,
    column: int = 0,
    *,
    whole_halves: bool | None = None,
) -> None:
    """Write partial sums into columns of `out` [S, M, C] from `column` on.

    `whole_halves`: WHOLE of `_tiles_kernel`. None selects the faster value for the device.
    """
    m = x.shape[0]
    n = weight.features_out
    k = weight.features_in
    device = weight.low.device
    require("x", x, (None, k), device)
    shape = config.shape
    require("out", out, (shape.splits, m, None), device, torch.float32)
    if not 0 <= column <= out.shape[2] - n:
        raise ValueError(f"column: {n} columns from {column} of {out.shape[2]} wanted")
    gpu = traits(device)
    tiles = shape.blocks * shape.warps
    if whole_halves is None:
        whole_halves = gpu.hopper
    grid = (cdiv(m, config.rows), cdiv(n, ROWS * tiles), shape.splits)
    KernelLaunch(_tiles_kernel, grid, gpu, warps=shape.warps).run(
        *(x, planes(weight), out, m, n, out.shape[2], column, k, config, form_of(weight, gpu)),
        whole_halves,
    )


def dequantize(weight: GgmlTensor, out: torch.Tensor) -> None:
    """Write the weight [N, K] into `out` fp16, bf16 or fp32, rounded once."""
    n = weight.features_out
    k = weight.features_in
    require("out", out, (n, k), weight.low.device)
    launch_kernel(
        _dequantize_kernel,
        (cdiv(n, ROWS * _DEQUANTIZED_TILES), -(-k // 128)),
        planes(weight),
        out,
        n,
        k,
        _DEQUANTIZED_TILES,
        form_of(weight, traits(out.device)),
        num_warps=_DEQUANTIZED_TILES,
    )
