"""Device functions shared by the gemms with ggml's block formats: decoding of codes.

Layout: pack.py. Four codes stay in one register from the load to the operand of `mma`, so decoding takes one to
four operations for four weights; each inline instruction has a twin in plain Triton for the interpreter (`ASM`
False).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.ggml.pack import GgmlTensor
from localchat_cuda.kernels.launch import Traits


class Form(NamedTuple):
    """Constants of the kernels for a number format."""

    GROUP: int
    """Columns that share a scale: 16 or 32."""
    LOW: int
    HIGH: int
    """Bits of a code in either plane."""
    WORDS: int
    """Words of sides for a row and half a column block."""
    SHIFT: int
    """Codes are decoded to their multiples by 2 ** SHIFT."""
    FACTORS: bool
    MINIMUM: bool
    TABLE: bool
    FLOATS: bool
    """Flags of GgmlForm."""
    ASM: bool
    """Use inline PTX, or its twin in plain Triton."""


class Planes(NamedTuple):
    """Tensors of a weight. Another stands for one that the format lacks."""

    low: torch.Tensor
    high: torch.Tensor
    sides: torch.Tensor
    scales: torch.Tensor


def form_of(weight: GgmlTensor, gpu: Traits) -> Form:
    """Return the constants of the weight's number format."""
    form = weight.form
    low, high = form.planes
    shift = 8 - form.bits if form.offset else 0
    if form.floats:
        shift = 2
    words = weight.sides.shape[2]
    flags = (form.factors, form.minimum, form.table, form.floats)
    return Form(form.group, low, high, words, shift, *flags, gpu.asm)


def planes(weight: GgmlTensor) -> Planes:
    """Return the tensors of the weight."""
    return Planes(
        weight.low,
        weight.low if weight.high is None else weight.high,
        weight.sides,
        weight.sides if weight.scales is None else weight.scales,
    )


@triton.jit
def field(low, high, group: tl.constexpr, skip, form: tl.constexpr):
    """Decode the codes of one group of 32 columns from bytes of both planes: int8, times 2 ** SHIFT.

    skip: bits of `high` before those of group 0, or None."""
    f: tl.constexpr = group % (8 // form.LOW) * form.LOW
    if form.LOW == 8:
        return low
    if form.FLOATS:
        return _floats(low, f // 4, form.ASM)
    if form.ASM:
        if form.TABLE:
            return _table_asm(low, f)
        turn = tl.full(low.shape, (form.SHIFT - f) % 32, tl.int8)
        kept: tl.constexpr = (((1 << form.LOW) - 1) << form.SHIFT) + 128
        mask = tl.full(low.shape, kept % 256 - 128, tl.int8)
        if not form.HIGH:
            return tl.inline_asm_elementwise(
                "{.reg .b32 t; shf.l.wrap.b32 t, $1, $1, $2; and.b32 $0, t, $3;}",
                "=r,r,r,r",
                [low, turn, mask],
                dtype=tl.int8,
                is_pure=True,
                pack=4,
            )
        else:
            g: tl.constexpr = group % (8 // form.HIGH) * form.HIGH
            turn_high = tl.full(low.shape, (form.SHIFT + form.LOW - g) % 32, tl.int8)
            if skip is not None:
                turn_high -= skip.to(tl.int8)
            kept_high: tl.constexpr = (((1 << form.HIGH) - 1) << (form.SHIFT + form.LOW)) + 128
            mask_high = tl.full(low.shape, kept_high % 256 - 128, tl.int8)
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 t, u;
                shf.l.wrap.b32 t, $1, $1, $2;
                and.b32 t, t, $3;
                shf.l.wrap.b32 u, $4, $4, $5;
                lop3.b32 $0, u, $6, t, 0xea;
                }""",
                "=r,r,r,r,r,r,r",
                [low, turn, mask, high, turn_high, mask_high],
                dtype=tl.int8,
                is_pure=True,
                pack=4,
            )
    else:
        code = (low.to(tl.int32) >> f) & ((1 << form.LOW) - 1)
        if form.HIGH:
            top: tl.constexpr = group % (8 // form.HIGH) * form.HIGH
            above = high.to(tl.int32) >> top
            if skip is not None:
                above = above >> skip
            code |= (above & ((1 << form.HIGH) - 1)) << form.LOW
        if form.TABLE:
            # -127 -104 -83 -65 -49 -35 -22 -10, and 1 13 25 38 53 69 89 113, as in pack.TABLE
            lower = tl.full(code.shape, 0xF6EADDCFBFAD9881 - (1 << 64), tl.int64)
            upper = tl.full(code.shape, 0x7159453526190D01, tl.int64)
            return (tl.where(code < 8, lower, upper) >> (code % 8 * 8).to(tl.int64)).to(tl.int8)
        else:
            return (code << form.SHIFT).to(tl.int8)


@triton.jit
def _floats(low, part: tl.constexpr, ASM: tl.constexpr):
    """Return four times the e2m1 values of one half of the bits of each register.

    A byte permutation replicates the sign of a table's byte, which is 0, for selectors above 7. So one looks up
    the codes without the sign bit and one those with it, and both results may be united.
    """
    if ASM:
        turn = tl.full(low.shape, 16 * part, tl.int8)
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, u, a, b;
            shf.r.wrap.b32 t, $1, $1, $2;
            xor.b32 u, t, 0x8888;
            prmt.b32 a, 0x03020100, 0x0c080604, t;
            prmt.b32 b, 0x7d7e7f00, 0x74787a7c, u;
            or.b32 a, a, b;
            shl.b32 $0, a, 1;
            }""",
            "=r,r,r",
            [low, turn],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    else:
        halves = tl.permute(tl.reshape(low.to(tl.int32), (low.numel // 4, 2, 2)), (0, 2, 1))
        first, second = tl.split(halves)
        own = second if part else first
        code = tl.reshape(tl.join(own & 15, (own >> 4) & 15), low.shape)
        # Twice the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6, a byte each.
        table = tl.full(code.shape, 0x0C08060403020100, tl.int64)
        double = ((table >> (code % 8 * 8).to(tl.int64)) & 255).to(tl.int32)
        return (tl.where(code > 7, -double, double) * 2).to(tl.int8)


@triton.jit
def e4m3_number(code):
    """Convert unsigned e4m3 codes in int32 to fp32, times 2^-8."""
    # Shifted, a code is an fp16 number whose exponent has another bias. This includes subnormal numbers.
    return (code << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def row_numbers(scales, tile, tiles, COUNT: tl.constexpr):
    """Load the numbers of the rows of COUNT row tiles, times the 2^8 of `e4m3_number`."""
    row = tl.arange(0, 16 * COUNT)
    return tl.load(scales + tl.minimum(tile + row // 16, tiles - 1) * 16 + row % 16) * 256.0


@triton.jit
def _table_asm(low, f: tl.constexpr):
    """Values of pack.TABLE for four nibbles: bytes chosen by their three lower bits, then by the fourth."""
    shift = tl.full(low.shape, f, tl.int8)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 t, u, a, b, p;
        shf.r.wrap.b32 t, $1, $1, $2;
        and.b32 t, t, 0x0f0f0f0f;
        shr.u32 u, t, 4;
        or.b32 t, t, u;
        prmt.b32 t, t, 0, 0x4420;
        and.b32 u, t, 0x7777;
        prmt.b32 a, 0xbfad9881, 0xf6eaddcf, u;
        prmt.b32 b, 0x26190d01, 0x71594535, u;
        shr.u32 p, t, 1;
        and.b32 p, p, 0x4444;
        or.b32 p, p, 0x3210;
        prmt.b32 $0, a, b, p;
        }""",
        "=r,r,r",
        [low, shift],
        dtype=tl.int8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def byte(packed, index: tl.constexpr, ASM: tl.constexpr):
    """Extract byte `index` of int32 words as a signed number."""
    if ASM:  # a selector of 8 and more repeats the sign
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, $2;",
            "=r,r,n",
            [packed, 0x8880 + index * 0x1111],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return (packed << (24 - 8 * index)) >> 24


@triton.jit
def byte_of(packed, index, ASM: tl.constexpr):
    """Extract a byte like `byte`, with an `index` from 0 to 3 per element. Shapes are broadcast."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, $2;",
            "=r,r,r",
            [packed, 0x8880 + index * 0x1111],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return (packed << (24 - 8 * index)) >> 24


@triton.jit
def half(packed, index: tl.constexpr):
    """Extract half `index` of int32 words as fp32."""
    return half_bits(packed, index).to(tl.float32)


@triton.jit
def half_bits(packed, index: tl.constexpr):
    """Extract half `index` of int32 words as fp16."""
    return (packed >> (16 * index)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def half_of(packed, first: tl.constexpr, index, ASM: tl.constexpr):
    """Return the half `first + index` of int64 words [W, R] as fp32 [W, R, P]. `index` is [1, 1, P]."""
    low = four_numbers(packed, 0)[:, :, None]
    high = four_numbers(packed, 1)[:, :, None]
    if ASM:
        result = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [low, high, (first + index) * 0x22 + 0x10],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        result = tl.where(first + index < 2, low, high) >> ((first + index) % 2 * 16)
    return half(result, 0)


@triton.jit
def four_numbers(packed, upper: tl.constexpr):
    """Half of words int64, or the words int32, as int32."""
    if packed.dtype == tl.int64:
        return (packed >> 32).to(tl.int32) if upper else packed.to(tl.int32)
    else:
        return packed


@triton.jit
def scaled(codes, scale, minimum, form: tl.constexpr):
    """Compute code * scale - minimum in fp16 from int8 codes times 2 ** SHIFT. All are [R, 32]."""
    if form.ASM:
        # 0x6480 is 1152: 1024, whose last bits count ones, and 128 that makes a signed byte positive
        shrink = tl.full(codes.shape, 1.0 / (1 << form.SHIFT), tl.float16)
        offset = tl.full(codes.shape, -1152.0 / (1 << form.SHIFT), tl.float16)
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, a, b;
            xor.b32 t, $2, 0x80808080;
            prmt.b32 a, t, 0x64646464, 0x4140;
            prmt.b32 b, t, 0x64646464, 0x4342;
            fma.rn.f16x2 a, a, $7, $9;
            fma.rn.f16x2 b, b, $8, $10;
            neg.f16x2 t, $5;
            fma.rn.f16x2 $0, a, $3, t;
            neg.f16x2 t, $6;
            fma.rn.f16x2 $1, b, $4, t;
            }""",
            "=&r,=&r,r,r,r,r,r,r,r,r,r",
            [codes, scale, minimum, shrink, offset],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        exact = codes.to(tl.float32) * (1.0 / (1 << form.SHIFT))
        return (exact * scale.to(tl.float32) - minimum.to(tl.float32)).to(tl.float16)
