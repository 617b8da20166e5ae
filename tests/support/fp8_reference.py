"""The gemm with rounded activations in plain torch, which gemm_fp8 is compared with."""

import torch

from localchat_cuda.kernels.fp8_int8.pack import BLOCK, E4M3, E4M3_MOST, W8, dense


def round_rows(x: torch.Tensor, *, blocks: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`gemm_fp8.round_rows`, same arguments."""
    m, k = x.shape
    runs = x.float().view(m, -1, BLOCK if blocks else k)
    scales = (runs.abs().amax(2) / E4M3_MOST).clamp_min(1e-12)
    return (runs / scales[..., None]).view(m, k).to(E4M3), scales


def gemm(x: torch.Tensor, weight: W8) -> torch.Tensor:
    """Compute the gemm [M, N] in fp32 with plain torch. x is rounded as in the kernel."""
    codes, scales = round_rows(x, blocks=weight.blocks)
    wide = scales.repeat_interleave(x.shape[1] // scales.shape[1], 1)
    return codes.float().mul_(wide) @ dense(weight).t()


def e4m3_blocks(weight: torch.Tensor) -> W8:
    """Round a floating weight [N, K] to e4m3, with a scale per block. K is a multiple of 128."""
    n, k = weight.shape
    padded = torch.zeros(-(-n // BLOCK) * BLOCK, k, device=weight.device)
    padded[:n] = weight
    tiles = padded.view(-1, BLOCK, k // BLOCK, BLOCK)
    scales = (tiles.abs().amax((1, 3)) / E4M3_MOST).clamp_min(1e-30)
    codes = (tiles / scales[:, None, :, None]).view(-1, k)[:n].to(E4M3)
    return W8(codes.contiguous(), scales)
