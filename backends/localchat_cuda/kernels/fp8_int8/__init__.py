"""The product of a weight of bytes, whatever the number of rows: chooses the form and how codes are decoded.

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
from localchat_cuda.kernels.fp8_int8.tiling import TILED_ROWS, few_cut, form_for, one_cut, tiles_cut
from localchat_cuda.kernels.launch import traits


def way_of(device: torch.device) -> int:
    """How codes are decoded there: see w8_tile.py."""
    way = traits(device)
    if not way.asm:
        return PLAIN
    return NATIVE if way.fp8 else PACKED


def product(
    x: torch.Tensor, weight: W8, *, kernels: bool = True, rounded: bool = False
) -> torch.Tensor:
    """Partial sums [S, M, N] of x [M, K] w^T, in fp32 up to 64 rows. rounded: x may be rounded to e4m3 where
    there are more rows and the GPU multiplies that. `kernels` False: the reference."""
    if not kernels:
        return w8_small.reference(x, weight)[None]
    m, (n, k), device = x.shape[0], weight.codes.shape, x.device
    form, way, sms = form_for(m), way_of(device), traits(device).sms
    if form == "dense":
        if rounded and traits(device).fp8 and gemm_fp8.takes(weight):
            return gemm_fp8.product(x, weight)[None]
        out = torch.empty(m, n, dtype=x.dtype, device=device)
        scratch = torch.empty(n * k, dtype=x.dtype, device=device)
        w8_dequant.product(x, weight, out, scratch, way=way)
        return out[None]
    if form == "one":
        out = torch.empty(1, 1, n, device=device)
        w8_gemv.product(x, weight, out, one_cut(n, k, sms), way=way)
        return out
    cut = few_cut(m, n, k, sms) if form == "few" else tiles_cut(m, n, k, sms)
    sums = torch.empty(cut.splits, m, n, device=device)
    call = w8_small.product if form == "few" else w8_tiled.product
    call(x, weight, sums, cut, way=way)
    return sums


def logits(x: torch.Tensor, weight: W8, *, kernels: bool = True) -> torch.Tensor:
    """Logits fp32 [M, N] of last states x [M, K] by a head of bytes: some rows at a time, so that a head is
    never written out in floating point."""
    pieces = [product(some, weight, kernels=kernels) for some in x.split(TILED_ROWS)]
    whole = [each[0] if each.shape[0] == 1 else each.sum(0) for each in pieces]
    return whole[0] if len(whole) == 1 else torch.cat(whole)
