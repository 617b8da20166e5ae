"""GEMM with an FP8 weight on FP8 tensor cores, for large row counts. It also rounds x to e4m3.

The makers of such checkpoints intend that for prefill; twice the rate of fp16. Compute capability 8.9 and
later.

Letters: M rows, N output and K input features, G = K / 128.

    x e4m3 [M, K]          scales fp32: [M, 1], the largest value of a row mapped to 448; for weights with
                           block scales [M, G], a scale for each 128 of a row

Row scales go through the library (torch._scaled_mm). Block scales go through a kernel: a program owns 128 x
128 results, sums 128 products in the tensor cores, and adds those up in fp32 times both scales, after
DeepSeek-V3's recipe (2024): Hopper's FP8 instructions accumulate with some 14 bits, enough for one block. Grid
(row tiles, N / 128), row tiles fastest.
"""

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.fp8_int8.pack import BLOCK, E4M3, W8
from localchat_cuda.kernels.launch import cdiv, launch_kernel, require, traits

_RUN = 1024


def supports(weight: W8) -> bool:
    """Return whether the gemm supports the weight: both extents in 16s, whole blocks along K."""
    n, k = weight.codes.shape
    return (
        not weight.whole
        and not weight.mx
        and n % 16 == 0
        and k % (BLOCK if weight.blocks else 16) == 0
    )


@triton.jit
def e4m3(v, NATIVE: tl.constexpr):
    """Round fp32 numbers of at most 448 to e4m3 as uint8, ties to even.

    Written out for GPUs without this conversion, and because the interpreter's drops a carry into the exponent.
    """
    if NATIVE:
        return v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = v.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # rounds away 20 of 23 mantissa bits; an exponent of fp32 is 120 more than that of e4m3
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    # added to 2^14, the last bit is worth 2^-9, the smallest e4m3 number
    small = (tl.abs(v) + 16384.0).to(tl.int32, bitcast=True) & 15
    return (tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 128)).to(tl.uint8)


@triton.jit
def _size(v):
    """|v| as an integer, which keeps the order, with NaN above all: a maximum of floats would drop it."""
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale(peak):
    """The scale for a largest size: NaN for NaN, whose codes are numbers."""
    scale = peak.to(tl.float32, bitcast=True) / 448.0
    return tl.maximum(scale, 1e-12, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _rows_kernel(x, codes, scales, K: tl.constexpr, RUN: tl.constexpr, NATIVE: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, RUN)
    peak = tl.zeros((RUN,), tl.int32)
    for c in tl.range(0, K, RUN):
        v = tl.load(x + m * K + c + i, mask=c + i < K, other=0.0).to(tl.float32)
        peak = tl.maximum(peak, _size(v))
    scale = _scale(tl.max(peak, 0))
    tl.store(scales + m, scale)
    for c in tl.range(0, K, RUN):
        v = tl.load(x + m * K + c + i, mask=c + i < K, other=0.0).to(tl.float32)
        tl.store(codes + m * K + c + i, e4m3(v / scale, NATIVE), mask=c + i < K)


@triton.jit(do_not_specialize=["M", "row_stride", "group_stride"])
def _groups_kernel(
    x,
    codes,
    scales,
    M,
    row_stride,
    group_stride,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64)
    G: tl.constexpr = K // 128
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    offsets = m * K + g[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = (g < G)[:, None]
    in_x = (g < tl.where(m < M, G, 0))[:, None]
    v = tl.load(x + offsets, mask=in_x, other=0.0).to(tl.float32)
    scale = _scale(tl.max(_size(v), 1))
    tl.store(scales + m * row_stride + g * group_stride, scale, mask=g < G)
    tl.store(codes + offsets, e4m3(v / scale[:, None], NATIVE), mask=inside)


def round_rows(x: torch.Tensor, *, blocks: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Round x to e4m3 [M, K] with scales [M, 1], with `blocks` [M, G]."""
    m, k = x.shape
    require("x", x, (m, k), x.device)
    scales = torch.empty(m, k // BLOCK if blocks else 1, device=x.device)
    if blocks:
        return _round_groups(x, scales), scales
    codes = torch.empty(m, k, dtype=torch.uint8, device=x.device)
    launch_kernel(
        _rows_kernel,
        (m,),
        x,
        codes,
        scales,
        K=k,
        RUN=_RUN,
        NATIVE=traits(x.device).fp8,
        num_warps=4,
    )
    return codes.view(E4M3), scales


def round_padded(x: torch.Tensor, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round x to e4m3 [R, K] with scales [R, G], as the library reads them.

    R is M padded with zeros to a multiple. Scales of one column are contiguous."""
    m, k = x.shape
    require("x", x, (m, k), x.device)
    rows = -(-m // multiple) * multiple
    scales = torch.empty(k // BLOCK, rows, device=x.device).t()
    return _round_groups(x, scales), scales


def _round_groups(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Write `scales` [R, G] of any strides. Return e4m3 [R, K], with zeros below the rows of x."""
    m, k = x.shape
    rows, groups = scales.shape
    codes = torch.empty(rows, k, dtype=torch.uint8, device=x.device)
    launch_kernel(
        _groups_kernel,
        (rows, cdiv(groups, 8)),
        x,
        codes,
        scales,
        m,
        *scales.stride(),
        K=k,
        GROUPS=8,
        NATIVE=traits(x.device).fp8,
        num_warps=2,
    )
    return codes.view(E4M3)


@triton.jit(do_not_specialize=["M"])
def _blocks_kernel(
    x,
    factors,
    codes,
    scales,
    out,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    G: tl.constexpr = K // 128
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    row = tl.minimum(m, M - 1)
    column = tl.minimum(n, N - 1)
    k = tl.arange(0, 128)
    left = x + row.to(tl.int64)[:, None] * K + k[None, :]
    right = codes + column.to(tl.int64)[None, :] * K + k[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    for g in tl.range(0, G, 1, num_stages=STAGES):
        part = tl.dot(tl.load(left + g * 128), tl.load(right + g * 128))
        scale = tl.load(factors + row * G + g) * tl.load(scales + tl.program_id(1) * G + g)
        total += part * scale[:, None]
    pointers = out + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def gemm(x: torch.Tensor, weight: W8) -> torch.Tensor:
    """Compute x[M, K] w^T.

    [M, N] in bf16 for row scales, as the library returns it, else in x's dtype.
    """
    m, (n, k) = x.shape[0], weight.codes.shape
    if not supports(weight):
        raise ValueError(f"weight: e4m3 with both extents in 16s wanted, {n}x{k} given")
    require("weight.codes", weight.raw, (n, k), x.device, torch.uint8)
    codes, factors = round_rows(x, blocks=weight.blocks)
    if not weight.blocks:
        return torch._scaled_mm(
            codes, weight.codes.t(), factors, weight.scales[None], out_dtype=torch.bfloat16
        )
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    launch_kernel(
        _blocks_kernel,
        (cdiv(m, 128), cdiv(n, BLOCK)),
        codes,
        factors,
        weight.codes,
        weight.scales,
        out,
        m,
        N=n,
        K=k,
        BM=128,
        BN=BLOCK,
        STAGES=3,
        num_warps=8,
    )
    return out
