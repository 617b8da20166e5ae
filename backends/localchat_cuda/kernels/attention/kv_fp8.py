"""8-bit KV cache: layout in the pages, encoding and decoding inside kernels.

Letters as in rope.py. A key (or a value) of one token and head is D whole numbers of -127 to 127 and one
scale. The scale is a float of 5 bits of exponent and 3 of mantissa in one byte, rounded up so that the
largest number still fits.

    k, v       int16 [pages, J, P, D/2]: word i holds element i in its low byte and element i + D/2
               in its high byte, each plus 128, so that a reader of a word gets one number of each half
    exponents  uint8 [pages, J, P, 2], scales of the key and of the value: the upper bits of an fp32
               (`scale_of`), and 255 where a number was infinite or NaN

Keys (and queries, which keeps their products) are rotated by a Hadamard matrix before they are rounded. Models
with biased keys have a few channels that are 100 times larger than the others; rotated, all channels are about
equally large, and their rounding errors are small beside the key's length. e4m3 numbers, which this cache had
before, lose 2.6 % of each number at any scale: Qwen2.5-Coder-1.5B then solved 36 of 164 HumanEval problems in
place of 119 (mean KL 0.11; in this form 0.001).

Attention multiplies the whole numbers: the key's scale is applied to the logit, the value's to the weight, as
a term of its exponent. `decode` converts words to fp16 with one of two decoders:

    PLAIN      integer operations; for the interpreter
    PACKED     PTX for two words at once, 4 instructions for 4 numbers, on every GPU

Rotated keys as in QuaRot (Ashkboos et al., 2024); scales folded into attention as in vLLM and FlashInfer.
"""

import math

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.launch import require, traits

PLAIN = 1
PACKED = 2
"""Decoders of `decode`; 0 stands for pages of plain numbers."""
NONE = tl.constexpr(255)
_LARGEST = tl.constexpr(254)
INFINITE = tl.constexpr(0x7F800000)
_LIMIT = tl.constexpr(127.0)
_PER_LIMIT = tl.constexpr(1 / 127)
_FIRST = tl.constexpr((127 - 21) << 3)
"""Upper 12 bits of the smallest scale, 2^-21. The largest is 2^10 * 1.75, for numbers up to 227,000."""
_ROUND = tl.constexpr(12582912.0)
"""1.5 * 2^23: added to a small fp32, it leaves the nearest whole number in the lowest bits."""


def scale_of(marks: torch.Tensor) -> torch.Tensor:
    """Convert the bytes of scales to fp32; NaN where the encoded numbers were not finite."""
    scales = ((marks.int() + _FIRST.value) << 20).view(torch.float32)
    return torch.where(marks == NONE.value, torch.nan, scales)


def encode_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode x [..., D]: words int16 [..., D/2], bytes of the scales uint8 [...]."""
    x = x.float()
    largest = x.abs().amax(-1)
    bits = (largest * torch.tensor(_PER_LIMIT.value)).view(torch.int32)
    marks = (((bits + 0xFFFFF) >> 20) - _FIRST.value).clamp(0, _LARGEST.value)
    codes = (x * (1 / scale_of(marks))[..., None]).clamp(-_LIMIT.value, _LIMIT.value).round()
    parts = (codes.nan_to_num(0.0) + 128).to(torch.uint8).chunk(2, -1)
    words = torch.stack(parts, -1).contiguous().view(torch.int16).squeeze(-1)
    return words, torch.where(largest.isfinite(), marks, NONE.value).to(torch.uint8)


def decode_reference(words: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Decode words [..., D/2] and the bytes of scales [...] to fp32 [..., D]."""
    parts = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 2))
    codes = parts.transpose(-1, -2).flatten(-2).float() - 128
    decoded: torch.Tensor = codes * scale_of(exponents)[..., None]
    return decoded


def block_of(d: int) -> int:
    """Return the size of the Hadamard blocks of a head: the largest power of two that divides D."""
    return d & -d


def hadamard_reference(x: torch.Tensor) -> torch.Tensor:
    """Rotate x [..., D] by a Hadamard matrix. Pairs are elements i and i + D/2.

    If D is not a power of two, each block of the halves has its own matrix.
    """
    size = block_of(x.shape[-1])
    low, high = x.float().chunk(2, -1)
    halves = torch.stack((low + high, low - high), -2)
    step = 1
    while step < size // 2:
        pairs = halves.unflatten(-1, (-1, 2, step))
        first, second = pairs.unbind(-2)
        halves = torch.stack((first + second, first - second), -2).flatten(-3)
        step *= 2
    return halves.flatten(-2) / math.sqrt(size)


@triton.jit
def _butterfly(x, STEP: tl.constexpr):
    """Replace elements i and i + STEP of x by their sum and difference."""
    count: tl.constexpr = x.shape[0]
    pairs = tl.permute(tl.reshape(x, [count // (2 * STEP), 2, STEP]), (0, 2, 1))
    first, second = tl.split(pairs)
    pairs = tl.join(first + second, first - second)
    return tl.reshape(tl.permute(pairs, (0, 2, 1)), [count])


@triton.jit
def hadamard(a, b, D: tl.constexpr):
    """`hadamard_reference` of two halves of a head, fp32 [HALF] with zeros past D/2."""
    SIZE: tl.constexpr = D & -D
    total = a + b
    b = a - b
    a = total
    for n in tl.static_range(8):
        if 4 << n <= SIZE:
            a = _butterfly(a, 1 << n)
            b = _butterfly(b, 1 << n)
    factor = 1.0 / tl.sqrt(tl.full((1,), SIZE, tl.float32))
    return a * factor, b * factor


@triton.jit
def _code(x):
    """Round fp32 from -127 to 127 to the nearest integer plus 128, as int32. Ties round to even."""
    x = tl.minimum(tl.maximum(x, -_LIMIT), _LIMIT)
    return ((x + _ROUND).to(tl.int32, bitcast=True) + 128) & 0xFF


@triton.jit
def encode(a, b):
    """Encode two halves of a head, fp32 [D/2]: (code of each in int32, byte of the scale in int32)."""
    # as integers the numbers keep their order, with infinity above them and NaN above infinity
    sizes = tl.maximum(
        a.to(tl.int32, bitcast=True) & 0x7FFFFFFF, b.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    )
    largest = tl.minimum(tl.max(sizes, 0), INFINITE)
    bits = (largest.to(tl.float32, bitcast=True) * _PER_LIMIT).to(tl.int32, bitcast=True)
    mark = tl.minimum(tl.maximum(((bits + 0xFFFFF) >> 20) - _FIRST, 0), _LARGEST)
    finer = 1.0 / ((mark + _FIRST) << 20).to(tl.float32, bitcast=True)
    mark = tl.where(largest == INFINITE, NONE, mark)
    return _code(a * finer), _code(b * finer), mark


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
    """Convert int16 words to whole numbers in fp16: those of the low bytes, those of the high bytes."""
    if DECODER == 2:
        # a byte u below 0x64 is the fp16 number 1024 + u
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, middle;
            mov.b32 middle, 0x64806480;
            prmt.b32 a, $2, 0x64646464, 0x4240;
            prmt.b32 b, $2, 0x64646464, 0x4341;
            sub.rn.f16x2 $0, a, middle;
            sub.rn.f16x2 $1, b, middle;
            }""",
            "=&r,=&r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low = (words & 0xFF).to(tl.float16) - 128.0
        high = ((words >> 8) & 0xFF).to(tl.float16) - 128.0
    return low, high


@triton.jit
def factors(marks):
    """Unpack two bytes per int32: scale of keys, log2 of the scale of values.

    fp32; NaN where the encoded numbers were not finite.
    """
    key = marks & 255
    value = marks >> 8 & 255
    factor = ((key + _FIRST) << 20).to(tl.float32, bitcast=True)
    lift = tl.log2(((value + _FIRST) << 20).to(tl.float32, bitcast=True))
    none = float("nan")
    return tl.where(key == NONE, none, factor), tl.where(value == NONE, none, lift)


@triton.jit
def scales(marks):
    """Convert bytes in int32 to scales; fp32, NaN where the encoded numbers were not finite."""
    scale = ((marks + _FIRST) << 20).to(tl.float32, bitcast=True)
    return tl.where(marks == NONE, float("nan"), scale)


def decoder_for(exponents: torch.Tensor | None, device: torch.device) -> int:
    """Return the decoder of pages with these exponents; 0 without."""
    return 0 if exponents is None else decoder_of(device)


def decoder_of(device: torch.device) -> int:
    """Choose the decoder of a device."""
    return PACKED if traits(device).asm else PLAIN


def require_exponents(exponents: torch.Tensor, pages: torch.Tensor, device: torch.device) -> None:
    """Raise ValueError unless `exponents` fit 8-bit `pages` [pages, J, P, D/2]."""
    count, heads, page, _ = pages.shape
    require("exponents", exponents, (count, heads, page, 2), device, torch.uint8)
