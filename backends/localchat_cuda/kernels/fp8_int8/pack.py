"""Weights of 8 bits: e4m3 numbers of an FP8 checkpoint, or whole numbers of an int8 head.

Letters: N output and K input features, G = K / 128.

    w[n, k] = scale * value(code[n, k])        scale [N], or one for each block of 128 x 128

MXFP8 has a scale for each 32 columns of a row, a power of two of which the exponent is stored (e8m0, biased by
127; 255 is no number). In bf16, weights are multiplied by it exactly. The range of fp16 is too small for that.

A code is a sign bit and seven more. `e4m3`: four of exponent (bias 7) and three of mantissa, as torch's
float8_e4m3fn, up to 448; the NaN code 0x7f is never stored. `whole`: sign and magnitude, -127 to 127, not
two's complement: with a separate sign bit both kinds become fp16 or bf16 by the same few operations on two at
once (tile_ops.py), without a conversion from integers, which GPUs do at a quarter of their rate or less.

Codes stay in the rows of a linear layer, so that the library can multiply them too (gemm_dequant.py), and
tensor-core operands are loaded from them directly: see gemm_small.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

BLOCK = 128
MX_GROUP = 32
"""Columns that share a scale in MXFP8."""
MX_MOST = 134
"""Largest exponent of MXFP8, a scale of 2^7: see tile_ops.mx_factor."""
E4M3 = torch.float8_e4m3fn
E4M3_MOST = 448.0
_SLICE_ROWS = 4096


class W8(NamedTuple):
    """A weight of 8 bits."""

    codes: torch.Tensor
    """[N, K]: float8_e4m3fn, or uint8 for whole numbers."""
    scales: torch.Tensor
    """fp32: [N], or [ceil(N / 128), G] for block scales. MXFP8: uint8 [N, 4 G], exponents."""
    padding: int = 0
    """Columns of zeros behind those of the layer, up to a multiple of 128: rows must be as wide."""

    @property
    def features_out(self) -> int:
        return int(self.codes.shape[0])

    @property
    def features_in(self) -> int:
        return int(self.codes.shape[1])

    @property
    def whole(self) -> bool:
        """Whether codes are whole numbers, not e4m3."""
        return self.codes.dtype == torch.uint8

    @property
    def blocks(self) -> bool:
        """Whether blocks of 128 x 128 share a scale."""
        return self.scales.dim() == 2 and not self.mx

    @property
    def mx(self) -> bool:
        """Whether 32 columns of a row share a power of two."""
        return self.scales.dtype == torch.uint8

    @property
    def raw(self) -> torch.Tensor:
        """Return the codes as uint8."""
        return self.codes.view(torch.uint8)

    @property
    def words(self) -> torch.Tensor:
        """Return the scales as kernels read them.

        MXFP8: int32 [N, G], four exponents each, the first in the lowest byte."""
        if self.mx:
            return self.scales.view(torch.int32)
        return self.scales

    def aligned(self) -> "W8":
        """Copy tensors that do not start at a multiple of 16 bytes.

        Kernels load as many at a time, but a view into a file may start anywhere."""
        codes, scales = (
            tensor.clone() if tensor.data_ptr() % 16 else tensor
            for tensor in (self.codes, self.scales)
        )
        return W8(codes, scales, self.padding)


def values(codes: torch.Tensor) -> torch.Tensor:
    """Convert codes to fp32, without scales."""
    if codes.dtype == E4M3:
        return codes.float()
    magnitude = (codes & 127).float()
    return torch.where(codes >= 128, -magnitude, magnitude)


def dense(weight: W8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the weight [N, K] in floating point: the reference of every gemm variant."""
    n, k = weight.codes.shape
    if weight.mx:
        wide = torch.exp2(weight.scales.float() - 127).repeat_interleave(MX_GROUP, 1)
        return (values(weight.codes) * wide).to(dtype)
    if not weight.blocks:
        return (values(weight.codes) * weight.scales[:, None]).to(dtype)
    wide = weight.scales.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    return (values(weight.codes) * wide).to(dtype)


def joined(parts: Sequence[W8]) -> W8 | None:
    """Concatenate parts along N to one weight.

    None if the scales cannot be concatenated: row and block scales, or a block that would lie in two parts.
    """
    first = parts[0]
    blocks = first.blocks
    kinds = {(part.blocks, part.mx, part.codes.dtype) for part in parts}
    if len(kinds) > 1:
        return None
    if blocks and any(part.features_out % BLOCK for part in parts[:-1]):
        return None
    codes = torch.cat([part.raw for part in parts]).view(first.codes.dtype)
    return W8(codes, torch.cat([part.scales for part in parts]), first.padding)


def padded(weight: W8) -> W8:
    """Add columns of zeros up to a multiple of 128."""
    padding = -weight.features_in % BLOCK
    if not padding:
        return weight
    codes = torch.nn.functional.pad(weight.raw, (0, padding)).view(weight.codes.dtype)
    scales = weight.scales
    if weight.mx:
        scales = torch.nn.functional.pad(scales, (0, padding // MX_GROUP))
    return W8(codes, scales, padding)


def whole_rows(weight: torch.Tensor) -> W8:
    """Round a floating weight [N, K] to integers from -127 to 127.

    Each row is scaled by its largest value. Columns are padded like those of `padded`. Works in chunks of rows,
    because a head in fp32 takes gigabytes.
    """
    n, k = weight.shape
    padding = -k % BLOCK
    codes = torch.zeros(n, k + padding, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(n, device=weight.device)
    for first in range(0, n, _SLICE_ROWS):
        some = weight[first : first + _SLICE_ROWS].float()
        step = (some.abs().amax(1) / 127).clamp_min(1e-30)
        rounded = (some / step[:, None]).round().to(torch.int16)
        signed = rounded.abs() + 128 * (rounded < 0).to(torch.int16)
        codes[first : first + _SLICE_ROWS, :k] = signed.to(torch.uint8)
        scales[first : first + _SLICE_ROWS] = step
    return W8(codes, scales, padding)


def e4m3_rows(weight: torch.Tensor) -> W8:
    """Round a floating weight [N, K] to e4m3 with a scale for each row."""
    scales = (weight.float().abs().amax(1) / E4M3_MOST).clamp_min(1e-30)
    return W8((weight.float() / scales[:, None]).to(E4M3), scales)
