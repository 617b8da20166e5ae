"""Products of up to 8 rows with int4 weights of their experts: gate and up with their activation, or down.

Letters as in gemm_float.py; G = K / 128 column blocks of the weight. Biases and `limit` as there.

    gate_up    rows choice.FewRows, weight W4 of X * 2F rows    out fp16 [P, F] = silu(gate) * up
    down       x fp16 [P, F], weight W4 of X * H rows           out fp32 [C, T, H] = weight * product

Rows and the result of gate_up have their columns in lane order (int4/activations.py). Grid (features / 16, P):
a program owns 16 features, of gate and of up; its warps take neighbouring column blocks, each of which
counts once, and are summed at the end. The first pair of an expert takes the rows of all, the other pairs'
programs end at once, so each weight is read once.

Codes become fp16(offset + code) by one masked operation; the sums of x that remove offset and zero come from
the tensor cores, too, as products with ones, where the accumulators need them: so the writer of x stores no
sums. Scale and zero are applied once per group, sums are fp32. Unpacking as in int4/gemm_fp16.py;
e2m1 codes have neither offset nor zero.

Columns of their own: of the eight columns of an `mma`, 1 to 4 rows would leave some that repeat products and
the scale work of others. For e2m1, M = 2 (1 and 2 rows) or 4 (3 and 4), the groups of a column block have them
instead: an operand holds x of group d in the columns d * M to (d + 1) * M and zeros elsewhere, the products of
8 / M groups go to one accumulator, each lane scales one group, and the columns are summed at the end. M = 8:
every group in turn, for all rows.
"""
# mypy: disable-error-code="assignment, var-annotated"
# (Triton unrolls loops over tuples that grow; no type says that)

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.activation import gated as apply_gate
from localchat_cuda.kernels.activation import to_half
from localchat_cuda.kernels.experts.blocks import Product, constants, expert_rows
from localchat_cuda.kernels.experts.choice import Choices, FewRows, few_arguments, inverse_rms
from localchat_cuda.kernels.int4.activations import packed_cell
from localchat_cuda.kernels.int4.e2m1 import float_halves, group_scale
from localchat_cuda.kernels.int4.pack import BLOCK_K, W4
from localchat_cuda.kernels.int4.tile_ops import (
    by_feature,
    halves,
    load_block,
    load_columns,
    scale_of,
    side_scale,
    side_zero,
    zero_of,
)
from localchat_cuda.kernels.launch import KernelLaunch, release, tensor_or, traits, wait


class FewTile(NamedTuple):
    """Launch configuration."""

    warps: int
    """That share the column blocks."""
    depth: int
    """Chunks of `warps` column blocks loaded before the first is used."""
    blocks: int = 1
    """Row blocks of a program, of gate and of up."""
    registers: int = 0
    """Register limit for the compiler; 0: none."""


@triton.jit
def _load(codes, scale_zeros, block, group, few: tl.constexpr, DEPTH: tl.constexpr):
    """Load codes, and words of scales and zeros, of DEPTH chunks of a row block.

    The first column block is `group`.
    """
    WARPS: tl.constexpr = few.tile.warps
    G: tl.constexpr = few.K // 128
    SIDES: tl.constexpr = few.GROUP != 128 and not few.E2M1
    ws = ()
    ss = ()
    for d in tl.static_range(DEPTH):
        column = group + d * WARPS
        w, s = load_block(codes, scale_zeros, block, column, G, few.GROUP, SIDES, WARPS, 2)
        ws = ws + w
        ss = ss + s
    return ws, ss


@triton.jit
def _load_x(x, rows, group, few: tl.constexpr, DEPTH: tl.constexpr):
    """Load x of DEPTH chunks: of each chunk and group of codes two operands, and x's sums (none of E2M1,
    whose codes have no offset)."""
    WARPS: tl.constexpr = few.tile.warps
    S: tl.constexpr = 4 if few.GROUP == 32 else 2
    RUN: tl.constexpr = 8 if few.GROUP == 32 else 16
    if WARPS == 1:
        ones = tl.full((16, 2 * RUN), 1.0, tl.float16)
    else:
        ones = tl.full((WARPS, 16, 2 * RUN), 1.0, tl.float16)
    result = ()
    for d in tl.static_range(DEPTH):
        for s in tl.static_range(S):
            pointer = x + (group + d * WARPS) * 128 + s // (S // 2) * 64 + s % (S // 2) * 4
            xa = load_columns(pointer, rows, WARPS, 2, RUN == 8)
            xb = load_columns(pointer + 32, rows, WARPS, 2, RUN == 8)
            if few.E2M1:
                result = result + (xa, xb, 0)
            else:
                result = result + (xa, xb, tl.dot(ones, xb, tl.dot(ones, xa)))
    return result


@triton.jit
def _row(v, WARPS: tl.constexpr):
    """Let v [8] be broadcast over features, of all warps."""
    if WARPS == 1:
        return v[None, :]
    else:
        return v[None, None, :]


@triton.jit
def _add_group(sums, a, b, xs, index: tl.constexpr, scale, zero, few: tl.constexpr):
    """Add the products of a group of codes to the sums of all rows. `zero` includes the codes' offset."""
    acc = tl.dot(b, xs[3 * index + 1], tl.dot(a, xs[3 * index]))
    if not few.E2M1:
        acc -= by_feature(zero, few.tile.warps) * xs[3 * index + 2]
    return sums + by_feature(scale, few.tile.warps) * acc


@triton.jit
def _without(scale, SKIP: tl.constexpr, WARPS: tl.constexpr):
    """Set the scales of the first SKIP warps to zero: their column blocks were counted before."""
    if SKIP > 0:
        scale = tl.where((tl.arange(0, WARPS) >= SKIP)[:, None], scale, 0.0)
    return scale


@triton.jit
def _multiply(sums, ws, ss, xs, few: tl.constexpr, DEPTH: tl.constexpr, SKIP: tl.constexpr):
    """Add the products of DEPTH chunks of one row block, of all warps but the first SKIP."""
    WARPS: tl.constexpr = few.tile.warps
    S: tl.constexpr = 4 if few.GROUP == 32 else 2
    H: tl.constexpr = S // 2
    for d in tl.static_range(DEPTH):
        for h in tl.static_range(H):
            # Group h of low nibbles, then group H + h of high ones.
            if few.E2M1:
                e, f, g, i = float_halves(ws[d * H + h], few.ASM)
                scale = _without(group_scale(ss[d], h, few.ASM), SKIP, WARPS)
                sums = _add_group(sums, e, f, xs, d * S + h, scale, 0, few)
                scale = _without(group_scale(ss[d], H + h, few.ASM), SKIP, WARPS)
                sums = _add_group(sums, g, i, xs, d * S + H + h, scale, 0, few)
            elif few.GROUP == 128:
                e, f, g, i = halves(ws[d * H + h], few.ASM)
                scale = _without(scale_of(ss[d]), SKIP, WARPS)
                zero = zero_of(ss[d])
                sums = _add_group(sums, e, f, xs, d * S + h, scale, zero + 1024.0, few)
                sums = _add_group(sums, g, i, xs, d * S + H + h, scale, zero + 64.0, few)
            else:
                e, f, g, i = halves(ws[d * H + h], few.ASM)
                first = ss[3 * d]
                second = ss[3 * d + 1]
                zeros = ss[3 * d + 2]
                scale = _without(side_scale(first, second, h), SKIP, WARPS)
                zero = side_zero(zeros, h).to(tl.float32)
                sums = _add_group(sums, e, f, xs, d * S + h, scale, zero + 1024.0, few)
                scale = _without(side_scale(first, second, H + h), SKIP, WARPS)
                zero = side_zero(zeros, H + h).to(tl.float32)
                sums = _add_group(sums, g, i, xs, d * S + H + h, scale, zero + 64.0, few)
    return sums


@triton.jit
def _own(x, d: tl.constexpr, few: tl.constexpr):
    """Zero the operand x outside columns d * M to (d + 1) * M."""
    there = tl.where(tl.arange(0, 8) // few.M == d, -1, 0).to(tl.int16).to(tl.float16, bitcast=True)
    there = _row(there, few.tile.warps)
    if few.ASM:
        return tl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;",
            "=r,r,r",
            [x, tl.broadcast_to(there, x.shape)],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        kept = x.to(tl.int16, bitcast=True) & there.to(tl.int16, bitcast=True)
        return kept.to(tl.float16, bitcast=True)


@triton.jit
def _load_x_apart(x, rows, group, few: tl.constexpr, DEPTH: tl.constexpr):
    """Load x of DEPTH chunks: of each, two of all four groups (M = 2), or two of groups 0 and 2 and two
    of groups 1 and 3 (M = 4), as a word of codes has them."""
    WARPS: tl.constexpr = few.tile.warps
    d = tl.arange(0, 8) // few.M
    rows += d // 2 * 64 + d % 2 * 4 if few.M == 2 else d * 64
    result = ()
    for c in tl.static_range(DEPTH):
        for h in tl.static_range(few.M // 2):
            pointer = x + (group + c * WARPS) * 128 + h * 4
            result = result + (
                load_columns(pointer, rows, WARPS, 2, True),
                load_columns(pointer + 32, rows, WARPS, 2, True),
            )
    return result


@triton.jit
def _add_word(acc, codes, xa, xb, low: tl.constexpr, high: tl.constexpr, few: tl.constexpr):
    """Add the products of the two groups in a word of codes.

    Their columns have the numbers `low` and `high`.
    """
    e, f, g, i = float_halves(codes, few.ASM)
    acc = tl.dot(e, _own(xa, low, few), acc)
    acc = tl.dot(f, _own(xb, low, few), acc)
    acc = tl.dot(g, _own(xa, high, few), acc)
    return tl.dot(i, _own(xb, high, few), acc)


@triton.jit
def _multiply_apart(sums, ws, ss, xs, few: tl.constexpr, DEPTH: tl.constexpr, SKIP: tl.constexpr):
    """Multiply e2m1 codes for M rows, 2 or 4, with separate columns for 8 / M groups."""
    M: tl.constexpr = few.M
    WARPS: tl.constexpr = few.tile.warps
    for c in tl.static_range(DEPTH):
        sides = by_feature(ss[c], WARPS)
        s = _row(tl.arange(0, 8) // M * (M // 2), WARPS)
        acc = tl.zeros_like(sums)
        for h in tl.static_range(2):
            # h and h + 2 are the groups of this word; at M = 4 the only ones of its operands
            xa = xs[c * M + (M - 2) * h]
            xb = xs[c * M + (M - 2) * h + 1]
            if M == 2:
                acc = _add_word(acc, ws[2 * c + h], xa, xb, h, h + 2, few)
            else:
                acc = _add_word(acc, ws[2 * c + h], xa, xb, 0, 1, few)
            if M == 4 or h == 1:
                scale = group_scale(sides, s + (h if M == 4 else 0), few.ASM)
                if SKIP > 0:
                    scale = tl.where((tl.arange(0, WARPS) >= SKIP)[:, None, None], scale, 0.0)
                sums += scale * acc
                acc = tl.zeros_like(sums)
    return sums


@triton.jit
def _step(
    sums, x, weight, rows, block, group, few: tl.constexpr, DEPTH: tl.constexpr, SKIP: tl.constexpr
):
    """Add the products of DEPTH chunks of all row blocks, whose weights are loaded together."""
    ws, ss = _load_tiles(weight, block, group, few, DEPTH)
    return _multiply_tiles(sums, ws, ss, x, rows, group, few, DEPTH, SKIP)


@triton.jit
def _load_tiles(weight, block, group, few: tl.constexpr, DEPTH: tl.constexpr):
    BLOCKS: tl.constexpr = few.tile.blocks
    TILES: tl.constexpr = few.tile.blocks * (1 + few.GATED)
    codes, scale_zeros = weight
    ws = ()
    ss = ()
    for r in tl.static_range(TILES):
        tile = block + r % BLOCKS + r // BLOCKS * (few.F // 16)
        w, s = _load(codes, scale_zeros, tile, group, few, DEPTH)
        ws = ws + (w,)
        ss = ss + (s,)
    return ws, ss


@triton.jit
def _multiply_tiles(
    sums, ws, ss, x, rows, group, few: tl.constexpr, DEPTH: tl.constexpr, SKIP: tl.constexpr
):
    TILES: tl.constexpr = few.tile.blocks * (1 + few.GATED)
    if few.M < 8:
        xs = _load_x_apart(x, rows, group, few, DEPTH)
    else:
        xs = _load_x(x, rows, group, few, DEPTH)
    grown = ()
    for r in tl.static_range(TILES):
        if few.M < 8:
            grown = grown + (_multiply_apart(sums[r], ws[r], ss[r], xs, few, DEPTH, SKIP),)
        else:
            grown = grown + (_multiply(sums[r], ws[r], ss[r], xs, few, DEPTH, SKIP),)
    return grown


@triton.jit
def _total(v, few: tl.constexpr):
    """The sum of all warps, and of the groups that have columns of their own: [16, 8] or [16, M]."""
    M: tl.constexpr = few.M
    if few.tile.warps > 1:
        v = tl.sum(v, 0)
    if M < 8:
        v = tl.sum(tl.reshape(v, (16, 8 // M, M)), 1)
    if few.E2M1:
        v = v * 16384.0  # float_halves gives 2^-14 of the values
    return v


@triton.jit(do_not_specialize=["P", "T"])
def _few_kernel(
    x,
    codes,
    scale_zeros,
    bias,
    choices,
    out,
    squares,
    eps,
    P,
    T,
    few: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCKS: tl.constexpr = few.tile.blocks
    WARPS: tl.constexpr = few.tile.warps
    DEPTH: tl.constexpr = few.tile.depth
    TILES: tl.constexpr = few.tile.blocks * (1 + few.GATED)
    G: tl.constexpr = few.K // 128
    CHUNKS: tl.constexpr = G // WARPS
    S: tl.constexpr = 128 // few.GROUP
    LINE: tl.constexpr = G * 16 if S == 1 or few.E2M1 else G * 8 * S + (G * S + 7) // 8 * 16
    if few.GATED:
        # In this order, the choice of experts has ended when `down` starts, which may read them
        # immediately.
        wait(PDL)
    release(PDL)
    m = tl.arange(0, 8) % few.M
    pair = tl.program_id(1)
    ids = choices.ids
    expert, pairs, inside = expert_rows(ids, ids, ids, pair, P, m, 8, few.P_POW2)
    if expert < 0:
        return
    rows = (pairs // few.C if few.GATED else pairs) * few.K
    block = tl.program_id(0) * BLOCKS
    codes += expert.to(tl.int64) * (few.N // 16 * G * 512)
    scale_zeros += expert.to(tl.int64) * (few.N // 16 * LINE)
    weight = (codes, scale_zeros)
    sums = ()
    for _ in tl.static_range(TILES):
        if WARPS == 1:
            sums = sums + (tl.zeros((16, 8), tl.float32),)
        else:
            sums = sums + (tl.zeros((WARPS, 16, 8), tl.float32),)
    ws, ss = _load_tiles(weight, block, 0, few, DEPTH)
    if not few.GATED:
        wait(PDL)
    sums = _multiply_tiles(sums, ws, ss, x, rows, 0, few, DEPTH, 0)
    for chunk in tl.range(DEPTH, CHUNKS // DEPTH * DEPTH, DEPTH, num_stages=1):
        sums = _step(sums, x, weight, rows, block, chunk * WARPS, few, DEPTH, 0)
    if CHUNKS % DEPTH > 0:
        last: tl.constexpr = CHUNKS // DEPTH * DEPTH * WARPS
        sums = _step(sums, x, weight, rows, block, last, few, CHUNKS % DEPTH, 0)
    if G % WARPS > 0:
        # The last column blocks are fewer than warps: the first warps take some again, which are in the
        # cache, and leave them out of the sum.
        sums = _step(sums, x, weight, rows, block, G - WARPS, few, 1, WARPS - G % WARPS)
    if few.M < 8:
        m = tl.arange(0, few.M)
        _, pairs, inside = expert_rows(ids, ids, ids, pair, P, m, 8, few.P_POW2)
    n = tl.arange(0, 16)
    for r in tl.static_range(BLOCKS):
        v = _total(sums[r], few)
        if few.GATED:
            inverse = inverse_rms(squares, pairs // few.C, eps, few.WIDTH, few.SPLITS)[None, :]
            v = v * inverse
        column = (block + r) * 16 + n
        if few.BIASED:
            v += tl.load(bias + expert * few.N + column).to(tl.float32)[:, None]
        if few.GATED:
            up = _total(sums[BLOCKS + r], few) * inverse
            if few.BIASED:
                up += tl.load(bias + expert * few.N + few.F + column).to(tl.float32)[:, None]
            v = apply_gate(v, up, few.LIMIT, False)
            column = packed_cell(column, few.INTO, True)
            offsets = pairs[None, :] * few.F + column[:, None]
            tl.store(out + offsets, to_half(v), mask=inside[None, :])
        else:
            v = v * tl.load(choices.weights + pairs)[None, :]
            offsets = (pairs % few.C * T + pairs // few.C)[None, :] * few.F + column[:, None]
            tl.store(out + offsets, v, mask=inside[None, :])


def tile_for(rows: int, features: int, k: int, *, gated: bool, e2m1: bool) -> FewTile:
    """Choose the tile of a weight of K input features.

    Of those tried the fastest on an H200: of e2m1 (gpt-oss) for 1, 2, 4 and 8 rows, of codes in groups of 128
    (Qwen3-30B-A3B) for 1 and 8.
    """
    groups = k // BLOCK_K
    blocks = 1
    registers = 0
    if gated:
        warps = 4 if rows == 1 else 2
        depth = 2 if e2m1 or rows > 1 else 4
        if e2m1 and rows > 2:
            # With four chunks, 8 rows take 52 us in place of 56, and the compiler ten times as long.
            depth = 1
            registers = 80
    elif e2m1:
        warps = 4
        if rows > 2:
            warps = 2 if rows <= 4 else 1
        depth = {1: 5, 2: 3}.get(rows, 2)
    elif rows == 1:
        warps = 2
        depth = 3
        if features % 32 == 0:
            blocks = 2
    else:
        warps = 1
        depth = 2
        if features % 32 == 0:
            blocks = 2
    while groups % warps and groups <= 4 * warps:
        warps //= 2
    return FewTile(warps, min(depth, groups // warps), blocks, registers)


def multiply(
    x: torch.Tensor | FewRows,
    product: Product,
    choices: Choices,
    out: torch.Tensor,
    tile: FewTile | None = None,
) -> None:
    """Write the product of each pair into `out`; shapes in the module docstring."""
    weight = product.weight
    assert isinstance(weight, W4)
    t, c = choices.ids.shape
    rows = 8
    if weight.e2m1 and t <= 4:
        rows = 4 if t > 2 else 2
    if tile is None:
        gated = out.dim() == 2
        k = weight.features_in
        tile = tile_for(t, out.shape[-1], k, gated=gated, e2m1=weight.e2m1)
    gpu = traits(out.device)
    few = constants(gpu, x, product, choices, None, out, rows, tile)
    if few.F % (16 * tile.blocks):
        raise ValueError(f"out: features in {16 * tile.blocks}s wanted, {few.F} given")
    if tile.warps * tile.depth > few.K // BLOCK_K:
        raise ValueError(f"tile: {tile} does not fit into {few.K} columns")
    values, squares, eps = few_arguments(x, out)
    tensors = (
        values,
        weight.codes.view(torch.int16),
        weight.scale_zeros,
        tensor_or(product.bias, choices.weights),
    )
    grid = (few.F // (16 * tile.blocks), t * c)
    KernelLaunch(_few_kernel, grid, gpu, tile.warps, tile.registers, rows=t).run(
        *tensors, choices, out, squares, eps, t * c, t, few
    )
