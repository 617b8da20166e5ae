"""Products with the fp16 or bf16 weights of chosen experts: gate and up with their activation, or down.

Letters as in choice.py; F inner features of an expert, H columns of the model.

    gate_up    x [T, H] or FewRows, weight [X * 2F, H], gate before up    out [P, F] = silu(gate) * up
               weight [X * F, H] with `square`                           out [P, F] = relu(up)^2
    down       x [P, F], weight [X * H, F], weights fp32 [P]             out [C, T, H] = weight * product

A bias [X * 2F] or [X * H] is added to the products; `limit`, `gelu`: of activation.gated in place of SiLU.
One dtype; out of `down` fp32 or that dtype: the reader adds the C parts, always in the same order. Grid
(features / BN, blocks), weights as the left operand of the tensor cores, so that few rows pad 16 columns
only; accumulation in fp32. Blocks as in choice.expert_rows: pairs themselves without `blocks`, up to
FEW_ROWS rows of x, or sorted ones.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.activation import gated as apply_gate
from localchat_cuda.kernels.activation import to_half
from localchat_cuda.kernels.experts.blocks import (
    Blocks,
    Product,
    check_bias,
    check_choices,
    expert_rows,
    grid_blocks,
    pairs_class,
)
from localchat_cuda.kernels.experts.choice import Choices, FewRows, few_arguments, inverse_rms
from localchat_cuda.kernels.launch import (
    KernelLaunch,
    cdiv,
    power_of_two,
    release,
    require,
    tensor_or,
    traits,
    wait,
)

_HALVES = (torch.float16, torch.bfloat16)


class FloatTile(NamedTuple):
    """Launch configuration."""

    features: int
    run: int
    warps: int
    stages: int


class FloatPairs(NamedTuple):
    """Constants of the kernel. For the letters see choice.py and the module docstring."""

    C: int
    N: int
    """Features of an expert, of gate and of up."""
    F: int
    """Features of the result."""
    K: int
    M: int
    """Rows of a block."""
    P_POW2: int
    """Argument of blocks.expert_rows."""
    tile: FloatTile
    RUN: int
    """Columns of a step."""
    GATED: bool
    BIASED: bool
    LIMIT: float
    GELU: bool
    SQUARE: bool
    SPLITS: int
    WIDTH: int
    """Columns of `squares`, and of x before padding."""


@triton.jit(do_not_specialize=["P", "T"])
def _float_kernel(
    x,
    weight,
    bias,
    ids,
    slots,
    owners,
    scales,
    out,
    squares,
    eps,
    P,
    T,
    shape: tl.constexpr,
    PDL: tl.constexpr,
):
    M: tl.constexpr = shape.M
    K: tl.constexpr = shape.K
    TWO: tl.constexpr = shape.GATED and not shape.SQUARE
    BN: tl.constexpr = shape.tile.features
    release(PDL)
    wait(PDL)
    m = tl.arange(0, M)
    expert, pairs, inside = expert_rows(ids, slots, owners, tl.program_id(1), P, m, M, shape.P_POW2)
    if expert < 0:
        return
    F: tl.constexpr = shape.F
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, shape.RUN)
    rows = pairs // shape.C if shape.GATED else pairs
    xs = x + rows[None, :].to(tl.int64) * K
    ws = weight + expert.to(tl.int64) * (shape.N * K) + tl.minimum(n, F - 1)[:, None] * K
    acc = tl.zeros((BN, M), tl.float32)
    up = tl.zeros((BN, M), tl.float32)
    for c in tl.range(0, K, shape.RUN, num_stages=shape.tile.stages):
        offsets = c + k
        if K % shape.RUN == 0:
            columns = tl.load(xs + offsets[:, None])
            acc = tl.dot(tl.load(ws + offsets[None, :]), columns, acc)
            if TWO:
                up = tl.dot(tl.load(ws + F * K + offsets[None, :]), columns, up)
        else:
            there = offsets < K
            columns = tl.load(xs + offsets[:, None], mask=there[:, None], other=0.0)
            acc = tl.dot(
                tl.load(ws + offsets[None, :], mask=there[None, :], other=0.0), columns, acc
            )
            if TWO:
                w = tl.load(ws + F * K + offsets[None, :], mask=there[None, :], other=0.0)
                up = tl.dot(w, columns, up)
    if shape.GATED:
        if shape.SPLITS > 0:
            inverse = inverse_rms(squares, rows, eps, shape.WIDTH, shape.SPLITS)[None, :]
            acc = acc * inverse
            up = up * inverse
        if shape.BIASED:
            own = bias + expert * shape.N + tl.minimum(n, F - 1)
            acc += tl.load(own).to(tl.float32)[:, None]
            if TWO:
                up += tl.load(own + F).to(tl.float32)[:, None]
        if shape.SQUARE:
            acc = tl.maximum(acc, 0.0, propagate_nan=tl.PropagateNan.ALL)
            acc *= acc
        else:
            acc = apply_gate(acc, up, shape.LIMIT, shape.GELU)
        position = pairs
    else:
        if shape.BIASED:
            acc += tl.load(bias + expert * shape.N + tl.minimum(n, F - 1)).to(tl.float32)[:, None]
        acc = acc * tl.load(scales + pairs)[None, :]
        position = pairs % shape.C * T + pairs // shape.C
    if out.dtype.element_ty == tl.float16:
        acc = to_half(acc)
    offsets = position[None, :].to(tl.int64) * F + n[:, None]
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=inside[None, :] & (n < F)[:, None])


def tile_for(*, gated: bool) -> FloatTile:
    """Choose the tile: of ten the fastest on an H200, with blocks of 16 and of 64 rows."""
    if gated:
        return FloatTile(64, 64, 4, 4)
    return FloatTile(128, 64, 8, 4)


def gate_up(
    x: torch.Tensor | FewRows,
    product: Product[torch.Tensor],
    choices: Choices,
    blocks: Blocks | None,
    out: torch.Tensor,
    tile: FloatTile | None = None,
) -> None:
    """Write silu(gate) * up of every pair into `out` [P, F]."""
    rows = x if isinstance(x, FewRows) else None
    values = x.x if isinstance(x, FewRows) else x
    require("out", out, (choices.ids.numel(), None), (values.dtype,), values.device)
    n = (2 - product.square) * out.shape[1]
    few = few_arguments(rows, out)
    _launch(values, product, choices, blocks, out, n, tile, few, gated=True)


def down(
    x: torch.Tensor,
    product: Product[torch.Tensor],
    choices: Choices,
    blocks: Blocks | None,
    out: torch.Tensor,
    tile: FloatTile | None = None,
) -> None:
    """Write the weighted products into `out` [C, T, H]."""
    t, c = choices.ids.shape
    require("out", out, (c, t, None), (torch.float32, x.dtype), x.device)
    require("x", x, (c * t, None), _HALVES, x.device)
    few = few_arguments(None, out)
    _launch(x, product, choices, blocks, out, out.shape[2], tile, few, gated=False)


def _launch(
    x: torch.Tensor,
    product: Product[torch.Tensor],
    choices: Choices,
    blocks: Blocks | None,
    out: torch.Tensor,
    n: int,
    tile: FloatTile | None,
    few: tuple[torch.Tensor, float, int, int],
    *,
    gated: bool,
) -> None:
    (t, c), k, device = choices.ids.shape, x.shape[1], x.device
    weight, bias, limit, gelu, square = product
    require("x", x, (None, k), _HALVES, device)
    require("weight", weight, (None, k), (x.dtype,), device)
    check_choices(choices, blocks, device)
    check_bias(bias, weight.shape[0], device)
    m = 16 if blocks is None else blocks.rows
    tile = tile or tile_for(gated=gated)
    features = n // (1 + (gated and not square))
    grid = (cdiv(features, tile.features), grid_blocks(choices, blocks))
    squares, eps, splits, width = few
    shape = FloatPairs(
        C=c,
        N=n,
        F=features,
        K=k,
        M=m,
        P_POW2=pairs_class(choices, blocks),
        tile=tile,
        RUN=min(tile.run, power_of_two(k)),
        GATED=gated,
        BIASED=bias is not None,
        LIMIT=limit,
        GELU=gelu,
        SQUARE=square,
        SPLITS=splits,
        WIDTH=width,
    )
    sorted_pairs = (choices.ids, choices.ids) if blocks is None else (blocks.slots, blocks.owners)
    KernelLaunch(_float_kernel, grid, traits(device), warps=tile.warps).run(
        *(x, weight, tensor_or(bias, choices.weights), choices.ids, *sorted_pairs),
        *(choices.weights, out, squares, eps, t * c, t, shape),
    )
