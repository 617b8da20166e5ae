"""GEMM with weights in ggml's block formats: chooses the kernel by row count.

Letters: M rows, N output and K input features, S splits of K.
"""

import torch

from localchat_cuda.kernels import permute_columns
from localchat_cuda.kernels.ggml import gemm_tiles
from localchat_cuda.kernels.ggml.pack import GgmlWeight
from localchat_cuda.kernels.int4.gemm_dequant import multiply
from localchat_cuda.kernels.launch import traits


def gemm(
    x: torch.Tensor, weight: GgmlWeight, *, kernels: bool = True, wide: bool = False
) -> torch.Tensor:
    """Compute partial sums [S, M, N] of x [M, K] w^T: fp32 up to gemm_tiles.MAX_ROWS, in x's dtype beyond.

    wide: fp32 in place of fp16, for what is added to a residual and may be beyond the range of fp16.
    `kernels` False: the reference.
    """
    if weight.order is not None:
        x = (permute_columns.gather if kernels else permute_columns.reference)(x, weight.order)
    if not kernels:
        return gemm_tiles.reference(x, weight)[None]
    m, n, k, device = x.shape[0], weight.features_out, weight.features_in, x.device
    column = 0
    if 1 <= m <= gemm_tiles.MAX_ROWS:
        sums = torch.empty(gemm_tiles.splits_for(n, k, traits(device).sms), m, n, device=device)
        for part in weight.parts:
            gemm_tiles.gemm(x, part, sums, column)
            column += part.features_out
        return sums
    dtype = torch.float32 if wide and x.dtype == torch.float16 else x.dtype
    whole = torch.empty(n, k, dtype=x.dtype, device=device)
    for part in weight.parts:
        gemm_tiles.dequantize(part, whole[column : column + part.features_out])
        column += part.features_out
    out = torch.empty(m, n, dtype=dtype, device=device)
    multiply(x, whole, out)
    return out[None]


__all__ = ["GgmlWeight", "gemm"]
