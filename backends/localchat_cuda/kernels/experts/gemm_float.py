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
    constants,
    expert_rows,
    grid_blocks,
)
from localchat_cuda.kernels.experts.choice import Choices, FewRows, few_arguments, inverse_rms
from localchat_cuda.kernels.launch import (
    KernelLaunch,
    cdiv,
    power_of_two,
    release,
    tensor_or,
    traits,
    wait,
)


class FloatTile(NamedTuple):
    """Launch configuration."""

    features: int
    run: int
    """Columns of a step."""
    warps: int
    stages: int


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
    RUN: tl.constexpr = shape.tile.run
    release(PDL)
    wait(PDL)
    m = tl.arange(0, M)
    expert, pairs, inside = expert_rows(ids, slots, owners, tl.program_id(1), P, m, M, shape.P_POW2)
    if expert < 0:
        return
    F: tl.constexpr = shape.F
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, RUN)
    rows = pairs // shape.C if shape.GATED else pairs
    xs = x + rows[None, :].to(tl.int64) * K
    ws = weight + expert.to(tl.int64) * (shape.N * K) + tl.minimum(n, F - 1)[:, None] * K
    acc = tl.zeros((BN, M), tl.float32)
    up = tl.zeros((BN, M), tl.float32)
    for c in tl.range(0, K, RUN, num_stages=shape.tile.stages):
        offsets = c + k
        if K % RUN == 0:
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


def tile_for(k: int, *, gated: bool) -> FloatTile:
    """Choose the tile for K columns: of ten the fastest on an H200, with blocks of 16 and of 64 rows."""
    run = min(64, power_of_two(k))
    if gated:
        return FloatTile(64, run, 4, 4)
    return FloatTile(128, run, 8, 4)


def multiply(
    x: torch.Tensor | FewRows,
    product: Product,
    choices: Choices,
    blocks: Blocks | None,
    out: torch.Tensor,
) -> None:
    """Write the product of each pair into `out`; shapes in the module docstring."""
    values, squares, eps = few_arguments(x, out)
    rows = 16 if blocks is None else blocks.rows
    tile = tile_for(values.shape[1], gated=out.dim() == 2)
    gpu = traits(out.device)
    shape = constants(gpu, x, product, choices, blocks, out, rows, tile)
    t, c = choices.ids.shape
    grid = (cdiv(shape.F, tile.features), grid_blocks(choices, blocks))
    sorted_pairs = (choices.ids, choices.ids) if blocks is None else (blocks.slots, blocks.owners)
    KernelLaunch(_float_kernel, grid, gpu, warps=tile.warps).run(
        *(values, product.weight, tensor_or(product.bias, choices.weights), choices.ids),
        *(*sorted_pairs, choices.weights, out, squares, eps, t * c, t, shape),
    )
