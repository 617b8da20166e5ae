"""W4A8 gemm of prompts: the library multiplies e4m3 copies of the codes and rounded activations.

Code minus zero is a whole number of at most 15, which e4m3 stores exactly, and the library applies a scale to
each 128 columns of a row: the weight loses nothing. Rows of x are rounded to e4m3 with a scale for each 128
columns, which changes a product by 2 % (a random matrix), less than the rounding of the weight to 4 bits did.
cuBLAS has this gemm since 12.9, for compute capability 9.0 alone. An H200 reaches 950 TFLOPS with it and 730 in
fp16 (1,024 to 8,192 rows).

Letters: M rows, N output and K input features, G = K / 128, T = N / 16 row blocks.
"""

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.fp8_int8.gemm_fp8 import e4m3, round_padded
from localchat_cuda.kernels.fp8_int8.pack import E4M3
from localchat_cuda.kernels.int4.gemm_dequant import in_order
from localchat_cuda.kernels.int4.pack import BLOCK_K, ROWS, W4, E4M3Copy
from localchat_cuda.kernels.int4.tile_ops import (
    halves,
    load_scale_zeros,
    load_tile,
    scale_of,
    zero_of,
)
from localchat_cuda.kernels.launch import launch_kernel, require, traits

CAPABILITY = 9
"""First number of the compute capability that multiplies with such scales."""
_ROWS = 16
"""The library takes multiples of this many rows."""


def serves(device: torch.device) -> bool:
    """Return whether the library multiplies such copies on this device."""
    if not traits(device).hopper:
        return False
    if device.type != "cuda":
        return True
    codes = torch.zeros(_ROWS, BLOCK_K, device=device).to(E4M3)
    scales = torch.zeros(1, _ROWS, device=device)
    try:
        _multiply(codes, scales.t(), E4M3Copy(codes, scales), torch.float16)
    except RuntimeError:
        # torch was built for a CUDA before 12.9.
        return False
    return True


@triton.jit
def _unpack_kernel(codes, scale_zeros, out, scales, G: tl.constexpr, ASM: tl.constexpr):
    group = tl.program_id(0)
    block = tl.program_id(1)
    scale_zero = load_scale_zeros(scale_zeros, (block * G + group) * 16, 1)
    zero = zero_of(scale_zero)[:, None]
    i = tl.arange(0, 16)
    tl.store(scales + group * (tl.num_programs(1) * 16) + block * 16 + i, scale_of(scale_zero))
    a, b, c, d = halves(load_tile(codes, (block * G + group) * 512, 1, 2), ASM)
    row = (block * 16 + i).to(tl.int64) * (G * 128) + group * 128
    pointers = out + row[:, None] + tl.arange(0, 64)[None, :]
    tl.store(pointers, e4m3(in_order(a, b) - 1024 - zero, ASM))
    tl.store(pointers + 64, e4m3(in_order(c, d) - 64 - zero, ASM))


def unpack(weight: W4) -> E4M3Copy:
    """Return an e4m3 copy of a weight with groups of 128. ValueError for other groups."""
    if weight.group != BLOCK_K:
        raise ValueError(f"weight: groups of {BLOCK_K} wanted, {weight.group} given")
    n = weight.features_out
    k = weight.features_in
    device = weight.codes.device
    codes = torch.empty(n, k, dtype=torch.uint8, device=device)
    scales = torch.empty(k // BLOCK_K, n, device=device)
    launch_kernel(
        _unpack_kernel,
        (k // BLOCK_K, n // ROWS),
        weight.codes.view(torch.int16),
        weight.scale_zeros,
        codes,
        scales,
        G=k // BLOCK_K,
        ASM=traits(device).asm,
        num_warps=1,
    )
    return E4M3Copy(codes.view(E4M3), scales)


def gemm(x: torch.Tensor, weight: E4M3Copy, dtype: torch.dtype) -> torch.Tensor:
    """Compute x[M, K] w^T in `dtype` [M, N]. x: fp16, bf16 or fp32, rounded to e4m3."""
    m = x.shape[0]
    require("x", x, (m, weight.codes.shape[1]), x.device)
    codes, scales = round_padded(x, _ROWS)
    return _multiply(codes, scales, weight, dtype)[:m]


def _multiply(
    codes: torch.Tensor, scales: torch.Tensor, weight: E4M3Copy, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply e4m3 rows [M, K] with scales [M, G]."""
    if codes.device.type == "cuda":
        return torch._scaled_mm(codes, weight.codes.t(), scales, weight.scales, out_dtype=dtype)
    if codes.device.type == "meta":
        return torch.empty(codes.shape[0], weight.codes.shape[0], dtype=dtype, device=codes.device)
    x = codes.float() * scales.repeat_interleave(BLOCK_K, 1)
    w = weight.codes.float() * weight.scales.t().repeat_interleave(BLOCK_K, 1)
    return (x @ w.t()).to(dtype)
