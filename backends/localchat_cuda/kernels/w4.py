"""The product of a 4-bit weight, whatever the number of rows: which form, and the activations that it reads.

Letters: M rows, N output and K input features, S splits of K.
"""

import torch

from localchat_cuda.kernels import (
    gather,
    w4_dense,
    w4_feed,
    w4_fp16,
    w4_int8,
    w4_many,
    w4_plan,
    w4_wgmma,
)
from localchat_cuda.kernels.launch import traits
from localchat_cuda.kernels.w4_pack import W4, dense

PACKED_ROWS = 512
"""With more rows the library's product of dequantized weights is faster: the first token of 512 took 16.7 ms
packed and 17.8 so on an H200, of 640 21.4 and 20.6."""


def cut_for(
    rows: int, n: int, k: int, sms: int, *, gated: bool = False
) -> w4_plan.Shape | w4_many.Cut:
    """How a product with a weight of N x K is cut. gated: of one that activates gate and up itself."""
    form = w4_plan.form_for(rows)
    if form != "many":
        return w4_plan.shape_for(form, rows, n, k, sms)
    return w4_many.gated_cut_for(rows, n) if gated else w4_many.cut_for(rows, n, k, sms)


def empty_rows(m: int, k: int, device: torch.device) -> w4_feed.Rows:
    """Activations as the form for so many rows reads them. ValueError for more than PACKED_ROWS."""
    form = w4_plan.form_for(m)
    if m > PACKED_ROWS or form == "dense":
        raise ValueError(f"rows: at most {PACKED_ROWS} wanted, {m} given")
    if form == "int8":
        return w4_feed.Int8Rows.empty(m, k, device)
    return w4_feed.HalfRows.empty(m, k, device, "lanes" if form == "fp16" else "slots")


def product(
    rows: w4_feed.Rows,
    weight: W4,
    *,
    squares: torch.Tensor | None = None,
    eps: float = 0.0,
    kernels: bool = True,
) -> torch.Tensor:
    """Partial sums fp32 [S, M, N] of activations in the weight's order. squares as in w4_int8.py. `kernels`
    False: the reference."""
    if not kernels:
        if isinstance(rows, w4_feed.Int8Rows):
            return w4_int8.reference(rows.x, rows.factors, weight, squares, eps)[None]
        return w4_fp16.reference(rows, weight, squares, eps)[None]
    device, n, k = rows.x.device, weight.features_out, weight.features_in
    m = rows.x.shape[0] // (2 if isinstance(rows, w4_feed.Int8Rows) else 1)
    cut = cut_for(m, n, k, traits(device).sms)
    if isinstance(cut, w4_many.Cut):
        assert isinstance(rows, w4_feed.HalfRows)
        out = torch.empty(cut.shape.splits, m, n, device=device)
        w4_many.product(rows, weight, out, cut, squares=squares, eps=eps)
        return out
    out = torch.empty(cut.splits, m, n, device=device)
    if isinstance(rows, w4_feed.Int8Rows):
        w4_int8.product(rows.x, rows.factors, weight, out, cut, squares=squares, eps=eps)
    else:
        call = w4_fp16.product if w4_plan.form_for(m) == "fp16" else w4_wgmma.product
        call(rows, weight, out, cut, squares=squares, eps=eps)
    return out


def gated_product(
    rows: w4_feed.Rows,
    weight: W4,
    into: w4_feed.Rows,
    *,
    squares: torch.Tensor | None = None,
    eps: float = 0.0,
    gelu: bool = False,
    order: torch.Tensor | None = None,
    kernels: bool = True,
) -> None:
    """The activation of gate times up, of a weight that holds both, as the next product reads it: `into`
    [M, N / 2], its columns in `order`. In one kernel where the form can."""
    if kernels and order is None and w4_plan.form_for(rows.x.shape[0]) == "many":
        assert isinstance(rows, w4_feed.HalfRows)
        assert isinstance(into, w4_feed.HalfRows)
        cut = w4_many.gated_cut_for(rows.x.shape[0], weight.features_out)
        w4_many.gated_product(rows, weight, into, cut, squares=squares, eps=eps, gelu=gelu)
        return
    sums = product(rows, weight, squares=squares, eps=eps, kernels=kernels)
    call = w4_feed.feed if kernels else w4_feed.reference
    call("gated", sums, into, gelu=gelu, order=order)


def product_of(x: torch.Tensor, weight: W4, *, kernels: bool = True) -> torch.Tensor:
    """Partial sums [S, M, N] of x [M, K], whose columns are as the layer has them: fp32 up to PACKED_ROWS,
    in x's dtype beyond."""
    m, (n, k), order = x.shape[0], (weight.features_out, weight.features_in), weight.order
    if kernels and 1 <= m <= PACKED_ROWS:
        rows = empty_rows(m, k, x.device)
        w4_feed.feed("plain", x[None], rows, order=order)
        return product(rows, weight)
    if order is not None:
        x = (gather.gather if kernels else gather.reference)(x, order)
    if not kernels:
        return (x.float() @ dense(weight).t())[None]
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    w4_dense.product(x, weight, out, torch.empty(n * k, dtype=x.dtype, device=x.device))
    return out[None]
