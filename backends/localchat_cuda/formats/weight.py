"""What a product reads: a floating weight, or one of the packed kinds.

Letters: N output and K input features of a product y = x w^T.
"""

from collections.abc import Iterable
from typing import TypeAlias

import torch

from localchat_cuda.kernels import w4_pack

Weight: TypeAlias = torch.Tensor | w4_pack.W4
"""A tensor is [N, K] in the model's dtype."""


def bytes_of(weight: Weight) -> int:
    """What it holds on the device."""
    if isinstance(weight, torch.Tensor):
        return weight.numel() * weight.element_size()
    return weight.bytes


def rows_of(weight: Weight) -> int:
    """N."""
    return weight.shape[0] if isinstance(weight, torch.Tensor) else weight.features_out


def floating(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """The weight [N, K] as numbers."""
    return weight.to(dtype) if isinstance(weight, torch.Tensor) else w4_pack.dense(weight, dtype)


def join(parts: Iterable[Weight], n: int, dtype: torch.dtype) -> Weight:
    """One weight of N rows from parts along N, in their order. Parts of one kind stay what they are; of
    several, all become floating. Floating parts are taken one at a time, so that no two are held beside
    the whole: give an iterator."""
    held = iter(parts)
    first = next(held)
    if rows_of(first) == n:
        return first
    if isinstance(first, torch.Tensor):
        return _filled(first, held, n, dtype)
    rest = list(held)
    packed = [first, *(each for each in rest if isinstance(each, w4_pack.W4))]
    if len(packed) <= len(rest):
        return _filled(first, rest, n, dtype)
    return w4_pack.W4(*(torch.cat(each) for each in zip(*packed, strict=True)))


def _filled(first: Weight, rest: Iterable[Weight], n: int, dtype: torch.dtype) -> torch.Tensor:
    found = floating(first, dtype)
    whole = torch.empty(n, found.shape[1], dtype=dtype, device=found.device)
    whole[: found.shape[0]] = found
    at = found.shape[0]
    del first, found
    for each in rest:
        whole[at : at + rows_of(each)] = floating(each, dtype)
        at += rows_of(each)
    return whole
