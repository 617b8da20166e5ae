"""Weights of a gemm: floating, int4, 8-bit, or in ggml's block formats.

Letters: N output and K input features of y = x w^T.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import TypeAlias

import torch

from localchat.errors import ModelInvalid
from localchat_cuda.kernels.fp8_int8 import pack as w8_pack
from localchat_cuda.kernels.ggml import pack as ggml_pack
from localchat_cuda.kernels.int4 import pack as w4_pack

Weight: TypeAlias = torch.Tensor | w4_pack.W4 | w8_pack.W8 | ggml_pack.GgmlWeight
"""Weight of a gemm. A tensor is [N, K] in the model's dtype."""


@contextmanager
def refused(problem: str, hint: str) -> Iterator[None]:
    """Raise ModelInvalid with the problem, the reason and the hint in place of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ModelInvalid(f"{problem}: {error}.", hint=hint) from error


def bytes_of(weights: object) -> int:
    """Return the bytes on the device of a weight, or of a record of weights. Counts a shared tensor once."""
    return sum({id(tensor): tensor.nbytes for tensor in _tensors(weights)}.values())


def _tensors(weights: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of a record, and of the tuples, mappings and records in it."""
    if isinstance(weights, torch.Tensor):
        yield weights
        return
    parts: Iterable[object] = ()
    if isinstance(weights, tuple):
        parts = weights
    elif isinstance(weights, Mapping):
        parts = weights.values()
    elif is_dataclass(weights):
        parts = (getattr(weights, field.name) for field in fields(weights))
    for part in parts:
        yield from _tensors(part)


def dequantized(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return the floating weight [N, K], with columns in the order of the layer."""
    if isinstance(weight, torch.Tensor):
        return weight.to(dtype)
    if isinstance(weight, w8_pack.W8):
        return w8_pack.dense(weight, dtype)[:, : weight.features_in - weight.padding]
    if isinstance(weight, ggml_pack.GgmlWeight):
        dense = ggml_pack.dense(weight, dtype)
    else:
        dense = w4_pack.dense(weight, dtype)[:, : weight.features_in - weight.padding]
    if weight.order is None:
        return dense
    return torch.empty_like(dense).index_copy_(1, weight.order.long(), dense)


def concat_rows(parts: Iterable[Weight], n: int, dtype: torch.dtype) -> Weight:
    """Join parts along N to a weight of N rows. Parts of different kinds become floating.

    `parts`: an iterator keeps only one floating part in memory beside the result.
    ValueError for packed parts whose columns are sorted differently."""
    remaining = iter(parts)
    first = next(remaining)
    if isinstance(first, torch.Tensor):
        if len(first) == n:
            return first
        remaining = chain((first,), remaining)
        del first
        return _concat_floating(remaining, n, dtype)
    if first.features_out == n:
        return first
    weights = [first, *remaining]
    # Only parts of one kind can be joined as they are.
    if isinstance(first, w8_pack.W8):
        eight_bit = [part for part in weights if isinstance(part, w8_pack.W8)]
        if len(eight_bit) == len(weights) and (joined := w8_pack.joined(eight_bit)) is not None:
            return joined
    elif isinstance(first, ggml_pack.GgmlWeight):
        blocks = [part for part in weights if isinstance(part, ggml_pack.GgmlWeight)]
        if len(blocks) == len(weights):
            _check_order(blocks)
            tensors = [tensor for weight in blocks for tensor in weight.parts]
            return first._replace(parts=ggml_pack.with_neighbours_joined(tensors), unpacked=None)
    else:
        packed = [part for part in weights if isinstance(part, w4_pack.W4)]
        if len(packed) == len(weights):
            _check_order(packed)
            return first._replace(
                codes=torch.cat([part.codes for part in packed]),
                scale_zeros=torch.cat([part.scale_zeros for part in packed]),
                unpacked=None,
            )
    return _concat_floating(weights, n, dtype)


def all_true(condition: torch.Tensor, *, on_meta: bool) -> bool:
    """Return True if a condition holds everywhere.

    `on_meta`: the result for tensors without numbers, on the device `meta`, which compiling ahead loads."""
    return on_meta if condition.is_meta else bool(condition.all())


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
    joined = None
    row = 0
    for part in parts:
        dense = dequantized(part, dtype)
        if joined is None:
            joined = torch.empty(n, dense.shape[1], dtype=dtype, device=dense.device)
        joined[row : row + dense.shape[0]] = dense
        row += dense.shape[0]
        # Free this part before the next one is read.
        del part, dense
    assert joined is not None
    return joined


def block_of(weight: Weight, first: int, n: int, column: int = 0, k: int | None = None) -> Weight:
    """Return rows `first` to `first + n` of a floating or int4 weight.

    `k`: number of columns from `column` on; None: all. ValueError for other kinds of weights, and for columns
    that divide a group."""
    if isinstance(weight, torch.Tensor):
        last_column = None if k is None else column + k
        return weight[first : first + n, column:last_column]
    if not isinstance(weight, w4_pack.W4) or weight.order is not None:
        raise ValueError("a shared expert is stored in a format that cannot be divided")
    rows = slice(first // w4_pack.ROWS, (first + n) // w4_pack.ROWS)
    if n % w4_pack.ROWS or first % w4_pack.ROWS or column % weight.group or (k or 0) % weight.group:
        raise ValueError(f"{n} rows and {k} columns of a shared expert cut a group")
    part = weight._replace(codes=weight.codes[rows], scale_zeros=weight.scale_zeros[rows])
    if k is None:
        return part
    codes, scales, zeros = w4_pack.unpack(part)
    groups = slice(column // weight.group, (column + k) // weight.group)
    return w4_pack.pack(codes[:, column : column + k], scales[:, groups], zeros[:, groups])


def stack_rows(parts: Iterable[Weight], count: int) -> torch.Tensor | w4_pack.W4:
    """Join `count` equal parts along N, and copy each one as it is read.

    ValueError for parts of different kinds, and for kinds without a gemm of experts."""
    stack: torch.Tensor | w4_pack.W4 | None = None
    for number, part in enumerate(parts):
        if isinstance(part, w4_pack.W4):
            if part.order is not None:
                raise ValueError("their columns are sorted (act-order)")
            if part.padding:
                raise ValueError(f"their inputs are not a multiple of {w4_pack.BLOCK_K}")
            if stack is None:
                stack = part._replace(
                    codes=_empty_stack(part.codes, count),
                    scale_zeros=_empty_stack(part.scale_zeros, count),
                )
            if not isinstance(stack, w4_pack.W4) or stack.group != part.group:
                raise ValueError("they are stored in different forms")
            _place(stack.codes, part.codes, number)
            _place(stack.scale_zeros, part.scale_zeros, number)
        elif isinstance(part, torch.Tensor):
            if stack is None:
                stack = _empty_stack(part, count)
            if not isinstance(stack, torch.Tensor):
                raise ValueError("they are stored in different forms")
            _place(stack, part, number)
        else:
            raise ValueError("they are stored in 8 bits, or in a format of GGUF")
        if (stack if isinstance(stack, torch.Tensor) else stack.codes).is_meta:
            # Parts without numbers have one layout, so the first suffices: rounding hundreds takes seconds.
            break
    assert stack is not None
    return stack


def _empty_stack(part: torch.Tensor, count: int) -> torch.Tensor:
    return torch.empty(
        (count * part.shape[0], *part.shape[1:]), dtype=part.dtype, device=part.device
    )


def _place(stack: torch.Tensor, part: torch.Tensor, number: int) -> None:
    stack[number * part.shape[0] : (number + 1) * part.shape[0]] = part


def pad_rows(weight: Weight, multiple: int) -> Weight:
    """Return an int4 weight with rows of zeros up to a multiple. Other weights need none."""
    missing = -weight.features_out % multiple if isinstance(weight, w4_pack.W4) else 0
    if not missing:
        return weight
    assert isinstance(weight, w4_pack.W4)
    codes, scale_zeros = (
        torch.cat((part, part.new_zeros(missing // w4_pack.ROWS, *part.shape[1:])))
        for part in (weight.codes, weight.scale_zeros)
    )
    return weight._replace(codes=codes, scale_zeros=scale_zeros)


def reorder_rows(weight: Weight, rows: torch.Tensor) -> Weight:
    """Return the weight with output features in the order of `rows`, int64 [N].

    ValueError for kinds of weights whose rows have a fixed order."""
    if isinstance(weight, torch.Tensor):
        return weight[rows]
    if isinstance(weight, w4_pack.W4):
        return w4_pack.rows_sorted(weight, rows)
    if isinstance(weight, w8_pack.W8) and not weight.blocks:
        return weight._replace(codes=weight.codes[rows], scales=weight.scales[rows])
    raise ValueError("they are stored in blocks of rows")
