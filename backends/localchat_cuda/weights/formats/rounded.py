"""Floating layers that are rounded while they are read (`--quantize`), without calibration data.

Letters: N output and K input features.

    fp8   e4m3 with a scale for each row
    int8  groups of 128 columns, or of the next smaller size that divides K; symmetric
    int4  groups of 128 columns with a zero

The range of int4 groups is that of their weights. A search for the range with the least squared error made real
models worse: SmolLM2-135M's KL rose from 0.55 to 0.65, and Gemma 3 270M's from 0.47 to 0.49. Without it,
Qwen2.5-Coder-1.5B solves 119 of 164 HumanEval problems (118 in bf16); in groups of 32 it solved 113.
"""

import torch

from localchat_cuda.config.quantization import PACKED_GROUPS, can_round, padded
from localchat_cuda.kernels.fp8_int8 import pack as w8_pack
from localchat_cuda.kernels.int4 import pack as w4_pack
from localchat_cuda.weights.formats.repack import INT8_MIDDLE, pack_weight
from localchat_cuda.weights.formats.weight import Weight
from localchat_cuda.weights.formats.weight_format import WeightFormat

_SLICE_ROWS = 2048


class Rounded(WeightFormat):
    """See WeightFormat."""

    def holds(self, prefix: str) -> bool:
        return ".layers." in prefix

    def part(self, prefix: str, n: int, k: int) -> Weight:
        return self.rounded(
            prefix, self.target.tensor(f"{prefix}.weight", (n, k), self.target.dtype)
        )

    def rounded(self, prefix: str, floating: torch.Tensor) -> Weight:
        """Round a weight [N, K], or return it if its shape has no kernel. `prefix`: name, for experts."""
        n, k = floating.shape
        if not can_round(prefix, n, k):
            return floating
        if self.quantization.method == "fp8":
            return w8_pack.padded(w8_pack.e4m3_rows(floating))
        if self.quantization.bits == 8:
            # The largest group that divides the inputs needs the fewest scales.
            group = next(size for size in PACKED_GROUPS if k % size == 0)
            parts = [_int8(rows, group) for rows in torch.split(floating, _SLICE_ROWS)]
        else:
            # The last group of a row is padded with zeros.
            floating = torch.nn.functional.pad(floating, (0, padded(k) - k))
            size = self.quantization.group
            parts = [_int4(rows, size) for rows in torch.split(floating, _SLICE_ROWS)]
        codes, scales, zeros = (torch.cat(column) for column in zip(*parts, strict=True))
        weight = pack_weight(prefix, codes, scales, zeros, self.quantization)
        if isinstance(weight, w4_pack.W4):
            return weight._replace(padding=padded(k) - k)
        return weight


def _int8(rows: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round to codes uint8 [N, K] with scales fp16 and zeros [N, G]."""
    runs = _runs(rows, group)
    scales = _scale(runs.abs().amax(2) / 127)
    codes = (runs / scales.float()[..., None]).round().clamp(-128, 127) + INT8_MIDDLE
    return codes.to(torch.uint8).view(rows.shape), scales, torch.full_like(scales, INT8_MIDDLE)


def _int4(rows: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round to codes and zeros in 0..15; see `_int8`."""
    runs = _runs(rows, group)
    low = runs.amin(2).clamp(max=0)
    high = runs.amax(2).clamp(min=0)
    scales = _scale((high - low) / 15)
    zeros = (-low / scales.float()).round().clamp(0, 15)
    codes = (runs / scales.float()[..., None]).round() + zeros[..., None]
    return codes.clamp(0, 15).to(torch.uint8).view(rows.shape), scales, zeros


def _runs(rows: torch.Tensor, group: int) -> torch.Tensor:
    """Return the rows as fp32 [N, G, columns of a group]."""
    return rows.float().view(rows.shape[0], -1, group)


def _scale(steps: torch.Tensor) -> torch.Tensor:
    """Return the scales as fp16 numbers above 0."""
    return steps.clamp_min(torch.finfo(torch.float16).tiny).half()
