"""What a product reads: a floating weight, or one of the packed kinds.

Letters: N output and K input features of a product y = x w^T.
"""

from collections.abc import Iterable
from itertools import chain
from typing import TypeAlias

import torch

from localchat_cuda.kernels.fp8_int8 import pack as w8_pack
from localchat_cuda.kernels.int4 import pack as w4_pack

Weight: TypeAlias = torch.Tensor | w4_pack.W4 | w8_pack.W8
"""A tensor is [N, K] in the model's dtype."""


def bytes_of(weight: Weight) -> int:
    """What it holds on the device."""
    if isinstance(weight, torch.Tensor):
        return weight.numel() * weight.element_size()
    return weight.bytes


def rows_of(weight: Weight) -> int:
    """N."""
    return weight.shape[0] if isinstance(weight, torch.Tensor) else weight.features_out


def dequantized(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """The weight [N, K] as numbers, its columns as the layer has them."""
    if isinstance(weight, torch.Tensor):
        return weight.to(dtype)
    if isinstance(weight, w8_pack.W8):
        return w8_pack.dense(weight, dtype)
    found = w4_pack.dense(weight, dtype)
    if weight.order is None:
        return found
    return torch.empty_like(found).index_copy_(1, weight.order.long(), found)


def concat_rows(parts: Iterable[Weight], n: int, dtype: torch.dtype) -> Weight:
    """One weight of N rows from parts along N, in their order. Parts of one kind stay what they are; of
    several, all become floating. Floating parts are taken one at a time, so that no two are held beside
    the whole: give an iterator. ValueError for packed parts whose columns are sorted differently."""
    held = iter(parts)
    first = next(held)
    if rows_of(first) == n:
        return first
    if isinstance(first, torch.Tensor):
        held = chain((first,), held)
        del first
        return _filled(held, n, dtype)
    rest = list(held)
    if isinstance(first, w8_pack.W8):
        bytes_ = [first, *(each for each in rest if isinstance(each, w8_pack.W8))]
        joined = w8_pack.joined(bytes_) if len(bytes_) > len(rest) else None
        return _filled([first, *rest], n, dtype) if joined is None else joined
    packed = [first, *(each for each in rest if isinstance(each, w4_pack.W4))]
    if len(packed) <= len(rest):
        return _filled([first, *rest], n, dtype)
    if not all(_same_order(first, each) for each in packed):
        raise ValueError("parts of one product have their columns sorted differently")
    return w4_pack.W4(
        torch.cat([each.codes for each in packed]),
        torch.cat([each.steps for each in packed]),
        first.order,
    )


def _same_order(one: w4_pack.W4, other: w4_pack.W4) -> bool:
    if one.order is None or other.order is None:
        return one.order is other.order
    return torch.equal(one.order, other.order)


def _filled(parts: Iterable[Weight], n: int, dtype: torch.dtype) -> torch.Tensor:
    whole, at = None, 0
    for part in parts:
        found = dequantized(part, dtype)
        if whole is None:
            whole = torch.empty(n, found.shape[1], dtype=dtype, device=found.device)
        whole[at : at + found.shape[0]] = found
        at += found.shape[0]
        del part, found  # before the next is read
    assert whole is not None
    return whole


def reorder_rows(weight: Weight, rows: torch.Tensor) -> Weight:
    """The weight whose output feature n is feature rows[n] of this one; rows int64 [N]."""
    if isinstance(weight, torch.Tensor):
        return weight[rows]
    assert isinstance(weight, w4_pack.W4), "only layers of sorted columns have their rows sorted"
    return w4_pack.rows_sorted(weight, rows)
