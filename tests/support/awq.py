"""AutoAWQ's storage of random checkpoints."""

import torch

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
