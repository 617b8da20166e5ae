"""Device functions that the int4 gemms share: loads of packed tiles and their unpacking.

Written so that after reshape and permute the layout of the load is the layout of the matrix
operand; each inline instruction sequence has a twin in plain Triton for the interpreter (`ASM` False).
Layout: pack.py.
"""

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
    MP: int
    """Rows that the factors of x have room for."""
    GROUP: int
    """Columns that share a scale: 32, 64 or 128."""
    tile: TileConfig
    NORM: bool
    """Rows are divided by their rms."""
    ASM: bool
    """Use inline PTX, or its twin in plain Triton."""


SCALED_ASM = tl.constexpr("""{
    .reg .b32 odd, z, q;
    mov.b32 q, 0x63806380;
    shr.u32 odd, $4, 8;
    sub.rn.f16x2 z, $5, q;
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
    mul.rn.f16x2 $2, $2, $6;
    mul.rn.f16x2 $3, $3, $6;
}""")
"""Assembly: two words of packed weights, fp16(1024 + zero) and scales to four pairs of scaled fp16 weights."""

PLANES_ASM = tl.constexpr("""{
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
}""")
"""Assembly like SCALED_ASM, with a zero and a scale each for low and high nibbles."""


@triton.jit
def load_bytes(codes, block, WARPS: tl.constexpr):
    """Load one row block, `WARPS` groups from byte offset `block`: int8 [16, 64] or [WARPS, 16, 64]."""
    i = tl.arange(0, WARPS * 1024)
    if WARPS == 1:
        w = tl.load(codes + block + i, eviction_policy="evict_first")
        w = tl.permute(tl.reshape(w, (2, 8, 4, 2, 2, 4)), (4, 1, 0, 3, 2, 5))
        return tl.reshape(w, (16, 64))
    else:
        offsets = i % 512 + (i // 512) % WARPS * 1024 + i // (WARPS * 512) * 512
        w = tl.load(codes + block + offsets, eviction_policy="evict_first")
        w = tl.permute(tl.reshape(w, (2, WARPS, 8, 4, 2, 2, 4)), (1, 5, 2, 0, 4, 3, 6))
        return tl.reshape(w, (WARPS, 16, 64))


@triton.jit
def load_pairs(codes, block, WARPS: tl.constexpr):
    """Load int16 of two bytes each, like `load_bytes`: [16, 32] or [WARPS, 16, 32].

    `codes` is an int16 pointer, `block` counts int16.
    """
    i = tl.arange(0, WARPS * 512)
    if WARPS == 1:
        w = tl.load(codes + block + i, eviction_policy="evict_first")
        w = tl.permute(tl.reshape(w, (2, 8, 4, 2, 2, 2)), (4, 1, 0, 3, 2, 5))
        return tl.reshape(w, (16, 32))
    else:
        offsets = i % 256 + (i // 256) % WARPS * 512 + i // (WARPS * 256) * 256
        w = tl.load(codes + block + offsets, eviction_policy="evict_first")
        w = tl.permute(tl.reshape(w, (2, WARPS, 8, 4, 2, 2, 2)), (1, 5, 2, 0, 4, 3, 6))
        return tl.reshape(w, (WARPS, 16, 32))


@triton.jit
def load_half_bytes(codes, block, WARPS: tl.constexpr):
    """Load half a row block, `WARPS` groups from byte offset `block`: int8 [16, 32] or [WARPS, 16, 32]."""
    i = tl.arange(0, WARPS * 512)
    if WARPS == 1:
        w = tl.load(codes + block + i, eviction_policy="evict_first")
        w = tl.permute(tl.reshape(w, (8, 4, 2, 2, 4)), (3, 0, 2, 1, 4))
        return tl.reshape(w, (16, 32))
    else:
        w = tl.load(codes + block + i % 512 + i // 512 * 1024, eviction_policy="evict_first")
        w = tl.permute(tl.reshape(w, (WARPS, 8, 4, 2, 2, 4)), (0, 4, 1, 3, 2, 5))
        return tl.reshape(w, (WARPS, 16, 32))


@triton.jit
def load_half_pairs(codes, block, WARPS: tl.constexpr):
    """Load int16 of two bytes each, like `load_half_bytes`: [16, 16] or [WARPS, 16, 16]."""
    i = tl.arange(0, WARPS * 256)
    if WARPS == 1:
        w = tl.load(codes + block + i, eviction_policy="evict_first")
        w = tl.permute(tl.reshape(w, (8, 4, 2, 2, 2)), (3, 0, 2, 1, 4))
        return tl.reshape(w, (16, 16))
    else:
        w = tl.load(codes + block + i % 256 + i // 256 * 512, eviction_policy="evict_first")
        w = tl.permute(tl.reshape(w, (WARPS, 8, 4, 2, 2, 2)), (0, 4, 1, 3, 2, 5))
        return tl.reshape(w, (WARPS, 16, 16))


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


@triton.jit
def inverse_rms(squares, m, valid, eps, G: tl.constexpr):
    """Compute 1 / rms of the rows `m` from G partial sums of squares each, [M, G]. Result is fp32 like `m`."""
    j = tl.arange(0, triton.next_power_of_2(G))
    inside = valid[:, None] & (j < G)[None, :]
    parts = tl.load(squares + m[:, None] * G + j[None, :], mask=inside, other=0.0)
    return tl.rsqrt(tl.sum(parts, 1) / (G * 128) + eps)
