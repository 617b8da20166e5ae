"""GEMM with weights in ggml's block formats: chooses the kernel by row count.

Letters: M rows, N output and K input features, S splits of K.
"""

import torch

from localchat_cuda.kernels import permute_columns
from localchat_cuda.kernels.ggml import gemm_int8, gemm_tiles
from localchat_cuda.kernels.ggml.pack import GgmlWeight, dense
from localchat_cuda.kernels.ggml.tile_config import tile_config_for
from localchat_cuda.kernels.int4.activations import Int8Rows, prepare
from localchat_cuda.kernels.int4.gemm_dequant import multiply
from localchat_cuda.kernels.int4.row_norm import RowNorm
from localchat_cuda.kernels.launch import traits

FEW_ROWS = gemm_int8.MAX_ROWS
"""Rows up to which `gemm_rows` is the faster way."""
_TILED_ROWS = 256
_PACKED_ROWS = 64
"""Rows up to which the gemm dequantizes weights.

The second number applies if an unpacked copy is in memory.
"""


def gemm_rows(
    rows: Int8Rows,
    weight: GgmlWeight,
    norm: RowNorm | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute partial sums fp32 [S, M, N] of 1 to FEW_ROWS rows in groups of 16.

    Rows are in the weight's order. out [M, N]: where to write if S is 1.
    """
    m = rows.x.shape[0] // 2
    n = weight.features_out
    k = weight.features_in
    device = rows.x.device
    bits = max(part.form.bits for part in weight.parts)
    config = tile_config_for(m, n, k, traits(device).sms, bits)
    sums = _room(config.splits, m, n, device, out)
    column = 0
    for part in weight.parts:
        gemm_int8.gemm(rows, part, sums, config, column, norm=norm)
        column += part.features_out
    return sums


def _room(
    splits: int, m: int, n: int, device: torch.device, out: torch.Tensor | None
) -> torch.Tensor:
    if out is not None and splits == 1:
        return out[None]
    return torch.empty(splits, m, n, device=device)


def logits(
    x: torch.Tensor, weight: GgmlWeight, *, kernels: bool = True, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute x w^T of any number of rows in fp32 [M, N], in `out` if given."""
    output = torch.empty(x.shape[0], weight.features_out, device=x.device) if out is None else out
    for first in range(0, x.shape[0], _TILED_ROWS):
        rows = slice(first, first + _TILED_ROWS)
        sums = gemm(x[rows], weight, kernels=kernels, out=output[rows])
        if sums.data_ptr() != output[rows].data_ptr():
            torch.sum(sums, 0, out=output[rows])
    return output


def gemm(
    x: torch.Tensor,
    weight: GgmlWeight,
    *,
    kernels: bool = True,
    wide: bool = False,
    few: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute partial sums [S, M, N] of x [M, K] w^T.

    fp32 where weights are dequantized in registers (up to 256 rows; 64 with an unpacked copy), else x's dtype.
    wide: fp32 in place of fp16, for what is added to a residual and may be beyond the range of fp16.
    `kernels` False: the reference. few False: FEW_ROWS and fewer rows take the kernel for more, which compiles
    in a tenth of the time. out fp32 [M, N]: where to write what is always fp32 if S is 1.
    """
    m = x.shape[0]
    n = weight.features_out
    k = weight.features_in
    device = x.device
    if kernels and few and 1 <= m <= FEW_ROWS and k % 128 == 0:
        rows = Int8Rows.empty(m, k, device, weight.group)
        prepare("plain", x[None], rows, order=weight.order)
        return gemm_rows(rows, weight, out=out)
    if weight.order is not None:
        x = (permute_columns.gather if kernels else permute_columns.reference)(x, weight.order)
    if not kernels:
        return gemm_tiles.reference(x, weight)[None]
    if 1 <= m <= (_TILED_ROWS if weight.unpacked is None else _PACKED_ROWS):
        config = gemm_tiles.tile_config_for(m, n, k, traits(device).sms)
        column = 0
        sums = _room(config.shape.splits, m, n, device, out)
        for part in weight.parts:
            gemm_tiles.gemm(x, part, sums, config, column)
            column += part.features_out
        return sums
    unpacked = weight.unpacked
    if unpacked is None:
        unpacked = torch.empty(n, k, dtype=x.dtype, device=device)
        dequantize(weight, unpacked)
    dtype = torch.float32 if wide and x.dtype == torch.float16 else x.dtype
    out = torch.empty(m, n, dtype=dtype, device=device)
    multiply(x, unpacked, out)
    return out[None]


def dequantize(weight: GgmlWeight, out: torch.Tensor) -> None:
    """Write the weight [N, K] into `out`, its columns as packed."""
    column = 0
    for part in weight.parts:
        gemm_tiles.dequantize(part, out[column : column + part.features_out])
        column += part.features_out


__all__ = ["FEW_ROWS", "GgmlWeight", "dense", "dequantize", "gemm", "gemm_rows", "logits"]
