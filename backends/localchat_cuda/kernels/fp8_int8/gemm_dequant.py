"""W8A16 gemm for large row counts: dequantizes the weight, then calls the library.

Letters: M rows, N output and K input features.

Dequantizing reads one byte and writes two for each weight, once for any number of rows. Exact up to the
rounding of scale * value to the output dtype. Grid of the kernel (N / 4, K / 1024). For GPUs without FP8
tensor cores, for checkpoints whose activations must not be rounded, and for weights that gemm_fp8.py does not
support.
"""

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.fp8_int8.pack import W8
from localchat_cuda.kernels.fp8_int8.tile_ops import W8Shape, decode, power
from localchat_cuda.kernels.launch import cdiv, launch_kernel, require

_ROWS = 4
_COLUMNS = 1024


@triton.jit
def _dequantize_kernel(
    codes,
    scales,
    out,
    shape: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    N: tl.constexpr = shape.N
    K: tl.constexpr = shape.K
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (n < N)[:, None] & (k < K)[None, :]
    w = tl.load(codes + n.to(tl.int64)[:, None] * K + k[None, :], mask=inside, other=0)
    if shape.SHARED:
        G: tl.constexpr = (K + 127) // 128
        gain = tl.load(scales + (n // 128)[:, None] * G + (k // 128)[None, :], mask=inside, other=0)
    elif shape.MX:
        row = scales + n[:, None] * (K // 128)
        words = tl.load(row + (k // 128)[None, :], mask=inside, other=0)
        gain = power(words, k[None, :] // 32 % 4)
    else:
        gain = tl.load(scales + n, mask=n < N, other=0.0)[:, None]
    like = out.dtype.element_ty
    value = decode(w, like, shape.WHOLE, shape.DECODER, True).to(tl.float32) * gain
    tl.store(out + n.to(tl.int64)[:, None] * K + k[None, :], value.to(like), mask=inside)


def dequantize(weight: W8, out: torch.Tensor, *, decoder: int) -> None:
    """Write the weight into `out` [N, K], which is fp16, bf16 or, in the interpreter, fp32."""
    n, k = weight.codes.shape
    require("out", out, (n, k), weight.codes.device)
    launch_kernel(
        _dequantize_kernel,
        (cdiv(n, _ROWS), cdiv(k, _COLUMNS)),
        *(weight.raw, weight.words, out, W8Shape.of(weight, decoder), _ROWS, _COLUMNS),
        num_warps=4,
    )


def gemm(x: torch.Tensor, weight: W8, *, decoder: int) -> torch.Tensor:
    """Compute x[M, K] w^T in x's dtype."""
    dense = torch.empty(weight.codes.shape, dtype=x.dtype, device=x.device)
    dequantize(weight, dense, decoder=decoder)
    return x @ dense.t()
