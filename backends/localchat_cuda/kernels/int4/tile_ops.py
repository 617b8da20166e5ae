"""Device functions that the int4 gemms share: loads of packed tiles and their unpacking.

Written so that after reshape and permute the layout of the load is the layout of the matrix
operand; each inline instruction sequence has a twin in plain Triton for the interpreter (`ASM` False).
Layout: pack.py.
"""
# mypy: disable-error-code="assignment"
# (Triton unrolls loops over tuples that grow; no type says that)

from typing import NamedTuple

import triton
import triton.language as tl

from localchat_cuda.kernels.int4.tile_config import TileConfig


class Int4FewRows(NamedTuple):
    """Constants of the gemms of 1 to 16 rows."""

    N: int
    """Output features."""
    K: int
    """Input features."""
    HALF: bool
    """x is fp16; otherwise int8 in two bytes a value."""
    MP: int
    """Rows that the factors of x have room for."""
    GROUP: int
    """Columns that share a scale: 32, 64 or 128."""
    tile: TileConfig
    NORM: bool
    """Rows are divided by their rms."""
    ASM: bool
    """Use inline PTX, or its twin in plain Triton."""


_PLANES = """{
    .reg .b32 odd, z, q;
    mov.b32 q, 0x63806380;
    shr.u32 odd, $4, 8;
    sub.rn.f16x2 z, $7, q;
    lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $1, odd, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $2, $4, 0x00f000f0, 0x54805480, 0x6a;
    lop3.b32 $3, odd, 0x00f000f0, 0x54805480, 0x6a;
    sub.rn.f16x2 $0, $0, $5;
    sub.rn.f16x2 $1, $1, $5;
    sub.rn.f16x2 $2, $2, z;
    sub.rn.f16x2 $3, $3, z;
    mul.rn.f16x2 $0, $0, $6;
    mul.rn.f16x2 $1, $1, $6;
    mul.rn.f16x2 $2, $2, $8;
    mul.rn.f16x2 $3, $3, $8;
}"""
PLANES_ASM = tl.constexpr(_PLANES)
"""Assembly: two words of packed weights to four pairs of scaled fp16 weights.

Its operands are fp16(1024 + zero) and the scale of low nibbles, then those of high nibbles."""
SCALED_ASM = tl.constexpr(_PLANES.replace("$7", "$5").replace("$8", "$6"))
"""Assembly like PLANES_ASM, with one zero and one scale for both."""


@triton.jit
def load_tile(codes, block, WARPS: tl.constexpr, N: tl.constexpr):
    """Load one row block, `WARPS` groups from element `block` on: [16, 16 * N] or [WARPS, 16, 16 * N].

    N: elements of a word, 4 of int8 or 2 of int16.
    """
    RUN: tl.constexpr = 128 * N
    i = tl.arange(0, WARPS * 2 * RUN)
    if WARPS == 1:
        w = tl.load(codes + block + i, eviction_policy="evict_first")
        w = tl.permute(tl.reshape(w, (2, 8, 4, 2, 2, N)), (4, 1, 0, 3, 2, 5))
        return tl.reshape(w, (16, 16 * N))
    else:
        offsets = i % RUN + (i // RUN) % WARPS * (2 * RUN) + i // (WARPS * RUN) * RUN
        w = tl.load(codes + block + offsets, eviction_policy="evict_first")
        w = tl.permute(tl.reshape(w, (2, WARPS, 8, 4, 2, 2, N)), (1, 5, 2, 0, 4, 3, 6))
        return tl.reshape(w, (WARPS, 16, 16 * N))


@triton.jit
def load_half_tile(codes, block, WARPS: tl.constexpr, N: tl.constexpr):
    """Load half a row block like `load_tile`: [16, 8 * N] or [WARPS, 16, 8 * N]."""
    RUN: tl.constexpr = 128 * N
    i = tl.arange(0, WARPS * RUN)
    if WARPS == 1:
        w = tl.load(codes + block + i, eviction_policy="evict_first")
        w = tl.permute(tl.reshape(w, (8, 4, 2, 2, N)), (3, 0, 2, 1, 4))
        return tl.reshape(w, (16, 8 * N))
    else:
        pointers = codes + block + i % RUN + i // RUN * (2 * RUN)
        w = tl.load(pointers, eviction_policy="evict_first")
        w = tl.permute(tl.reshape(w, (WARPS, 8, 4, 2, 2, N)), (0, 4, 1, 3, 2, 5))
        return tl.reshape(w, (WARPS, 16, 8 * N))


@triton.jit
def load_columns(x, rows, WARPS: tl.constexpr, N: tl.constexpr, HALF: tl.constexpr):
    """Load an operand of eight rows at offsets `rows` [8].

    It is as wide as `load_tile`, or with HALF as `load_half_tile`: [16 * N, 8] or [WARPS, 16 * N, 8].
    """
    WIDTH: tl.constexpr = 8 * N if HALF else 16 * N
    k = tl.arange(0, WIDTH)
    if HALF:
        k = k // (2 * N) * (4 * N) + k % (2 * N)
    if WARPS == 1:
        tile = tl.load(x + rows[:, None] + k[None, :])
        if HALF:
            tile = tl.permute(tl.reshape(tile, (8, 4, 2, N)), (2, 1, 3, 0))
        else:
            tile = tl.permute(tl.reshape(tile, (8, 4, 2, 2, N)), (2, 3, 1, 4, 0))
        return tl.reshape(tile, (WIDTH, 8))
    else:
        warp = tl.arange(0, WARPS)
        tile = tl.load(x + rows[:, None, None] + warp[None, :, None] * 128 + k[None, None, :])
        if HALF:
            tile = tl.permute(tl.reshape(tile, (8, WARPS, 4, 2, N)), (1, 3, 2, 4, 0))
        else:
            tile = tl.permute(tl.reshape(tile, (8, WARPS, 4, 2, 2, N)), (1, 3, 4, 2, 5, 0))
        return tl.reshape(tile, (WARPS, WIDTH, 8))


@triton.jit
def load_right(x, first, rows, few: tl.constexpr, N: tl.constexpr, HALF: tl.constexpr):
    """Load the right operand of the eight rows from `first` on, with `load_columns`.

    Columns past the last row repeat earlier ones, which avoids a mask. Their results are not stored.
    """
    n = (first + tl.arange(0, 8)) % rows
    return load_columns(x, n * few.K, few.tile.warps, N, HALF)


@triton.jit
def load_factors(
    factors, group, part, few: tl.constexpr, ROWS: tl.constexpr, F: tl.constexpr, S: tl.constexpr
):
    """Load one of F factors for each of ROWS rows: fp32 [ROWS] or [WARPS, ROWS].

    Those of neighbouring column blocks are S groups apart.
    """
    m = tl.arange(0, ROWS)
    if few.tile.warps == 1:
        return tl.load(factors + group * (few.MP * F) + part * (ROWS * F) + m * F)
    else:
        groups = group + tl.arange(0, few.tile.warps)[:, None] * S
        return tl.load(factors + groups * (few.MP * F) + part * (ROWS * F) + m[None, :] * F)


@triton.jit
def by_feature(v, WARPS: tl.constexpr):
    """Let v [16] or [WARPS, 16] be broadcast over rows."""
    if WARPS == 1:
        return v[:, None]
    else:
        return v[:, :, None]


@triton.jit
def by_row(v, WARPS: tl.constexpr):
    """Let v [R] or [WARPS, R] be broadcast over features."""
    if WARPS == 1:
        return v[None, :]
    else:
        return v[:, None, :]


@triton.jit
def load_scale_zeros(scale_zeros, block, WARPS: tl.constexpr):
    """Load scale and zero of 16 rows: int32 [16] or [WARPS, 16]."""
    n = tl.arange(0, 16)
    if WARPS == 1:
        return tl.load(scale_zeros + block + n)
    else:
        return tl.load(scale_zeros + block + tl.arange(0, WARPS)[:, None] * 16 + n[None, :])


@triton.jit
def scale_of(scale_zero):
    return (scale_zero & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def zero_of(scale_zero):
    return (scale_zero >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_sides(
    scale_zeros, block, column, G: tl.constexpr, GROUP: tl.constexpr, WARPS: tl.constexpr
):
    """Load words of scales and zeros of 16 rows, for groups below 128.

    Returns int32 [16] or [WARPS, 16]: scales of groups 0 and 1, of groups 2 and 3 (those of 0 and 1 again for
    groups of 64), and zeros, those of group 0 in the lowest bits.
    """
    S: tl.constexpr = 128 // GROUP
    line = scale_zeros + block * (G * 8 * S + (G * S + 7) // 8 * 16)
    n = tl.arange(0, 16)
    if WARPS == 1:
        offsets = column
    else:
        offsets = column + tl.arange(0, WARPS)[:, None]
        n = n[None, :]
    first = tl.load(line + offsets * (8 * S) + n)
    second = first
    if S == 4:
        second = tl.load(line + offsets * (8 * S) + 16 + n)
    zeros = tl.load(line + G * 8 * S + offsets * S // 8 * 16 + n) >> (offsets * S % 8 * 4)
    return first, second, zeros


@triton.jit
def load_block(
    codes,
    scale_zeros,
    block,
    column,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    SIDES: tl.constexpr,
    WARPS: tl.constexpr,
    N: tl.constexpr,
):
    """Load a row block of `WARPS` column blocks: tiles of codes, and words of scales and zeros.

    Groups of 32 have two tiles. SIDES: the words are the three of `load_sides`.
    """
    offset = block * G + column
    if GROUP == 32:
        ws = (
            load_half_tile(codes, offset * (256 * N), WARPS, N),
            load_half_tile(codes, offset * (256 * N) + 128 * N, WARPS, N),
        )
    else:
        ws = (load_tile(codes, offset * (256 * N), WARPS, N),)
    if SIDES:
        return ws, load_sides(scale_zeros, block, column, G, GROUP, WARPS)
    else:
        return ws, (load_scale_zeros(scale_zeros, offset * 16, WARPS),)


@triton.jit
def side_scale(first, second, s: tl.constexpr):
    """Extract the scale of group `s` of a column block as fp32."""
    packed = first if s < 2 else second
    return scale_of(packed) if s % 2 == 0 else zero_of(packed)


@triton.jit
def side_zero(zeros, s: tl.constexpr):
    """Extract the zero of group `s` of a column block as int32."""
    return (zeros >> (4 * s)) & 15


@triton.jit
def nibbles(w, ASM: tl.constexpr):
    """Unpack int8 to (code of k, 16 * (code of k+64 - 8)), both int8: two operations for eight weights."""
    if ASM:
        low, high = tl.inline_asm_elementwise(
            "and.b32 $0, $2, 0x0f0f0f0f; and.b32 $1, $2, 0xf0f0f0f0;",
            "=&r,=r,r",
            [w],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    else:
        low = w & 0xF
        high = w - low
    return low, high


@triton.jit
def halves(w, ASM: tl.constexpr):
    """Unpack int16 of two bytes to four fp16: 1024 + code of each byte's k, then 64 + code of its k+64.

    Five operations for eight weights.
    """
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 odd;
            shr.u32 odd, $4, 8;
            lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 $1, odd, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 $2, $4, 0x00f000f0, 0x54805480, 0x6a;
            lop3.b32 $3, odd, 0x00f000f0, 0x54805480, 0x6a;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [w],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        a = ((w & 15) + 1024).to(tl.float16)
        b = (((w >> 8) & 15) + 1024).to(tl.float16)
        c = ((((w >> 4) & 15) ^ 8) + 64).to(tl.float16)
        d = ((((w >> 12) & 15) ^ 8) + 64).to(tl.float16)
    return a, b, c, d
