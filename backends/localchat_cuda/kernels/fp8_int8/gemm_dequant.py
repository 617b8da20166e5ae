"""W8A16 gemm for large row counts: dequantizes parts of the weight, then calls the library.

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
from localchat_cuda.kernels.fp8_int8.tile_ops import W8Shape, decode
from localchat_cuda.kernels.launch import require

_ROWS = 4
_COLUMNS = 1024


@triton.jit
def _dequantize_kernel(
    codes,
    scales,
    out,
    first,
    N,
    shape: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    K: tl.constexpr = shape.K
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r < N)[:, None] & (k < K)[None, :]
    n = first + r
    w = tl.load(codes + n.to(tl.int64)[:, None] * K + k[None, :], mask=inside, other=0)
    if shape.SHARED:
        G: tl.constexpr = (K + 127) // 128
        gain = tl.load(scales + (n // 128)[:, None] * G + (k // 128)[None, :], mask=inside, other=0)
    else:
        gain = tl.load(scales + n, mask=r < N, other=0.0)[:, None]
    like = out.dtype.element_ty
    value = decode(w, like, shape.WHOLE, shape.DECODER, True).to(tl.float32) * gain
    tl.store(out + r.to(tl.int64)[:, None] * K + k[None, :], value.to(like), mask=inside)


def dequantize(weight: W8, out: torch.Tensor, first: int = 0, *, decoder: int) -> None:
    """Write output features from `first` on to `out` [n, K].

    `out` is fp16, bf16 or, in the interpreter, fp32.
    """
    n = out.shape[0]
    k = weight.features_in
    floats = (torch.float16, torch.bfloat16, torch.float32)
    require("out", out, (n, k), floats, weight.codes.device)
    if not 0 <= first <= weight.features_out - n:
        raise ValueError(f"first: {n} features from {first} of {weight.features_out} wanted")
    _dequantize_kernel[(triton.cdiv(n, _ROWS), triton.cdiv(k, _COLUMNS))](
        *(weight.raw, weight.scales, out, first, n, W8Shape.of(weight, decoder), _ROWS, _COLUMNS),
        num_warps=4,
    )


def gemm(
    x: torch.Tensor, weight: W8, out: torch.Tensor, scratch: torch.Tensor, *, decoder: int
) -> None:
    """Compute out[M, N] = x[M, K] w^T in x's dtype.

    `scratch` is a flat buffer of that dtype with room for at least one output feature.
    """
    n = weight.features_out
    k = weight.features_in
    require("out", out, (x.shape[0], n), (x.dtype,), weight.codes.device)
    room = min(scratch.numel() // k, n)
    if room == 0:
        raise ValueError(f"scratch: {scratch.numel()} elements hold no feature of {k}")
    for first in range(0, n, room):
        count = min(room, n - first)
        part = scratch[: count * k].view(count, k)
        dequantize(weight, part, first, decoder=decoder)
        if count == n:
            torch.matmul(x, part.t(), out=out)
        else:
            out[:, first : first + count] = torch.matmul(x, part.t())
