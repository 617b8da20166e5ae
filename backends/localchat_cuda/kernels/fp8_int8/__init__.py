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
from localchat_cuda.kernels.fp8_int8.tile_config import (
    TILED_ROWS,
    gemv_config,
    small_config,
    tiled_config,
    variant_for,
)
from localchat_cuda.kernels.fp8_int8.tile_ops import NATIVE, PACKED, PLAIN
from localchat_cuda.kernels.launch import traits


def decoder_of(device: torch.device) -> int:
    """Choose the decoder of a device; see tile_ops.py."""
    gpu = traits(device)
    if not gpu.asm:
        return PLAIN
    return NATIVE if gpu.fp8 else PACKED


def gemm(
    x: torch.Tensor,
    weight: W8,
    *,
    kernels: bool = True,
    rounded: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute partial sums [S, M, N] of x [M, K] w^T, in fp32 up to 64 rows.

    rounded: x may be rounded to e4m3 for more rows if the GPU multiplies e4m3. `kernels` False: the reference.
    out: fp32 [M, N] to be written if S is 1 and M at most 64.
    """
    if weight.padding:
        x = torch.nn.functional.pad(x, (0, weight.padding))
    if not kernels:
        return w8_small.reference(x, weight)[None]
    m, (n, k), device = x.shape[0], weight.codes.shape, x.device
    variant = variant_for(m)
    decoder = decoder_of(device)
    sms = traits(device).sms
    if variant == "dequant":
        if rounded and traits(device).fp8 and gemm_fp8.supports(weight):
            return gemm_fp8.gemm(x, weight)[None]
        return w8_dequant.gemm(x, weight, decoder=decoder)[None]
    if variant == "gemv":
        sums = torch.empty(1, 1, n, device=device) if out is None else out[None]
        w8_gemv.gemv(x, weight, sums, gemv_config(n, k, sms), decoder=decoder)
        return sums
    config = small_config(m, n, k, sms) if variant == "small" else tiled_config(m, n, k, sms)
    if out is not None and config.splits == 1:
        sums = out[None]
    else:
        sums = torch.empty(config.splits, m, n, device=device)
    call = w8_small.gemm if variant == "small" else w8_tiled.gemm
    call(x, weight, sums, config, decoder=decoder)
    return sums


def logits(x: torch.Tensor, weight: W8, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Compute logits fp32 [M, N] of last states x [M, K] with an 8-bit head.

    Works in chunks of rows, so that the head is never dequantized in memory. Writes to `out` if given.
    """
    if out is None:
        out = torch.empty(x.shape[0], weight.codes.shape[0], device=x.device)
    for some, rows in zip(x.split(TILED_ROWS), out.split(TILED_ROWS), strict=True):
        sums = gemm(some, weight, out=rows)
        if sums.data_ptr() != rows.data_ptr():
            torch.sum(sums, 0, out=rows)
    return out
