"""Division of rows by their rms in the gemm after a norm.

Letters: M rows, K columns, G = K / 128.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.int4.pack import BLOCK_K
from localchat_cuda.kernels.launch import require


class RowNorm(NamedTuple):
    """Sums by which a gemm divides its rows by their rms."""

    squares: torch.Tensor
    """fp32 [M, G]: sums of the squares of 128 columns."""
    eps: float

    def divided(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows [M, K] divided by their rms, with plain torch."""
        mean = self.squares.sum(1, keepdim=True) / rows.shape[1]
        return rows * torch.rsqrt(mean + self.eps)


def norm_arguments(
    norm: RowNorm | None, m: int, k: int, unused: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """Return squares and eps for the kernel of a gemm. Without a norm, no kernel reads `unused`."""
    if norm is None:
        return unused, 0.0
    require("squares", norm.squares, (m, k // BLOCK_K), unused.device, torch.float32)
    return norm


@triton.jit
def inverse_rms(squares, m, valid, eps, G: tl.constexpr):
    """Compute 1 / rms of rows `m` from their G sums of squares: fp32 like `m`."""
    j = tl.arange(0, triton.next_power_of_2(G))
    inside = valid[:, None] & (j < G)[None, :]
    parts = tl.load(squares + m[:, None] * G + j[None, :], mask=inside, other=0.0)
    return tl.rsqrt(tl.sum(parts, 1) / (G * 128) + eps)
