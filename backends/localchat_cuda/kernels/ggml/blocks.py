"""ggml's block formats, split into codes, scales and minimums.

Letters: N rows, K columns, G groups along K that share a scale.

The layouts are those of ggml (llama.cpp's ggml-common.h); a test compares the numbers with the gguf package.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from localchat_cuda.ggml_forms import GGUF_FORMS


class SplitRows(NamedTuple):
    """The contents of some rows."""

    codes: torch.Tensor
    """uint8 [N, K]."""
    scales: torch.Tensor
    """fp16 [N, G], or [N, K / 256] with factors."""
    factors: torch.Tensor | None = None
    """int8 [N, G]."""
    minimums: torch.Tensor | None = None
    """fp16, as scales."""
    minimum_factors: torch.Tensor | None = None
    """int8 [N, G]."""


def _half(blocks: torch.Tensor, index: int) -> torch.Tensor:
    """Return the fp16 number at byte `index` of each block: [N, blocks]."""
    return blocks[:, :, index : index + 2].contiguous().view(torch.float16)[:, :, 0]


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[..., bytes] to [..., 2 * bytes]: low nibbles of all bytes, then high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _fields(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Fields of each byte, the lowest first, in a new dimension before the last."""
    return torch.stack([(packed >> (bits * i)) & ((1 << bits) - 1) for i in range(count)], dim=-2)


def _flat(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(values.shape[0], -1)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """The 32 bits of four bytes [..., 4], the lowest first."""
    return _fields(packed, 1, 8).transpose(-1, -2).reshape(*packed.shape[:-1], 32)


def _q4_0(b: torch.Tensor) -> SplitRows:
    return SplitRows(_flat(_nibbles(b[:, :, 2:])), _half(b, 0))


def _q4_1(b: torch.Tensor) -> SplitRows:
    return SplitRows(_flat(_nibbles(b[:, :, 4:])), _half(b, 0), minimums=-_half(b, 2))


def _q5_0(b: torch.Tensor) -> SplitRows:
    codes = _nibbles(b[:, :, 6:]) | (_bits(b[:, :, 2:6]) << 4)
    return SplitRows(_flat(codes), _half(b, 0))


def _q5_1(b: torch.Tensor) -> SplitRows:
    codes = _nibbles(b[:, :, 8:]) | (_bits(b[:, :, 4:8]) << 4)
    return SplitRows(_flat(codes), _half(b, 0), minimums=-_half(b, 2))


def _q8_0(b: torch.Tensor) -> SplitRows:
    return SplitRows(_flat(b[:, :, 2:] ^ 128), _half(b, 0))


def _q2_k(b: torch.Tensor) -> SplitRows:
    n, count = b.shape[:2]
    codes = _fields(b[:, :, 16:80].reshape(n, count, 2, 32), 2, 4)
    sides = b[:, :, :16]
    return SplitRows(
        _flat(codes),
        _half(b, 80),
        _flat(sides & 15).view(torch.int8),
        _half(b, 82),
        _flat(sides >> 4).view(torch.int8),
    )


def _q3_k(b: torch.Tensor) -> SplitRows:
    n, count = b.shape[:2]
    low = _fields(b[:, :, 32:96].reshape(n, count, 2, 32), 2, 4)
    high = _fields(b[:, :, :32], 1, 8).reshape(n, count, 2, 4, 32)
    nibbles = _nibbles(b[:, :, 96:104])
    tops = _fields(b[:, :, 104:108], 2, 4).reshape(n, count, 16)
    factors = (nibbles | (tops << 4)).view(torch.int8) - 32
    return SplitRows(_flat(low | (high << 2)), _half(b, 108), _flat(factors))


def _k_sides(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of scales and of minimums of Q4_K and Q5_K, six bits each: int8 [N, G]."""
    first = b[:, :, 4:8]
    second = b[:, :, 8:12]
    third = b[:, :, 12:16]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=-1)
    minimums = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=-1)
    return _flat(scales).view(torch.int8), _flat(minimums).view(torch.int8)


def _q4_k(b: torch.Tensor) -> SplitRows:
    n, count = b.shape[:2]
    codes = _nibbles(b[:, :, 16:].reshape(n, count, 4, 32))
    scales, minimums = _k_sides(b)
    return SplitRows(_flat(codes), _half(b, 0), scales, _half(b, 2), minimums)


def _q5_k(b: torch.Tensor) -> SplitRows:
    n, count = b.shape[:2]
    low = _nibbles(b[:, :, 48:].reshape(n, count, 4, 32)).reshape(n, count, 8, 32)
    scales, minimums = _k_sides(b)
    codes = low | (_fields(b[:, :, 16:48], 1, 8) << 4)
    return SplitRows(_flat(codes), _half(b, 0), scales, _half(b, 2), minimums)


def _q6_k(b: torch.Tensor) -> SplitRows:
    n, count = b.shape[:2]
    low = _nibbles(b[:, :, :128].reshape(n, count, 2, 64)).reshape(n, count, 2, 4, 32)
    high = _fields(b[:, :, 128:192].reshape(n, count, 2, 32), 2, 4)
    factors = _flat(b[:, :, 192:208]).view(torch.int8)
    return SplitRows(_flat(low | (high << 4)), _half(b, 208), factors)


def _iq4_xs(b: torch.Tensor) -> SplitRows:
    n, count = b.shape[:2]
    codes = _nibbles(b[:, :, 8:].reshape(n, count, 8, 16))
    low = _fields(b[:, :, 4:8], 4, 2).transpose(-1, -2).reshape(n, count, 8)
    high = _fields(b[:, :, 2:4], 2, 4).transpose(-1, -2).reshape(n, count, 8)
    factors = (low | (high << 4)).view(torch.int8) - 32
    return SplitRows(_flat(codes), _half(b, 0), _flat(factors))


_READERS: dict[str, Callable[[torch.Tensor], SplitRows]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _q4_0,
    "IQ4_XS": _iq4_xs,
}


def split(type_: str, raw: torch.Tensor) -> SplitRows:
    """SplitRows stored rows, uint8 [N, bytes of a row]."""
    form = GGUF_FORMS[type_]
    return _READERS[type_](raw.view(raw.shape[0], -1, form.block_bytes))
