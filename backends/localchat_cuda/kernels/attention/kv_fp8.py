"""FP8 KV cache: layout in the pages, encoding and decoding inside kernels.

Letters as in rope.py. A key (or a value) of one token and head is D numbers in e4m3 (4 bits of
exponent, 3 of mantissa, at most 448) and one shared exponent, chosen so that the largest number lies
between 224 and 448. Keys reach hundreds in models with biases, so a single scale for all would
clip them; scaling by a power of two is exact.

    k, v       int16 [pages, J, P, D/2]: word i holds element i in its low byte and element i + D/2
               in its high byte, so that a reader of a word gets one number of each half, in place
    exponents  uint8 [pages, J, P, 2], of the key and of the value: 127 + e, and 255 where a number
               was infinite or NaN

Attention multiplies the e4m3 numbers unscaled: the key's factor is applied to the logit, the value's
to the weight, as a term of its exponent. `decode` converts words to fp16 with one of three decoders:

    PLAIN      integer operations; for the interpreter
    BITS       the same in PTX for two words at once, 7 instructions for 4 numbers, below sm_89; as
               with PLAIN the numbers come out divided by 256, which `factors` corrects
    CONVERTED  the conversion instruction of sm_89 and later, 3 instructions for 4 numbers

e4m3: Micikevicius et al., 2022; a shared power of two as in the OCP's microscaling formats, 2023;
an FP8 cache with its scales folded into attention as in vLLM and FlashInfer.
"""

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.launch import require, traits

PLAIN, BITS, CONVERTED = 1, 2, 3
"""Decoders of `decode`; 0 stands for pages that are not FP8."""
LEAST = tl.constexpr(87)
"""Smallest exponent written, 2^-40: smaller numbers, times 2^-9, do not affect attention."""
NONE = tl.constexpr(255)
INFINITE = tl.constexpr(0x7F800000)


def encode_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode x [..., D] with torch's own e4m3: words int16 [..., D/2], exponents uint8 [...]."""
    x = x.float()
    most = x.abs().amax(-1)
    fraction, power = torch.frexp(most)  # most = fraction * 2^power, fraction in [0.5, 1)
    power = power.int() - torch.where(fraction <= 0.875, 9, 8) + 127
    power = torch.where(most > 0, power, 0).clamp(min=LEAST.value)
    finer = torch.ldexp(torch.ones_like(most), 127 - power)
    codes = (x * finer[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    words = torch.stack(codes.chunk(2, -1), -1).contiguous().view(torch.int16).squeeze(-1)
    return words, torch.where(most.isfinite(), power, NONE.value).to(torch.uint8)


def decode_reference(words: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Decode words [..., D/2] and exponents [...] to fp32 [..., D]."""
    codes = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 2))
    numbers = codes.view(torch.float8_e4m3fn).float().transpose(-1, -2).flatten(-2)
    factor = torch.ldexp(torch.ones(exponents.shape, device=words.device), exponents.int() - 127)
    found: torch.Tensor = (
        numbers * torch.where(exponents == NONE.value, torch.nan, factor)[..., None]
    )
    return found


@triton.jit
def _code(x):
    """Round fp32 of at most 448 to e4m3 in int32, to nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # an odd bit above the rounded part rounds a tie up; exponents of fp32 begin 120 below those of e4m3
    normal = ((size + 0x7FFFF + (size >> 20 & 1)) >> 20) - (120 << 3)
    # added to 2^14 an fp32 has a resolution of 2^-9, as e4m3 has below 2^-6
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) & 15
    return tl.where(size < 0x3C800000, small, normal) | (bits >> 24 & 0x80)


@triton.jit
def encode(a, b):
    """Encode two halves of a head, fp32 [D/2]: (e4m3 of each in int32, exponent int32)."""
    # as integers the numbers keep their order, with infinity above them and NaN above infinity
    sizes = tl.maximum(
        a.to(tl.int32, bitcast=True) & 0x7FFFFFFF, b.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    )
    most = tl.minimum(tl.max(sizes, 0), INFINITE)
    # 448 is 1.75 * 2^8: a larger fraction carries into the exponent
    exponent = tl.maximum(((most + 0x1FFFFF) >> 23) - 8, LEAST)
    finer = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    exponent = tl.where(most == INFINITE, NONE, exponent)
    return _code(a * finer) & 0xFF, _code(b * finer) & 0xFF, exponent


@triton.jit
def put(out, a, b, low, high, inside, D: tl.constexpr, R: tl.constexpr):
    """Write the bytes of columns `low` and `high` into the row of words at `out`.

    They share words unless only R of the columns are rotated, in pairs of their own.
    """
    if R == D:
        tl.store(out + low, (a | b << 8).to(tl.int16), mask=inside)
    else:
        row = out.to(tl.pointer_type(tl.uint8), bitcast=True)
        low = tl.where(low < D // 2, low * 2, (low - D // 2) * 2 + 1)
        high = tl.where(high < D // 2, high * 2, (high - D // 2) * 2 + 1)
        tl.store(row + low, a.to(tl.uint8), mask=inside)
        tl.store(row + high, b.to(tl.uint8), mask=inside)


@triton.jit
def decode(words, DECODER: tl.constexpr):
    """Convert int16 words to fp16: numbers of the low bytes, numbers of the high bytes. See `factors`."""
    if DECODER == 3:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 a, b;
            prmt.b32 sorted, $2, $2, 0x3120;
            mov.b32 {a, b}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, a;
            cvt.rn.f16x2.e4m3x2 $1, b;
            }""",
            "=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif DECODER == 2:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 sign, size;
            shl.b32 sign, $2, 8;
            shl.b32 size, $2, 7;
            and.b32 sign, sign, 0x80008000;
            lop3.b32 $0, size, 0x3f803f80, sign, 0xea;
            and.b32 sign, $2, 0x80008000;
            shr.u32 size, $2, 1;
            lop3.b32 $1, size, 0x3f803f80, sign, 0xea;
            }""",
            "=&r,=&r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low = ((words & 0x80) << 8 | (words & 0x7F) << 7).to(tl.int16)
        high = (words & -32768 | (words & 0x7F00) >> 1).to(tl.int16)
        low = low.to(tl.float16, bitcast=True)
        high = high.to(tl.float16, bitcast=True)
    return low, high


@triton.jit
def factors(marks, DECODER: tl.constexpr):
    """Unpack two exponents per int32: factor of decoded keys, log2 of that of decoded values.

    fp32; NaN where the encoded numbers were not finite.
    """
    SHIFT: tl.constexpr = 0 if DECODER == 3 else 8
    key = marks & 255
    value = marks >> 8 & 255
    factor = ((key + SHIFT) << 23).to(tl.float32, bitcast=True)
    lift = (value - (127 - SHIFT)).to(tl.float32)
    none = float("nan")
    return tl.where(key == NONE, none, factor), tl.where(value == NONE, none, lift)


def decoder_of(device: torch.device) -> int:
    """Choose the decoder of a device."""
    gpu = traits(device)
    if not gpu.asm:
        return PLAIN
    return CONVERTED if gpu.fp8 else BITS


def require_exponents(exponents: torch.Tensor, pages: torch.Tensor, device: torch.device) -> None:
    """Raise ValueError unless `exponents` fit FP8 `pages` [pages, J, P, D/2]."""
    count, heads, page, _ = pages.shape
    require("exponents", exponents, (count, heads, page, 2), (torch.uint8,), device)
