"""Floating 4-bit weights (MXFP4): e2m1 codes in groups of 32, which share a power of two (e8m0).

A `W4` holds them in its order for groups of 32 (pack.py), with other bits: of the four codes in 16 bits, sign
and magnitude stand where one AND, or shifts of both, make them an fp16 of 2^-14 of their value.

    bits of 16       15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    byte 0, k         s           e  e  m
    byte 1, k                  s           e  e  m
    byte 0, k + 64       s                          e  e  m
    byte 1, k + 64          s                                e  e  m

    scale_zeros  int32 [T, G, 16]: exponents of a row's four groups (biased by 127), first in the lowest byte

OCP Microscaling Formats 1.0 (2023); the order of bits is our own.
"""

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.int4.gemm_tiled import spread
from localchat_cuda.kernels.int4.pack import BLOCK_K, ROWS, W4, pack, side_shape, unpack

GROUP = 32
LARGEST_EXPONENT = 128
"""Stored form of a scale of 2: tiles of many rows hold weights in fp16, with factors up to 2^15."""
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of codes 0 to 7; bit 3 is the sign."""
_SIGNS = (15, 12, 14, 13)
_MAGNITUDES = (9, 6, 3, 0)
"""Places of the lowest bits of the four codes in 16 bits."""


def pack_floats(codes: torch.Tensor, exponents: torch.Tensor) -> W4:
    """Pack codes [N, K] (0..15) and exponents uint8 [N, K / 32]. Columns are padded to 128.

    ValueError if N is no multiple of 16, or a scale is beyond 2.
    """
    n, k = codes.shape
    if k % GROUP or tuple(exponents.shape) != (n, k // GROUP):
        raise ValueError(f"exponents: one for each 32 of {k} columns in {n} rows wanted")
    if not exponents.is_meta and bool((exponents > LARGEST_EXPONENT).any()):
        raise ValueError("exponents: scales up to 2 wanted")
    missing = -k % BLOCK_K
    codes = torch.nn.functional.pad(codes, (0, missing))
    words = torch.nn.functional.pad(exponents, (0, missing // GROUP)).to(torch.int32)
    sides = torch.zeros(n, codes.shape[1] // GROUP, device=codes.device)
    plain = pack(codes, sides, sides)
    four = _four(plain.codes)
    bits = sum(
        ((code >> 3) << sign) | ((code & 7) << low)
        for code, sign, low in zip(four, _SIGNS, _MAGNITUDES, strict=True)
    )
    assert isinstance(bits, torch.Tensor)
    stored = bits.to(torch.int16).view(torch.int8).view(plain.codes.shape)
    shifts = 8 * torch.arange(4, dtype=torch.int32, device=codes.device)
    words = (words.view(n // ROWS, ROWS, -1, 4) << shifts).sum(-1, dtype=torch.int32)
    return W4(stored, words.transpose(1, 2).contiguous(), group=GROUP, e2m1=True)


def _four(codes: torch.Tensor) -> list[torch.Tensor]:
    """Return the codes of bytes 0 and 1 of each 16 bits, then those of k + 64.

    Codes are integers in pack's order.
    """
    both = codes.view(torch.uint8).view(*codes.shape[:-1], -1, 2).to(torch.int32)
    low = both & 15
    high = (both >> 4) ^ 8
    return [low[..., 0], low[..., 1], high[..., 0], high[..., 1]]


def dense(weight: W4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the weight [N, K] in floating point, padded columns included: the reference of every gemm."""
    bits = weight.codes.view(torch.int16).to(torch.int32)
    four = [
        ((bits >> sign & 1) << 3) | (bits >> low & 7)
        for sign, low in zip(_SIGNS, _MAGNITUDES, strict=True)
    ]
    low = torch.stack(four[:2], -1)
    high = torch.stack(four[2:], -1)
    codes = (low | ((high ^ 8) << 4)).to(torch.uint8).view(weight.codes.shape).view(torch.int8)
    n = weight.features_out
    k = weight.features_in
    sides = torch.zeros(side_shape(n, k, GROUP), dtype=torch.int32, device=codes.device)
    fields = unpack(W4(codes, sides, group=GROUP))[0].long()
    values = torch.tensor(VALUES, device=codes.device)
    values = torch.where(fields > 7, -1.0, 1.0) * values[fields & 7]
    shifts = 8 * torch.arange(4, dtype=torch.int32, device=codes.device)
    exponents = (weight.scale_zeros.transpose(1, 2)[..., None] >> shifts) & 255
    scales = torch.exp2(exponents.reshape(n, k // GROUP).float() - 127)
    return (values * scales.repeat_interleave(GROUP, 1)).to(dtype)


@triton.jit
def float_halves(w, ASM: tl.constexpr):
    """Unpack int16 of four codes to four fp16, 2^-14 of their values: k of each byte, then its k+64.

    Nine operations for eight weights: a multiplication shifts sign and magnitude by different amounts, and the
    bits that it adds never meet.
    """
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            and.b32 $0, $4, 0x8e008e00;
            shl.b32 t, $4, 3;
            and.b32 $1, t, 0x8e008e00;
            and.b32 t, $4, 0x40384038;
            mul.lo.u32 t, t, 66;
            and.b32 $2, t, 0x8e008e00;
            and.b32 t, $4, 0x20072007;
            mul.lo.u32 t, t, 516;
            and.b32 $3, t, 0x8e008e00;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [w],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        bits = w.to(tl.int32)
        a = (bits & 0x8E00).to(tl.int16).to(tl.float16, bitcast=True)
        b = ((bits << 3) & 0x8E00).to(tl.int16).to(tl.float16, bitcast=True)
        c = (((bits << 1) & 0x8000) | ((bits << 6) & 0xE00)).to(tl.int16)
        d = (((bits << 2) & 0x8000) | ((bits << 9) & 0xE00)).to(tl.int16)
        c = c.to(tl.float16, bitcast=True)
        d = d.to(tl.float16, bitcast=True)
    return a, b, c, d


@triton.jit
def group_scale(words, s, ASM: tl.constexpr):
    """Return the scale of group `s` of each word of exponents as fp32.

    2^-127 becomes 0. Shapes are broadcast.
    """
    if ASM:
        # Two operations: rotated so that the exponent of group s stands where fp32 has its own.
        return tl.inline_asm_elementwise(
            "{.reg .b32 t; shf.r.wrap.b32 t, $1, $1, $2; and.b32 $0, t, 0x7f800000;}",
            "=f,r,r",
            [words, 8 * s + 9],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return (((words >> (8 * s)) & 255) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _half_scale(words, s: tl.constexpr):
    """The same as fp16, 0 below 2^-14: of scales below 2^-28."""
    exponent = tl.maximum(((words >> (8 * s)) & 255) - 98, 0)
    return (exponent << 10).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def scaled_floats(w, words, ASM: tl.constexpr):
    """Unpack int16 [BN, 32] of four codes to four fp16 weights; words [BN]."""
    a, b, c, d = float_halves(w, ASM)
    scale = spread(_half_scale(words, 0), _half_scale(words, 1), w, 32)
    scale_high = spread(_half_scale(words, 2), _half_scale(words, 3), w, 32)
    return (
        (a * scale).to(tl.float16),
        (b * scale).to(tl.float16),
        (c * scale_high).to(tl.float16),
        (d * scale_high).to(tl.float16),
    )
