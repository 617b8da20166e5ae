"""Weights of a gemm: floating, int4, 8-bit, or in ggml's block formats.

Letters: N output and K input features of y = x w^T.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TypeAlias

import torch

from localchat_cuda.kernels.fp8_int8 import pack as w8_pack
from localchat_cuda.kernels.ggml import pack as ggml_pack
from localchat_cuda.kernels.int4 import pack as w4_pack
from localchat_cuda.weights.values import all_true

Weight: TypeAlias = torch.Tensor | w4_pack.W4 | w8_pack.W8 | ggml_pack.GgmlWeight
"""A tensor is [N, K] in the model's dtype."""


def bytes_of(weight: Weight) -> int:
    """Bytes on the device."""
    if isinstance(weight, torch.Tensor):
        return weight.numel() * weight.element_size()
    return weight.bytes


def rows_of(weight: Weight) -> int:
    """N."""
    if isinstance(weight, torch.Tensor):
        return weight.shape[0]
    return weight.features_out


def dequantized(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """The weight [N, K] in floating point, its columns in the layer's order."""
    if isinstance(weight, torch.Tensor):
        return weight.to(dtype)
    if isinstance(weight, w8_pack.W8):
        return w8_pack.dense(weight, dtype)[:, : weight.features_in - weight.padding]
    if isinstance(weight, ggml_pack.GgmlWeight):
        found = ggml_pack.dense(weight, dtype)
    else:
        found = w4_pack.dense(weight, dtype)[:, : weight.features_in - weight.padding]
    if weight.order is None:
        return found
    return torch.empty_like(found).index_copy_(1, weight.order.long(), found)


def concat_rows(parts: Iterable[Weight], n: int, dtype: torch.dtype) -> Weight:
    """Join parts along N to a weight of N rows. Parts of one kind keep it; of several, all become floating.

    Floating parts are taken one at a time, so that only one is in memory next to the result: give an iterator.
    ValueError for packed parts whose columns are sorted differently."""
    remaining = iter(parts)
    first = next(remaining)
    if rows_of(first) == n:
        return first
    if isinstance(first, torch.Tensor):
        remaining = chain((first,), remaining)
        del first
        return _concat_floating(remaining, n, dtype)
    rest = list(remaining)
    if isinstance(first, w8_pack.W8):
        bytes_ = [first, *(each for each in rest if isinstance(each, w8_pack.W8))]
        joined = w8_pack.joined(bytes_) if len(bytes_) > len(rest) else None
        if joined is None:
            return _concat_floating([first, *rest], n, dtype)
        return joined
    if isinstance(first, ggml_pack.GgmlWeight):
        blocks = [first, *(each for each in rest if isinstance(each, ggml_pack.GgmlWeight))]
        if len(blocks) <= len(rest):
            return _concat_floating([first, *rest], n, dtype)
        _check_order(blocks)
        tensors = [tensor for each in blocks for tensor in each.parts]
        return first._replace(parts=ggml_pack.with_neighbours_joined(tensors), unpacked=None)
    packed = [first, *(each for each in rest if isinstance(each, w4_pack.W4))]
    if len(packed) <= len(rest):
        return _concat_floating([first, *rest], n, dtype)
    _check_order(packed)
    return first._replace(
        codes=torch.cat([each.codes for each in packed]),
        scale_zeros=torch.cat([each.scale_zeros for each in packed]),
        unpacked=None,
    )


def _check_order(parts: Sequence[w4_pack.W4] | Sequence[ggml_pack.GgmlWeight]) -> None:
    first = parts[0].order
    for part in parts:
        if first is None or part.order is None:
            same = first is part.order
        else:
            same = all_true(first == part.order, on_meta=True)
        if not same:
            raise ValueError("parts of one gemm have their columns sorted differently")


def _concat_floating(parts: Iterable[Weight], n: int, dtype: torch.dtype) -> torch.Tensor:
    whole = None
    at = 0
    for part in parts:
        found = dequantized(part, dtype)
        if whole is None:
            whole = torch.empty(n, found.shape[1], dtype=dtype, device=found.device)
        whole[at : at + found.shape[0]] = found
        at += found.shape[0]
        del part, found  # before the next is read
    assert whole is not None
    return whole


def block_of(weight: Weight, first: int, n: int, column: int = 0, k: int | None = None) -> Weight:
    """Rows `first` to `first + n` of a floating or int4 weight, of `k` columns from `column` on (None: all).
    ValueError for others, and for columns that cut a group."""
    if isinstance(weight, torch.Tensor):
        return weight[first : first + n, column : None if k is None else column + k]
    if not isinstance(weight, w4_pack.W4) or weight.order is not None:
        raise ValueError("a shared expert is stored in a form that cannot be divided")
    rows = slice(first // w4_pack.ROWS, (first + n) // w4_pack.ROWS)
    if n % w4_pack.ROWS or first % w4_pack.ROWS or column % weight.group or (k or 0) % weight.group:
        raise ValueError(f"{n} rows and {k} columns of a shared expert cut a group")
    part = weight._replace(codes=weight.codes[rows], scale_zeros=weight.scale_zeros[rows])
    if k is None:
        return part
    codes, *sides = w4_pack.unpack(part)
    own = slice(column // weight.group, (column + k) // weight.group)
    return w4_pack.pack(codes[:, column : column + k], *(each[:, own] for each in sides))


def stack_rows(parts: Iterable[Weight], count: int) -> torch.Tensor | w4_pack.W4:
    """Join `count` equal parts along N, each copied as it comes. ValueError for parts of several kinds, and
    for kinds that no gemm of experts takes."""
    stack: torch.Tensor | w4_pack.W4 | None = None
    for number, part in enumerate(parts):
        if isinstance(part, w4_pack.W4):
            if part.order is not None:
                raise ValueError("their columns are sorted (act-order)")
            if part.padding:
                raise ValueError(f"their inputs are no multiple of {w4_pack.BLOCK_K}")
            if stack is None:
                stack = part._replace(
                    codes=_room(part.codes, count), scale_zeros=_room(part.scale_zeros, count)
                )
            if not isinstance(stack, w4_pack.W4) or stack.group != part.group:
                raise ValueError("they are stored in different forms")
            _place(stack.codes, part.codes, number)
            _place(stack.scale_zeros, part.scale_zeros, number)
        elif isinstance(part, torch.Tensor):
            stack = _room(part, count) if stack is None else stack
            if not isinstance(stack, torch.Tensor):
                raise ValueError("they are stored in different forms")
            _place(stack, part, number)
        else:
            raise ValueError("they are stored in 8 bits, or in a form of GGUF")
        if (stack if isinstance(stack, torch.Tensor) else stack.codes).is_meta:
            # Parts without numbers have one layout, so the first suffices: rounding hundreds takes seconds.
            break
    assert stack is not None
    return stack


def _room(part: torch.Tensor, count: int) -> torch.Tensor:
    return torch.empty(
        (count * part.shape[0], *part.shape[1:]), dtype=part.dtype, device=part.device
    )


def _place(stack: torch.Tensor, part: torch.Tensor, number: int) -> None:
    stack[number * part.shape[0] : (number + 1) * part.shape[0]] = part


def reorder_rows(weight: Weight, rows: torch.Tensor) -> Weight:
    """The weight whose output feature n is feature rows[n] of this one; rows int64 [N]."""
    if isinstance(weight, torch.Tensor):
        return weight[rows]
    assert isinstance(weight, w4_pack.W4), "only layers of sorted columns have their rows sorted"
    return w4_pack.rows_sorted(weight, rows)
