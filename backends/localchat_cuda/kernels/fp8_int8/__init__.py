"""GEMM with 8-bit weights (FP8 or int8): chooses the kernel variant and the decoder.

Letters: M rows, N output and K input features, S splits of K.
"""

import torch

from localchat_cuda.kernels.fp8_int8 import gemm_dequant as w8_dequant
from localchat_cuda.kernels.fp8_int8 import gemm_fp8
from localchat_cuda.kernels.fp8_int8 import gemm_small as w8_small
from localchat_cuda.kernels.fp8_int8 import gemm_tiled as w8_tiled
from localchat_cuda.kernels.fp8_int8 import gemv as w8_gemv
from localchat_cuda.kernels.fp8_int8.pack import W8
from localchat_cuda.kernels.fp8_int8.tile_ops import NATIVE, PACKED, PLAIN
from localchat_cuda.kernels.fp8_int8.tiling import (
    TILED_ROWS,
    gemv_config,
    small_config,
    tiled_config,
    variant_for,
)
from localchat_cuda.kernels.launch import traits


def decoder_of(device: torch.device) -> int:
    """Choose the decoder of a device; see tile_ops.py."""
    gpu = traits(device)
    if not gpu.asm:
        return PLAIN
    return NATIVE if gpu.fp8 else PACKED


def gemm(
    x: torch.Tensor, weight: W8, *, kernels: bool = True, rounded: bool = False
) -> torch.Tensor:
    """Compute partial sums [S, M, N] of x [M, K] w^T, in fp32 up to 64 rows.

    rounded: x may be rounded to e4m3 for more rows if the GPU multiplies e4m3. `kernels` False: the reference.
    """
    if not kernels:
        return w8_small.reference(x, weight)[None]
    m, (n, k), device = x.shape[0], weight.codes.shape, x.device
    variant, decoder, sms = variant_for(m), decoder_of(device), traits(device).sms
    if variant == "dequant":
        if rounded and traits(device).fp8 and gemm_fp8.supports(weight):
            return gemm_fp8.gemm(x, weight)[None]
        out = torch.empty(m, n, dtype=x.dtype, device=device)
        scratch = torch.empty(n * k, dtype=x.dtype, device=device)
        w8_dequant.gemm(x, weight, out, scratch, decoder=decoder)
        return out[None]
    if variant == "gemv":
        out = torch.empty(1, 1, n, device=device)
        w8_gemv.gemv(x, weight, out, gemv_config(n, k, sms), decoder=decoder)
        return out
    config = small_config(m, n, k, sms) if variant == "small" else tiled_config(m, n, k, sms)
    sums = torch.empty(config.splits, m, n, device=device)
    call = w8_small.gemm if variant == "small" else w8_tiled.gemm
    call(x, weight, sums, config, decoder=decoder)
    return sums


def logits(x: torch.Tensor, weight: W8, *, kernels: bool = True) -> torch.Tensor:
    """Compute logits fp32 [M, N] of last states x [M, K] with an 8-bit head.

    In chunks of rows, so that the head is never dequantized in memory.
    """
    pieces = [gemm(some, weight, kernels=kernels) for some in x.split(TILED_ROWS)]
    whole = [each[0] if each.shape[0] == 1 else each.sum(0) for each in pieces]
    return whole[0] if len(whole) == 1 else torch.cat(whole)
