"""Keys and values of 8 bits: how they lie in the pages, how kernels write them and read them.

Letters as in rope.py. A key (or a value) of one token and head is D numbers in e4m3 (4 bits of
exponent, 3 of mantissa, at most 448) and one exponent for all of them, chosen so that the largest
comes to lie between 224 and 448. Keys reach hundreds where a model has biases, so that one scale
for all would cut them off; a power of two loses nothing.

    k, v       int16 [pages, J, P, D/2]: word i holds element i in its low byte and element i + D/2
               in its high one, so that what reads a word has one number of either half, in place
    exponents  uint8 [pages, J, P, 2], of the key and of the value: 127 + e, and 255 where a number
               was infinite or none

Attention multiplies with the codes as they are: the key's factor goes into the logit, the value's
into the weight, as a term of its exponent. `decode` turns words into fp16 in one of three ways:

    PLAIN      integers; for the interpreter
    BITS       the same in PTX for two words at once, 7 instructions for 4 numbers, below sm_89; as
               PLAIN it leaves numbers divided by 256, which `factors` makes good
    CONVERTED  the conversion that sm_89 and later have, 3 instructions for 4 numbers

e4m3: Micikevicius et al., 2022; a shared power of two as in the OCP's microscaling formats, 2023;
an FP8 cache with its scales folded into attention as in vLLM and FlashInfer.
"""

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.launch import require, traits

PLAIN, BITS, CONVERTED = 1, 2, 3
"""Ways of `decode`; 0 stands for pages of plain numbers."""
LEAST = tl.constexpr(87)
"""Smallest exponent written, 2^-40: what is smaller than that times 2^-9 is nothing to attention."""
NONE = tl.constexpr(255)
INFINITE = tl.constexpr(0x7F800000)


def encode_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(words int16 [..., D/2], exponents uint8 [...]) of x [..., D], by torch's own e4m3."""
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
    """Numbers fp32 [..., D] of words [..., D/2] and exponents [...]."""
    codes = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 2))
    numbers = codes.view(torch.float8_e4m3fn).float().transpose(-1, -2).flatten(-2)
    factor = torch.ldexp(torch.ones(exponents.shape, device=words.device), exponents.int() - 127)
    found: torch.Tensor = (
        numbers * torch.where(exponents == NONE.value, torch.nan, factor)[..., None]
    )
    return found


@triton.jit
def _code(x):
    """fp32 of at most 448 -> e4m3 in int32, rounded to nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # an odd bit above the cut rounds a tie up; exponents of fp32 begin 120 below those of e4m3
    normal = ((size + 0x7FFFF + (size >> 20 & 1)) >> 20) - (120 << 3)
    # beside 2^14 an fp32 has steps of 2^-9, as e4m3 has below 2^-6
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) & 15
    return tl.where(size < 0x3C800000, small, normal) | (bits >> 24 & 0x80)


@triton.jit
def encode(a, b):
    """Two halves of a head, fp32 [D/2] -> (codes of either in int32, exponent int32)."""
    # as integers numbers lie in their order, infinity above them, and what is no number above that
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
    """Write the codes of columns `low` and `high` into the row of words at `out`. They share words
    unless a part of the columns alone, R of them, is rotated in pairs of its own."""
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
    """int16 words -> numbers fp16 of the low bytes, and of the high ones. See `factors`."""
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
    """int32 holding two exponents -> what decoded keys are multiplied by, and the log2 of what
    decoded values are, fp32; no numbers where those were none."""
    SHIFT: tl.constexpr = 0 if DECODER == 3 else 8
    key = marks & 255
    value = marks >> 8 & 255
    factor = ((key + SHIFT) << 23).to(tl.float32, bitcast=True)
    lift = (value - (127 - SHIFT)).to(tl.float32)
    none = float("nan")
    return tl.where(key == NONE, none, factor), tl.where(value == NONE, none, lift)


def decoder_of(device: torch.device) -> int:
    """How a device decodes."""
    gpu = traits(device)
    if not gpu.asm:
        return PLAIN
    return CONVERTED if gpu.fp8 else BITS


def require_exponents(exponents: torch.Tensor, pages: torch.Tensor, device: torch.device) -> None:
    """ValueError unless they are those of codes `pages` [pages, J, P, D/2]."""
    count, heads, page, _ = pages.shape
    require("exponents", exponents, (count, heads, page, 2), (torch.uint8,), device)
