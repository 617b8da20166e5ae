"""The product of a 4-bit weight, whatever the number of rows: which form, and the activations that it reads.

Letters: M rows, N output and K input features, S splits of K.
"""

from importlib import import_module
from types import ModuleType
from typing import TypeAlias

import torch

from localchat_cuda.kernels import (
    gather,
    w4_dense,
    w4_feed,
    w4_fp16,
    w4_hopper_plan,
    w4_int8,
    w4_many,
    w4_plan,
    w4_wgmma,
)
from localchat_cuda.kernels.launch import traits
from localchat_cuda.kernels.w4_pack import W4, dense

_PACKED_ROWS, _HOPPER_ROWS = 512, 1024
"""With more rows the library's product of dequantized weights is faster: the first token of 512 took 16.7 ms
packed and 17.8 so on an H200, of 640 21.4 and 20.6; with Hopper's kernel of 640 18.3 and 19.2, of 1,024 25.3
and 26.5."""

hopper: ModuleType | None
"""The kernel of Hopper GPUs for many rows; None where this Triton has no Gluon, or one with other names."""
try:
    hopper = import_module("localchat_cuda.kernels.w4_hopper")
except ImportError:
    hopper = None

Cut: TypeAlias = w4_plan.Shape | w4_many.Cut | w4_hopper_plan.Cut


def packed_rows(device: torch.device) -> int:
    """Most rows of a product that reads the packed weights themselves."""
    fast = hopper is not None and hopper.serves(device)
    return _HOPPER_ROWS if fast else _PACKED_ROWS


def cut_for(rows: int, n: int, k: int, device: torch.device, *, gated: bool = False) -> Cut:
    """How a product with a weight of N x K is cut; of many rows its type says which kernel has it. gated: of a
    product that activates gate and up itself."""
    form, sms = w4_plan.form_for(rows), traits(device).sms
    if form != "many":
        return w4_plan.shape_for(form, rows, n, k, sms)
    if hopper is not None and hopper.serves(device):
        cut = w4_hopper_plan.cut_for(rows, n, k, sms, gated)
        if cut is not None:
            return cut
    return w4_many.gated_cut_for(rows, n) if gated else w4_many.cut_for(rows, n, k, sms)


def empty_rows(m: int, k: int, device: torch.device) -> w4_feed.Rows:
    """Activations as the form for so many rows reads them. ValueError for more than `packed_rows`."""
    form, most = w4_plan.form_for(m), packed_rows(device)
    if m > most or form == "dense":
        raise ValueError(f"rows: at most {most} wanted, {m} given")
    if form == "int8":
        return w4_feed.Int8Rows.empty(m, k, device)
    order: w4_feed.Order = "lanes" if form == "fp16" else "slots"
    return w4_feed.HalfRows.empty(m, k, device, order, factored=form != "many")


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
    cut = cut_for(m, n, k, device)
    if isinstance(cut, w4_plan.Shape):
        out = torch.empty(cut.splits, m, n, device=device)
        if isinstance(rows, w4_feed.Int8Rows):
            w4_int8.product(rows.x, rows.factors, weight, out, cut, squares=squares, eps=eps)
        else:
            call = w4_fp16.product if w4_plan.form_for(m) == "fp16" else w4_wgmma.product
            call(rows, weight, out, cut, squares=squares, eps=eps)
        return out
    assert isinstance(rows, w4_feed.HalfRows)
    if isinstance(cut, w4_many.Cut):
        out = torch.empty(cut.shape.splits, m, n, device=device)
        w4_many.product(rows, weight, out, cut, squares=squares, eps=eps)
    else:
        assert hopper is not None
        out = torch.empty(cut.splits, m, n, device=device)
        hopper.product(rows, weight, out, cut, squares=squares, eps=eps)
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
        m, n, k = rows.x.shape[0], weight.features_out, weight.features_in
        cut = cut_for(m, n, k, rows.x.device, gated=True)
        if isinstance(cut, w4_many.Cut):
            w4_many.gated_product(rows, weight, into, cut, squares=squares, eps=eps, gelu=gelu)
        else:
            assert hopper is not None
            hopper.gated_product(rows, weight, into, cut, squares=squares, eps=eps, gelu=gelu)
        return
    sums = product(rows, weight, squares=squares, eps=eps, kernels=kernels)
    call = w4_feed.feed if kernels else w4_feed.reference
    call("gated", sums, into, gelu=gelu, order=order)


def product_of(x: torch.Tensor, weight: W4, *, kernels: bool = True) -> torch.Tensor:
    """Partial sums [S, M, N] of x [M, K], whose columns are as the layer has them: fp32 up to
    `packed_rows`, in x's dtype beyond."""
    m, (n, k), order = x.shape[0], (weight.features_out, weight.features_in), weight.order
    if kernels and 1 <= m <= packed_rows(x.device):
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
