"""Permutes the columns of activations, for a gemm whose weight has sorted columns (int4/pack.W4.order).

Letters: T rows, K columns.

    x     fp16, bf16 or fp32 [T, K]
    order int32 [K], a permutation
    out   as x: out[t, k] = x[t, order[k]]

Grid (T / ROWS, K / BLOCK). A row is a few KB, so that its scattered reads come from the L1 cache, and writes
are in order. torch.index_select along the inner dimension does the same; ROWS shares the reads of
`order` among rows.
"""

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.launch import cdiv, launch_kernel, require

_ROWS = 8
_BLOCK = 512


def reference(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Permute the columns with plain torch."""
    return x.index_select(1, order)


@triton.jit(do_not_specialize=["T"])
def _gather_kernel(x, order, out, T, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < K
    source = tl.load(order + k, mask=inside, other=0)
    for row in tl.static_range(ROWS):
        t = tl.program_id(0) * ROWS + row
        there = k < tl.where(t < T, K, 0)
        tl.store(out + t * K + k, tl.load(x + t * K + source, mask=there, other=0.0), mask=there)


def gather(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return the rows of `x` with their columns in `order`; shapes in the module docstring."""
    t, k = x.shape
    require("x", x, (t, k), x.device)
    require("order", order, (k,), x.device, torch.int32)
    out = torch.empty_like(x)
    if t:
        grid = (cdiv(t, _ROWS), cdiv(k, _BLOCK))
        launch_kernel(
            _gather_kernel, grid, x, order, out, t, K=k, ROWS=_ROWS, BLOCK=_BLOCK, num_warps=4
        )
    return out
