"""W4A16 gemm for 17 to 512 rows on Hopper's warpgroup instructions: y = x w^T.

Weights are scaled before they are multiplied, w = (code - zero) * scale in fp16: one accumulator, so a program
covers more outputs and reads x less often than one that scales sums. That pays from 17 rows on; at far larger
counts, dequantizing once for the library's gemm does (gemm_dequant.py). Weights are rounded to fp16: error
3.5e-4 against fp32.

Letters: M rows, N output and K input features, G = K / 128.

    x   fp16 [M, K] in slot order (activations.HalfRows)  out  fp32 [splits, M, N] partial sums
    norm: 1/rms of each row, as in row_norm.py

A fused gemm multiplies with gate and up at once, two row blocks of a program, and writes silu(gate) * up as
activations of the next gemm, fp16 [M, N / 2] in slot order: at 128 rows of a 7B model that is 5 MB instead of
19 MB of sums for each split, written and read again.

Grid (row tiles, N / (16 * blocks * warps), splits), row tiles fastest, so that neighbours share
weights in the L2 cache. Accumulation in fp32. Any M.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.activation import activation, to_half
from localchat_cuda.kernels.int4.activations import HalfRows, check_result, check_slot_rows
from localchat_cuda.kernels.int4.pack import BLOCK_K, W4
from localchat_cuda.kernels.int4.row_norm import RowNorm, inverse_rms, norm_arguments
from localchat_cuda.kernels.int4.tile_config import TileConfig
from localchat_cuda.kernels.int4.tile_ops import PLANES_ASM, SCALED_ASM
from localchat_cuda.kernels.launch import KernelLaunch, cdiv, power_of_two, release, traits, wait


class TiledGemmConfig(NamedTuple):
    """Tile config of a weight, and the rows of a tile."""

    shape: TileConfig
    """Shape as in tile_config.py. Its `depth` is the number of pipeline stages."""
    rows: int

    @property
    def splits(self) -> int:
        """Programs along K."""
        return self.shape.splits


class ManyRows(NamedTuple):
    """Constants of the kernel. For the letters see the module docstring."""

    N: int
    K: int
    GROUP: int
    """Columns that share a scale: 32, 64 or 128."""
    config: TiledGemmConfig
    NORM: bool
    """Rows are divided by their rms."""
    FUSED: bool
    """The result is the activation of gate and up; GELU: tanh-GELU, else SiLU."""
    GELU: bool
    INTO: int
    """GROUP of the rows that a fused gemm writes."""
    ASM: bool


_MEASURED: dict[tuple[int, int], tuple[tuple[int, TiledGemmConfig], ...]] = {
    (3584, 18944): ((32, TiledGemmConfig(TileConfig(2, 4, 5, 8), 32)),),
    (4608, 3584): (
        (32, TiledGemmConfig(TileConfig(1, 4, 5, 4), 32)),
        (64, TiledGemmConfig(TileConfig(1, 8, 3, 4), 64)),
        (256, TiledGemmConfig(TileConfig(2, 4, 3, 4), 64)),
        (512, TiledGemmConfig(TileConfig(2, 4, 3, 2), 64)),
    ),
    (3584, 3584): (
        (32, TiledGemmConfig(TileConfig(1, 4, 5, 7), 32)),
        (64, TiledGemmConfig(TileConfig(1, 4, 3, 7), 64)),
        (128, TiledGemmConfig(TileConfig(2, 4, 3, 7), 64)),
    ),
}
"""Configs for narrow weights of a 7B model by (N, K) and row count.

The rule leaves most of an H200 idle for them.
"""


def tile_config_for(rows: int, n: int, k: int, sms: int) -> TiledGemmConfig:
    """Choose tiles and splits of K by rule.

    Tiles of 128 x 128 (64 rows and fewer: one tile). Splits weigh the idle part of the last wave, two programs
    a multiprocessor, against the cost of writing and adding partial sums.
    """
    for limit, config in _MEASURED.get((n, k), ()):
        if rows <= limit:
            return config
    tile = _tile(rows, 128)
    if n % 64:
        raise ValueError(f"weight {n}x{k}: output features in 64s wanted")
    if tile <= 32:
        return TiledGemmConfig(_small_config(n, k, sms), tile)
    warps = 8 if n % 128 == 0 else 4
    programs = -(-rows // tile) * n // (16 * warps)

    def cost(splits: int) -> float:
        waves = -(-programs * splits // (2 * sms))
        return waves / splits + splits * 0.08 * 3584 / k

    max_splits = min(2 if programs >= sms else 8, k // BLOCK_K)
    splits = min((s for s in (1, 2, 4, 8) if s <= max_splits), key=cost)
    return TiledGemmConfig(TileConfig(1, warps, 3, splits), tile)


def _small_config(n: int, k: int, sms: int) -> TileConfig:
    """Up to 32 rows: few programs, each with many weights in flight; three per multiprocessor."""
    blocks = 2 if n % 128 == 0 else 1
    target = max(1, round(3 * sms / (n // (64 * blocks))))
    return TileConfig(blocks, 4, 4, min(target, k // BLOCK_K, 8))


def fused_tile_config_for(rows: int, n: int, group: int = BLOCK_K) -> TiledGemmConfig:
    """Choose the tile config of a fused gemm.

    64 features of gate and 64 of up a program, all of K. Up to 32 rows a fourth stage is worth 7 % of a decode
    step. Tiles of 64 rows leave room for three programs on a multiprocessor, whose last wave is fuller; those
    of 128 read weights less often. For 64, 128, 256 and 512 rows of a 7B model: 45, 74, 130 and 255 us, or from
    128 rows on 96, 137 and 239. With smaller groups, tiles of 128 rows need more shared memory than small GPUs
    have.
    """
    if n % 128:
        raise ValueError(f"weight of {n} features: gate and up in 64s wanted")
    depth = 4 if rows <= 32 else 3
    max_rows = 128 if rows > 256 and group == BLOCK_K else 64
    return TiledGemmConfig(TileConfig(2, 4, depth, 1), _tile(rows, max_rows))


def _tile(rows: int, max_rows: int) -> int:
    return max_rows if rows > 64 else max(16, power_of_two(rows))


@triton.jit
def scaled(w, zero, scale, ASM: tl.constexpr):
    """Unpack int16 of two bytes to four fp16 weights.

    zero: fp16(1024 + zero); zero and scale broadcast like w.
    """
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            SCALED_ASM,
            "=&r,=&r,=&r,=&r,r,r,r",
            [w, zero, scale],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        plain = zero.to(tl.float32) - 1024
        a = (((w & 15) - plain).to(tl.float16) * scale).to(tl.float16)
        b = ((((w >> 8) & 15) - plain).to(tl.float16) * scale).to(tl.float16)
        c = (((((w >> 4) & 15) ^ 8) - plain).to(tl.float16) * scale).to(tl.float16)
        d = (((((w >> 12) & 15) ^ 8) - plain).to(tl.float16) * scale).to(tl.float16)
    return a, b, c, d


@triton.jit
def _scaled_planes(w, zero, scale, zero_high, scale_high, ASM: tl.constexpr):
    """`scaled` with a zero and a scale for low nibbles, and others for high nibbles."""
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            PLANES_ASM,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [w, zero, scale, zero_high, scale_high],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        a, b, _, _ = scaled(w, zero, scale, ASM)
        _, _, c, d = scaled(w, zero_high, scale_high, ASM)
    return a, b, c, d


@triton.jit
def _low_half(packed):
    """The fp16 in the low half of each word."""
    return (packed & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _offset_zero(zeros, s: tl.constexpr):
    """fp16(1024 + zero) of group s: the code of a zero is the lowest bits of that number."""
    return ((zeros >> (4 * s)) & 15 | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def spread(low, high, w, GROUP: tl.constexpr):
    """Give each column of w [BN, 32] the value [BN] of its group.

    `low` in the first half, `high` in the second; groups of 64: `low` in both.
    """
    if GROUP == 64:
        return tl.broadcast_to(low[:, None], w.shape)
    else:
        first = tl.broadcast_to((tl.arange(0, 32) < 16)[None, :], w.shape)
        low = tl.broadcast_to(low[:, None], w.shape)
        return tl.where(first, low, tl.broadcast_to(high[:, None], w.shape))


@triton.jit
def scaled_groups(w, line, g, row, G: tl.constexpr, GROUP: tl.constexpr, ASM: tl.constexpr):
    """`scaled` for groups of 32 and 64.

    line: start of scales and zeros of the first row block. row: offset [BN] of a row in it.
    """
    S: tl.constexpr = 128 // GROUP
    first = tl.load(line + g * (8 * S) + row)
    zeros = tl.load(line + G * 8 * S + g * S // 8 * 16 + row) >> (g * S % 8 * 4)
    if S == 4:
        second = tl.load(line + g * (8 * S) + 16 + row)
        zero = spread(_offset_zero(zeros, 0), _offset_zero(zeros, 1), w, GROUP)
        zero_high = spread(_offset_zero(zeros, 2), _offset_zero(zeros, 3), w, GROUP)
        scale = spread(_low_half(first), _low_half(first >> 16), w, GROUP)
        scale_high = spread(_low_half(second), _low_half(second >> 16), w, GROUP)
    else:
        zero = spread(_offset_zero(zeros, 0), zeros, w, GROUP)
        zero_high = spread(_offset_zero(zeros, 1), zeros, w, GROUP)
        scale = spread(_low_half(first), first, w, GROUP)
        scale_high = spread(_low_half(first >> 16), first, w, GROUP)
    return _scaled_planes(w, zero, scale, zero_high, scale_high, ASM)


@triton.jit
def load_words(codes, run, BLOCKS: tl.constexpr, WARPS: tl.constexpr):
    """Load int16 of two bytes of a column block: [16 * BLOCKS * WARPS, 32], from offsets `run`."""
    w = tl.load(codes + run)
    w = tl.reshape(w, (BLOCKS, 2, WARPS, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(w, (0, 2, 6, 3, 1, 5, 4, 7)), (16 * BLOCKS * WARPS, 32))


@triton.jit
def scaled_block(w, scale_zeros, pointers, ASM: tl.constexpr):
    """`scaled` with one zero and scale for each row of w, at `pointers`."""
    scale_zero = tl.load(scale_zeros + pointers)
    scale = (scale_zero & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    zero = (scale_zero >> 16).to(tl.int16).to(tl.float16, bitcast=True) + 1024.0
    zero = zero.to(tl.float16)[:, None]
    scale = scale[:, None]
    return scaled(w, tl.broadcast_to(zero, w.shape), tl.broadcast_to(scale, w.shape), ASM)


@triton.jit
def landed(acc, ASM: tl.constexpr):
    """Return acc unchanged, but make Triton (3.6 to 3.9) wait for the multiplication.

    Without this use it keeps the last multiplication of an iteration in flight while the next iteration already
    overwrites the registers that hold its weights, and results are wrong now and then.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return acc


@triton.jit(do_not_specialize=["M"])
def _tiled_kernel(
    x,
    codes,
    scale_zeros,
    out,
    squares,
    eps,
    M,
    many: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCKS: tl.constexpr = many.config.shape.blocks
    TILE: tl.constexpr = many.config.rows
    WARPS: tl.constexpr = many.config.shape.warps
    G: tl.constexpr = many.K // 128
    BN: tl.constexpr = 16 * BLOCKS * WARPS
    # Row blocks of a program: contiguous, or gate and as many of up, half the weight further on.
    ASIDE: tl.constexpr = many.N // 32 if many.FUSED else WARPS
    release(PDL)
    first_block = tl.program_id(1) * (WARPS if many.FUSED else BLOCKS * WARPS)
    split = tl.program_id(2)
    n = tl.arange(0, BN)
    m = tl.program_id(0) * TILE + tl.arange(0, TILE)
    k = tl.arange(0, 32)
    i = tl.arange(0, BN * 32)
    run = i % 256 + i // 256 % WARPS * (G * 512) + i // (256 * WARPS) % 2 * 256
    run += i // (512 * WARPS) * (ASIDE * G * 512)
    # Words of scales and zeros of a row block.
    S: tl.constexpr = 128 // many.GROUP
    LINE: tl.constexpr = G * 16 if S == 1 else G * 8 * S + (G * S + 7) // 8 * 16
    scale_zero_at = n // 16 % WARPS * LINE + n // (16 * WARPS) * (ASIDE * LINE) + n % 16
    row_at = tl.minimum(m, M - 1)[None, :] * many.K + k[:, None]
    acc = tl.zeros((BN, TILE), tl.float32)
    wait(PDL)
    for g in tl.range(
        split * G // many.config.shape.splits,
        (split + 1) * G // many.config.shape.splits,
        1,
        num_stages=many.config.shape.depth,
    ):
        w = load_words(codes + (first_block * G + g) * 512, run, BLOCKS, WARPS)
        if many.GROUP == 128:
            line = scale_zeros + (first_block * G + g) * 16
            a, b, c, d = scaled_block(w, line, scale_zero_at, many.ASM)
        else:
            line = scale_zeros + first_block * LINE
            a, b, c, d = scaled_groups(w, line, g, scale_zero_at, G, many.GROUP, many.ASM)
        xg = x + g * 128 + row_at
        acc = tl.dot(a, tl.load(xg), acc)
        acc = tl.dot(b, tl.load(xg + 32), acc)
        acc = tl.dot(c, tl.load(xg + 64), acc)
        acc = landed(tl.dot(d, tl.load(xg + 96), acc), many.ASM)
    if many.NORM:
        acc = acc * inverse_rms(squares, m, m < M, eps, G)[None, :]
    if many.FUSED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, BN // 2, TILE)), (1, 2, 0)))
        v = to_half(activation(gate, many.GELU) * up)
        # columns of half a block, (quad, half, pair, h, i), or (half, quad, pair, h, i) for a weight in groups
        # of 32, in slot order: (h, half, pair, quad, i)
        if many.INTO == 32:
            v = tl.reshape(v, (WARPS // 4, 2, 4, 2, 2, 2, TILE))
            v = tl.reshape(tl.permute(v, (6, 0, 4, 1, 3, 2, 5)), (TILE, BN // 2))
        else:
            v = tl.reshape(v, (WARPS // 4, 4, 2, 2, 2, 2, TILE))
            v = tl.reshape(tl.permute(v, (6, 0, 4, 2, 3, 1, 5)), (TILE, BN // 2))
        cell = first_block * 16 + tl.arange(0, BN // 2)
        tl.store(
            out + m.to(tl.int64)[:, None] * (many.N // 2) + cell[None, :], v, mask=(m < M)[:, None]
        )
    else:
        offsets = (split * M + m).to(tl.int64)[None, :] * many.N + (first_block * 16 + n)[:, None]
        tl.store(out + offsets, acc, mask=(m < M)[None, :])


def gemm(
    rows: HalfRows,
    weight: W4,
    out: torch.Tensor | HalfRows,
    config: TiledGemmConfig,
    norm: RowNorm | None = None,
    *,
    gelu: bool = False,
) -> None:
    """Write the partial products into `out` [splits, M, N]; reference: gemm_fp16.reference.

    Into rows [M, N / 2]: act_and_mul of gate and up. Gate is the first half of the weight's features. `config`
    has two blocks and one split then. Factors are not written: this variant reads none.
    """
    m = rows.x.shape[0]
    k = weight.features_in
    n = weight.features_out
    device = weight.codes.device
    shape = config.shape
    check_slot_rows(rows, weight)
    fused = isinstance(out, HalfRows)
    if fused and (shape.blocks != 2 or shape.splits != 1 or n % (32 * shape.warps)):
        raise ValueError(f"config: two blocks and one split of {n} features wanted, {shape} given")
    target, into = check_result(rows, weight, out, shape.splits)
    squares, eps = norm_arguments(norm, m, k, target)
    shape.check(n, k, wide=True)
    gpu = traits(device)
    grid = (cdiv(m, config.rows), n // (16 * shape.blocks * shape.warps), shape.splits)
    many = ManyRows(n, k, weight.group, config, norm is not None, fused, gelu, into, gpu.asm)
    weights = (weight.codes.view(torch.int16), weight.scale_zeros)
    KernelLaunch(_tiled_kernel, grid, gpu, warps=shape.warps, registers=shape.registers).run(
        rows.x, *weights, target, squares, eps, m, many
    )
