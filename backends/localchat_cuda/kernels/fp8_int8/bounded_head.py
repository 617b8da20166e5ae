"""Int8 copy of a floating output head, with bounds on its error.

Letters: N tokens of the vocabulary, K features of a last state x, w_n the row of the head for token n.

Let d_n be the row that codes and scale stand for, and r_n = w_n - d_n. The logits of the copy, a_n, and those
of the head, z_n, are sums of K products in fp32, in some order. With their roundings

    |z_n - w_n x| <= s |w_n| |x|      s = (K + 8) 2^-24: fused multiply-adds, each rounded to nearest
    |a_n - d_n x| <= t |d_n| |x|      t = (5/4 K + 64) 2^-23: tensor cores cut off what they align

and |r_n x| <= |r_n| |x| (Cauchy-Schwarz), |d_n| <= |w_n| + |r_n|:

    |z_n - a_n| <= bound_n |x|        bound_n = |r_n| + s |w_n| + t (|w_n| + |r_n|)

The lengths are computed in fp64 at the load, once, and rounded up. Code that computes |x| in fp32 rounds it up
(kernels/sampling/rescore.py). A row with an infinite or undefined number has such a bound too: it excludes
nothing. Rounding to 8 bits changes a row of normally distributed numbers by 0.8 % of its length; s and t add
0.08 % of it.
"""

from typing import NamedTuple

import torch

from localchat_cuda.kernels.fp8_int8.pack import W8, dense, whole_rows

_SLICE_ROWS = 1024


class BoundedHead(NamedTuple):
    """An int8 head, and the bounds of its error."""

    weight: W8
    bounds: torch.Tensor
    """fp32 [N]: most that a logit is off, divided by the length of the last state."""


def bounded_head(head: torch.Tensor) -> BoundedHead:
    """Round a floating head [N, K] to 8 bits and bound the error of each row."""
    weight = whole_rows(head)
    n, k = head.shape
    bounds = torch.empty(n, device=head.device)
    if head.is_meta:
        return BoundedHead(weight, bounds)
    in_order = (k + 8) * 2.0**-24
    aligned = (1.25 * weight.codes.shape[1] + 64) * 2.0**-23
    for first in range(0, n, _SLICE_ROWS):
        rows = slice(first, first + _SLICE_ROWS)
        own = head[rows].double()
        some = W8(weight.codes[rows], weight.scales[rows].double())
        error = own - dense(some, torch.float64)[:, :k]
        length = own.norm(dim=1)
        off = error.norm(dim=1)
        bound = off + in_order * length + aligned * (length + off)
        bounds[rows] = (bound * (1 + 2.0**-22)).float()
    return BoundedHead(weight, bounds)
