"""Decodes 8-bit weights to fp16 or bf16 inside kernels, exactly.

A code (pack.py) is a sign bit and seven others. Two of them, each spread with its sign into 16 bits by one
byte permutation, become fp16 or bf16 together:

    e4m3    shift the seven bits to the positions of exponent and mantissa, clear the copies of the sign
    between,
            and multiply by 2^8 (fp16) or 2^120 (bf16), the difference of the exponents' biases: subnormal
            numbers come out right as well
    whole   set the exponent of 1024 (fp16) or 128 (bf16), so that the seven bits are its last digits, and
            subtract the same number with the same sign

Seven or eight operations for four codes. MXFP8 in bf16 takes no more, because its power of two is part of the
factor. GPUs from compute capability 8.9 on convert e4m3 to fp16 themselves, two by one operation; to bf16 they
would go through fp32, slower than this. The shift and multiplication for e4m3 is Marlin's; sign-and-magnitude
codes for whole numbers are our own.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from localchat_cuda.kernels.fp8_int8.pack import W8

PLAIN = 0
PACKED = 1
NATIVE = 2
"""Decoders: operations of any device (in the interpreter too), PTX for two codes at once, conversion
instructions."""

_E4M3_FP16 = (
    "shl.b32 a, a, 7; and.b32 a, a, 0xbf80bf80; mov.b32 b, 0x5c005c00; mul.rn.f16x2 {0}, a, b;"
)
_E4M3_BF16 = (
    "shl.b32 a, a, 4; and.b32 a, a, 0x87f087f0; mov.b32 b, 0x7b807b80; mov.b32 c, 0x80008000;"
    "fma.rn.bf16x2 {0}, a, b, c;"
)
_MX_BF16 = "shl.b32 a, a, 4; and.b32 a, a, 0x87f087f0; mov.b32 c, 0x80008000; fma.rn.bf16x2 {0}, a, {1}, c;"
_WHOLE_FP16 = (
    "lop3.b32 b, a, 0x807f807f, 0x64006400, 0xea; lop3.b32 a, a, 0x80008000, 0xe400e400, 0x6a;"
    "add.rn.f16x2 {0}, b, a;"
)
_WHOLE_BF16 = (
    "lop3.b32 b, a, 0x807f807f, 0x43004300, 0xea; lop3.b32 a, a, 0x80008000, 0xc300c300, 0x6a;"
    "mov.b32 c, 0x3f803f80; fma.rn.bf16x2 {0}, b, c, a;"
)


class W8Shape(NamedTuple):
    """Constants of a weight. For the letters see pack.py."""

    N: int
    K: int
    SHARED: bool
    """Blocks of 128 x 128 share a scale."""
    WHOLE: bool
    DECODER: int
    MX: bool = False
    """32 columns of a row share a power of two."""

    @staticmethod
    def of(weight: W8, decoder: int) -> "W8Shape":
        n, k = weight.codes.shape
        return W8Shape(n, k, weight.blocks, weight.whole, decoder, weight.mx)


def _four(body: str) -> str:
    low = body.replace("{0}", "$0")
    high = body.replace("{0}", "$1")
    return f"{{ .reg .b32 a, b, c; prmt.b32 a, $2, 0, 0x9180; {low} prmt.b32 a, $2, 0, 0xb3a2; {high} }}"


def _two(body: str) -> str:
    return (
        "{ .reg .b32 a, b, c; cvt.u32.u16 a, $1; prmt.b32 a, a, 0, 0x9180; "
        + body.replace("{0}", "$0")
        + " }"
    )


E4M3_FP16_FOUR = tl.constexpr(_four(_E4M3_FP16))
E4M3_BF16_FOUR = tl.constexpr(_four(_E4M3_BF16))
WHOLE_FP16_FOUR = tl.constexpr(_four(_WHOLE_FP16))
WHOLE_BF16_FOUR = tl.constexpr(_four(_WHOLE_BF16))
E4M3_FP16_TWO = tl.constexpr(_two(_E4M3_FP16))
E4M3_BF16_TWO = tl.constexpr(_two(_E4M3_BF16))
WHOLE_FP16_TWO = tl.constexpr(_two(_WHOLE_FP16))
WHOLE_BF16_TWO = tl.constexpr(_two(_WHOLE_BF16))
# The factors of all codes follow the codes, and are equal.
MX_BF16_FOUR = tl.constexpr(_four(_MX_BF16.replace("{1}", "$3")))
MX_BF16_TWO = tl.constexpr(_two(_MX_BF16.replace("{1}", "$2")))


@triton.jit
def power(words, group):
    """Convert exponent `group`, 0 to 3, of int32 words to fp32. 2^-127 becomes 0."""
    return (((words >> (8 * group)) & 255) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _fp16(w, FOUR: tl.constexpr, ASM: tl.constexpr):
    if FOUR:
        return tl.inline_asm_elementwise(
            ASM, "=&r,=&r,r", [w], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        return tl.inline_asm_elementwise(ASM, "=r,h", [w], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _bf16(w, FOUR: tl.constexpr, ASM: tl.constexpr):
    if FOUR:
        return tl.inline_asm_elementwise(
            ASM, "=&r,=&r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        return tl.inline_asm_elementwise(ASM, "=r,h", [w], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def _plain(w, like, WHOLE: tl.constexpr):
    bits = w.to(tl.int32)
    if WHOLE:
        value = tl.where(bits >= 128, 128 - bits, bits).to(tl.float32)
    else:
        half = ((bits & 128) << 8) | ((bits & 127) << 7)
        value = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return value.to(like)


@triton.jit
def decode(w, like, WHOLE: tl.constexpr, DECODER: tl.constexpr, FOUR: tl.constexpr):
    """Decode uint8 codes to the dtype `like` (fp16 or bf16; in the interpreter also fp32).

    FOUR: a thread holds codes in fours, as loads of 16 bytes leave them; else in twos, as an operand in shared
    memory does.
    """
    if DECODER == 0:
        return _plain(w, like, WHOLE)
    elif DECODER == 2 and not WHOLE and like == tl.float16:
        return w.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif like == tl.float16:
        if FOUR:
            return _fp16(w, True, WHOLE_FP16_FOUR if WHOLE else E4M3_FP16_FOUR)
        else:
            return _fp16(w, False, WHOLE_FP16_TWO if WHOLE else E4M3_FP16_TWO)
    else:
        if FOUR:
            return _bf16(w, True, WHOLE_BF16_FOUR if WHOLE else E4M3_BF16_FOUR)
        else:
            return _bf16(w, False, WHOLE_BF16_TWO if WHOLE else E4M3_BF16_TWO)


@triton.jit
def mx_factor(exponents):
    """Return the factors of `decode_mx` for exponents of MXFP8, in int32.

    A factor is 2^120 times the power of two in bf16, twice. Larger powers than 2^7 do not fit (pack.MX_MOST).
    """
    field = (exponents + 120) << 7
    return field | (field << 16)


@triton.jit
def decode_mx(w, factors, like, DECODER: tl.constexpr, FOUR: tl.constexpr):
    """Decode codes of MXFP8, times their power of two, exactly. `factors`: for each code, from `mx_factor`.

    `like`: bf16, or fp32 in the interpreter. FOUR: as for `decode`. Codes that are decoded together share a
    factor.
    """
    if DECODER == 0:
        power_of_two = ((factors & 0xFFFF) - (120 << 7)) << 16
        value = _plain(w, tl.float32, False) * power_of_two.to(tl.float32, bitcast=True)
        return value.to(like)
    elif FOUR:
        return tl.inline_asm_elementwise(
            MX_BF16_FOUR,
            "=&r,=&r,r,r,r,r,r",
            [w, factors],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        return tl.inline_asm_elementwise(
            MX_BF16_TWO, "=r,h,r,r", [w, factors], dtype=tl.bfloat16, is_pure=True, pack=2
        )
