"""Floating layers that are rounded while they are read (`--quantize`), without calibration data.

Letters: N output and K input features.

    fp8   e4m3 with a scale for each row
    int8  groups of 128 columns, symmetric
    int4  groups of 128 columns with a zero; of some ranges the one that errs least in the sum of squares
"""

import torch

from localchat_cuda.kernels.fp8_int8 import pack as w8_pack
from localchat_cuda.quantization_config import PACKED_GROUPS, Quantization, can_round
from localchat_cuda.weights.formats.repack import INT8_MIDDLE, pack_weight
from localchat_cuda.weights.formats.weight import Weight
from localchat_cuda.weights.source import LoadTarget

_GROUP = PACKED_GROUPS[0]
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Of a group's range that four bits are spread over: what lies outside is cut to its ends."""
_SLICE_ROWS = 2048


class Rounded:
    """See formats.WeightFormat."""

    def __init__(self, target: LoadTarget, quantization: Quantization) -> None:
        self.target, self.quantization = target, quantization

    def holds(self, prefix: str) -> bool:
        return ".layers." in prefix

    def part(self, prefix: str, n: int, k: int) -> Weight:
        found = self.target.tensor(f"{prefix}.weight", (n, k), self.target.dtype)
        if not can_round(n, k):
            return found
        if self.quantization.method == "fp8":
            return w8_pack.e4m3_rows(found)
        round_ = _int8 if self.quantization.bits == 8 else _int4
        parts = [round_(some) for some in torch.split(found, _SLICE_ROWS)]
        codes, scales, zeros = (torch.cat(column) for column in zip(*parts, strict=True))
        return pack_weight(prefix, codes, scales, zeros, None, self.quantization.bits)


def _int8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8 [N, K], scales fp16 and zeros [N, G]."""
    runs = _runs(rows)
    scales = _scale(runs.abs().amax(2) / 127)
    codes = (runs / scales.float()[..., None]).round().clamp(-128, 127) + INT8_MIDDLE
    return codes.to(torch.uint8).view(rows.shape), scales, torch.full_like(scales, INT8_MIDDLE)


def _int4(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `_int8`, codes and zeros in 0..15."""
    runs = _runs(rows)
    low, high = runs.amin(2).clamp(max=0), runs.amax(2).clamp(min=0)
    least = torch.full_like(low, torch.inf)
    codes = torch.empty_like(runs)
    scales, zeros = torch.empty_like(low, dtype=torch.float16), torch.empty_like(low)
    for share in _SHARES:
        scale = _scale(share * (high - low) / 15)
        zero = (-share * low / scale.float()).round().clamp(0, 15)
        code = ((runs / scale.float()[..., None]).round() + zero[..., None]).clamp(0, 15)
        error = ((code - zero[..., None]) * scale.float()[..., None] - runs).square().sum(2)
        better = error < least
        least = torch.where(better, error, least)
        scales, zeros = torch.where(better, scale, scales), torch.where(better, zero, zeros)
        codes = torch.where(better[..., None], code, codes)
    return codes.to(torch.uint8).view(rows.shape), scales, zeros


def _runs(rows: torch.Tensor) -> torch.Tensor:
    """fp32 [N, G, 128]."""
    return rows.float().view(rows.shape[0], -1, _GROUP)


def _scale(steps: torch.Tensor) -> torch.Tensor:
    """fp16, none of them 0."""
    return steps.clamp_min(torch.finfo(torch.float16).tiny).half()
