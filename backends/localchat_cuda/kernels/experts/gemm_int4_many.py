"""Products of sorted rows with int4 weights of their experts: gate and up with their activation, or down.

Letters as in gemm_float.py.

    gate_up    x fp16 [T, H], weight W4 of X * 2F rows    out fp16 [P, F] = silu(gate) * up
    down       x fp16 [P, F], weight W4 of X * H rows     out fp32, fp16 or bf16 [C, T, H] = weight * product

x and the result of gate_up have their columns in slot order (int4/activations.py), as many as the weight that
reads them. Biases and `limit` as in gemm_float.py. Grid (features of a program, blocks of sorted pairs);
weights are scaled in registers before they are multiplied, as in int4/gemm_tiled.py, sums are fp32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.activation import gated as apply_gate
from localchat_cuda.kernels.activation import to_half
from localchat_cuda.kernels.experts.blocks import Blocks, Product, constants, expert_rows
from localchat_cuda.kernels.experts.choice import Choices
from localchat_cuda.kernels.int4.activations import packed_cell
from localchat_cuda.kernels.int4.e2m1 import scaled_floats
from localchat_cuda.kernels.int4.gemm_tiled import landed, load_words, scaled_block, scaled_groups
from localchat_cuda.kernels.int4.pack import W4
from localchat_cuda.kernels.launch import KernelLaunch, release, tensor_or, traits, wait


class ManyTile(NamedTuple):
    """Launch configuration."""

    blocks: int
    """Row blocks of a warp; of gate_up even, half of them of gate."""
    warps: int
    stages: int


@triton.jit(do_not_specialize=["P", "T"])
def _many_kernel(
    x,
    codes,
    scale_zeros,
    bias,
    slots,
    owners,
    scales,
    out,
    P,
    T,
    many: tl.constexpr,
    PDL: tl.constexpr,
):
    ROWS: tl.constexpr = many.M
    BLOCKS: tl.constexpr = many.tile.blocks
    WARPS: tl.constexpr = many.tile.warps
    G: tl.constexpr = many.K // 128
    BN: tl.constexpr = 16 * BLOCKS * WARPS
    F: tl.constexpr = many.F
    # Row blocks of a program: contiguous, or half of gate and as many of up, F features further on.
    OWN: tl.constexpr = BLOCKS // 2 if many.GATED else BLOCKS
    S: tl.constexpr = 128 // many.GROUP
    LINE: tl.constexpr = G * 16 if S == 1 or many.E2M1 else G * 8 * S + (G * S + 7) // 8 * 16
    release(PDL)
    wait(PDL)
    m = tl.arange(0, ROWS)
    expert, pairs, inside = expert_rows(slots, slots, owners, tl.program_id(1), P, m, ROWS, 0)
    if expert < 0:
        return
    rows = pairs // many.C if many.GATED else pairs
    codes += expert.to(tl.int64) * (many.N // 16 * G * 512)
    scale_zeros += expert.to(tl.int64) * (many.N // 16 * LINE)
    first_block = tl.program_id(0) * (OWN * WARPS)
    k = tl.arange(0, 32)
    i = tl.arange(0, BN * 32)
    # block of a feature: of gate or up, then of its warp's own ones
    b = i // (512 * WARPS)
    run = i % 256 + i // (256 * WARPS) % 2 * 256
    run += (i // 256 % WARPS + b % OWN * WARPS + b // OWN * (F // 16)) * (G * 512)
    n = tl.arange(0, BN)
    b = n // (16 * WARPS)
    side = (n // 16 % WARPS + b % OWN * WARPS + b // OWN * (F // 16)) * LINE + n % 16
    row_at = rows[None, :].to(tl.int64) * many.K + k[:, None]
    acc = tl.zeros((BN, ROWS), tl.float32)
    for g in tl.range(0, G, num_stages=many.tile.stages):
        w = load_words(codes + (first_block * G + g) * 512, run, BLOCKS, WARPS)
        if many.E2M1:
            exponents = tl.load(scale_zeros + first_block * LINE + g * 16 + side)
            wa, wb, wc, wd = scaled_floats(w, exponents, many.ASM)
        elif many.GROUP == 128:
            line = scale_zeros + first_block * LINE + g * 16
            wa, wb, wc, wd = scaled_block(w, line, side, many.ASM)
        else:
            line = scale_zeros + first_block * LINE
            wa, wb, wc, wd = scaled_groups(w, line, g, side, G, many.GROUP, many.ASM)
        xg = x + g * 128 + row_at
        acc = tl.dot(wa, tl.load(xg), acc)
        acc = tl.dot(wb, tl.load(xg + 32), acc)
        acc = tl.dot(wc, tl.load(xg + 64), acc)
        acc = landed(tl.dot(wd, tl.load(xg + 96), acc), many.ASM)
    if many.GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, BN // 2, ROWS)), (1, 2, 0)))
        feature = first_block * 16 + tl.arange(0, BN // 2)
        if many.BIASED:
            gate += tl.load(bias + expert * many.N + feature).to(tl.float32)[:, None]
            up += tl.load(bias + expert * many.N + F + feature).to(tl.float32)[:, None]
        offsets = pairs[None, :].to(tl.int64) * F + packed_cell(feature, many.INTO, False)[:, None]
        tl.store(
            out + offsets, to_half(apply_gate(gate, up, many.LIMIT, False)), mask=inside[None, :]
        )
    else:
        if many.BIASED:
            acc += tl.load(bias + expert * many.N + first_block * 16 + n).to(tl.float32)[:, None]
        acc = acc * tl.load(scales + pairs)[None, :]
        if out.dtype.element_ty == tl.float16:
            acc = to_half(acc)
        position = (pairs % many.C * T + pairs // many.C).to(tl.int64)
        offsets = position[None, :] * F + (first_block * 16 + n)[:, None]
        tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=inside[None, :])


def tile_for(rows: int, features: int, *, gated: bool) -> ManyTile:
    """Choose the tile for blocks of `rows` pairs and the features of an expert.

    It is the fastest of seven on an H200, for blocks of 16 and of 64.
    """
    if rows > 32:
        if gated and features % 128 == 0:
            return ManyTile(4, 4, 3)
        if not gated and features % 256 == 0:
            return ManyTile(2, 8, 3)
    blocks = 2 if gated or features % 128 == 0 else 1
    return ManyTile(blocks, 4, 4 if gated and rows <= 32 else 3)


def multiply(
    x: torch.Tensor,
    product: Product,
    choices: Choices,
    blocks: Blocks,
    out: torch.Tensor,
) -> None:
    """Write the product of each pair into `out`; shapes in the module docstring."""
    weight = product.weight
    assert isinstance(weight, W4)
    tile = tile_for(blocks.rows, out.shape[-1], gated=out.dim() == 2)
    gpu = traits(out.device)
    many = constants(gpu, x, product, choices, blocks, out, blocks.rows, tile)
    own = 16 * tile.warps * tile.blocks // (1 + many.GATED)
    if many.F % own:
        raise ValueError(f"out: features in {own}s wanted, {many.F} given")
    tensors = (
        x,
        weight.codes.view(torch.int16),
        weight.scale_zeros,
        tensor_or(product.bias, choices.weights),
    )
    t, c = choices.ids.shape
    grid = (many.F // own, blocks.owners.shape[0])
    KernelLaunch(_many_kernel, grid, gpu, warps=tile.warps).run(
        *tensors, blocks.slots, blocks.owners, choices.weights, out, t * c, t, many
    )
