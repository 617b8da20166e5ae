"""Weights as checkpoints store them: AutoAWQ's words, and e4m3 codes with a scale per block."""

import torch

from localchat_cuda.kernels.fp8_int8.pack import BLOCK, E4M3, E4M3_MOST, W8
from localchat_cuda.kernels.int4.pack import AWQ_COLUMNS


def to_awq(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Convert codes [N, K], scales and zeros [N, K / group] to AutoAWQ's (qweight, qzeros, scales)."""

    def words(values: torch.Tensor) -> torch.Tensor:
        columns = values.to(torch.int64).view(values.shape[0], -1, 8)[..., list(AWQ_COLUMNS)]
        shifts = 4 * torch.arange(8, device=values.device)
        total = (columns << shifts).sum(-1)
        return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)

    return words(codes.t().contiguous()), words(zeros.t().contiguous()), scales.t().contiguous()


def e4m3_blocks(weight: torch.Tensor) -> W8:
    """Round a floating weight [N, K] to e4m3, with a scale per block of 128 x 128. K is a multiple of 128."""
    n, k = weight.shape
    padded = torch.zeros(-(-n // BLOCK) * BLOCK, k, device=weight.device)
    padded[:n] = weight
    tiles = padded.view(-1, BLOCK, k // BLOCK, BLOCK)
    scales = (tiles.abs().amax((1, 3)) / E4M3_MOST).clamp_min(1e-30)
    codes = (tiles / scales[:, None, :, None]).view(-1, k)[:n].to(E4M3)
    return W8(codes.contiguous(), scales)
