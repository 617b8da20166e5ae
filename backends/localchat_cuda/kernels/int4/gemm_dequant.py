"""W4A16 gemm for large row counts: dequantizes the weight, then calls cuBLAS.

Dequantizing costs 0.5 bytes read and 2 written for each weight, once for any number of rows, and
the gemm then runs at the library's rate.

Grid of the kernel (G / 4, T): four column blocks of one row block, 16 x 512; the next program continues in the
same rows. Exact up to the rounding of scale * (code - zero) to the output dtype. Two-step approach:
exllamav3's `reconstruct` and vLLM's AWQ path.
"""

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.int4.pack import BLOCK_K, ROWS, W4
from localchat_cuda.kernels.int4.tile_ops import (
    halves,
    load_scale_zeros,
    load_sides,
    load_tile,
    scale_of,
    side_scale,
    side_zero,
    zero_of,
)
from localchat_cuda.kernels.launch import cdiv, launch_kernel, require, traits


@triton.jit
def in_order(even, odd):
    """Return 16 x 64 numbers in fp32. Each operand has them in (half, pair, quad, i)."""
    w = tl.reshape(tl.join(even, odd), (16, 2, 2, 4, 2, 2))
    return tl.reshape(tl.permute(w, (0, 3, 1, 2, 5, 4)), (16, 64)).to(tl.float32)


@triton.jit
def _plane(out, even, odd, scale, zero, offset: tl.constexpr, pointers):
    """Store 16 x 64 weights. Each operand has offset + code."""
    w = (in_order(even, odd) - offset - zero[:, None]) * scale[:, None]
    tl.store(out + pointers, w.to(out.dtype.element_ty))


@triton.jit
def _plane_of_groups(
    out,
    even,
    odd,
    first,
    second,
    zeros,
    offset: tl.constexpr,
    s: tl.constexpr,
    GROUP: tl.constexpr,
    pointers,
):
    """`_plane` with the scales and zeros of groups s and, of 32, s + 1."""
    w = tl.reshape(tl.join(even, odd), (16, 2, 2, 4, 2, 2))
    scale = side_scale(first, second, s)[:, None]
    zero = side_zero(zeros, s).to(tl.float32)[:, None]
    if GROUP == 32:
        w = tl.reshape(tl.permute(w, (0, 1, 3, 2, 5, 4)), (16, 64)).to(tl.float32)
        low = (tl.arange(0, 64) < 32)[None, :]
        scale = tl.where(low, scale, side_scale(first, second, s + 1)[:, None])
        zero = tl.where(low, zero, side_zero(zeros, s + 1).to(tl.float32)[:, None])
    else:
        w = tl.reshape(tl.permute(w, (0, 3, 1, 2, 5, 4)), (16, 64)).to(tl.float32)
    tl.store(out + pointers, ((w - offset - zero) * scale).to(out.dtype.element_ty))


@triton.jit
def _dequantize_kernel(
    codes,
    scale_zeros,
    out,
    G: tl.constexpr,
    ASM: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
):
    block = tl.program_id(1)
    row = (block * 16 + tl.arange(0, 16)).to(tl.int64) * (G * 128)
    for r in tl.static_range(BLOCKS):
        group = tl.program_id(0) * BLOCKS + r
        if group < G:
            a, b, c, d = halves(load_tile(codes, (block * G + group) * 512, 1, 2), ASM)
            offsets = row[:, None] + group * 128 + tl.arange(0, 64)[None, :]
            if GROUP == 128:
                scale_zero = load_scale_zeros(scale_zeros, (block * G + group) * 16, 1)
                scale = scale_of(scale_zero)
                zero = zero_of(scale_zero)
                _plane(out, a, b, scale, zero, 1024, offsets)
                _plane(out, c, d, scale, zero, 64, offsets + 64)
            else:
                scales, two, zeros = load_sides(scale_zeros, block, group, G, GROUP, 1)
                _plane_of_groups(out, a, b, scales, two, zeros, 1024, 0, GROUP, offsets)
                _plane_of_groups(
                    out, c, d, scales, two, zeros, 64, 64 // GROUP, GROUP, offsets + 64
                )


def dequantize(weight: W4, out: torch.Tensor) -> None:
    """Write the weight into `out` fp16 or bf16 [N, K]."""
    n = weight.features_out
    k = weight.features_in
    device = weight.codes.device
    require("out", out, (n, k), device, torch.float16, torch.bfloat16)
    groups = k // BLOCK_K
    blocks = 4
    launch_kernel(
        _dequantize_kernel,
        (cdiv(groups, blocks), n // ROWS),
        weight.codes.view(torch.int16),
        weight.scale_zeros,
        out,
        G=groups,
        ASM=traits(device).asm,
        BLOCKS=blocks,
        GROUP=weight.group,
        num_warps=1,
    )


def gemm(x: torch.Tensor, weight: W4, out: torch.Tensor) -> None:
    """Compute out[M, N] = x[M, K] w^T of fp16 or bf16, in x's dtype or fp32."""
    n = weight.features_out
    k = weight.features_in
    device = weight.codes.device
    require("x", x, (None, k), device, torch.float16, torch.bfloat16)
    require("out", out, (x.shape[0], n), device, x.dtype, torch.float32)
    unpacked = torch.empty(n, k, dtype=x.dtype, device=device)
    dequantize(weight, unpacked)
    multiply(x, unpacked, out)


def multiply(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Compute out[M, N] = x[M, K] w^T with the library in one dtype. `out` has this dtype or is fp32."""
    if out.dtype == x.dtype:
        torch.matmul(x, weight.t(), out=out)
    elif x.device.type == "cpu":
        out.copy_(x.float() @ weight.t().float())
    else:
        torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)
