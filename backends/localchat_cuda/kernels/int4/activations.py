"""Prepares the activations of int4 gemms between two layers.

The kernel sums partial products, applies the elementwise step of the layer, and writes the format that the next
gemm reads. A program has one block of 128 columns and one or several rows, so nothing is reduced over a whole
row: the next gemm applies the norm's 1/rms, from 28 partial sums. With `order` the columns are written as the
weight stores them (pack.W4): column j of the result is column order[j] of the computed row, block by block.

Letters: M rows, K columns of the result, G = K / 128, S splits, N columns of the partial products.
`group`: columns that share a scale in the weight that reads the result; sums of x are of such groups, while
the 16-bit blocks and the sums of squares are of 128 columns always.

Modes
    embed        v = table[id] * factor          residual = v, squares, v * weight
    norm         v = sum of partials + residual  residual = v, squares, v * weight * factor
    act_and_mul  v = silu(gate) * up             partials [S, M, 2K]: gate in the first K columns;
                                                 with `gelu` tanh-GELU instead of silu
    plain        v = sum of partials             the first K columns of N

Formats of the result
    Int8Rows  x int8 [2M, K], factors fp32 [G, MQ, 4 or 8]  gemm_int8.py
              [G, MQ, 16] in groups of 16                   ggml/gemm_int8.py
    HalfRows  x fp16 [M, K], factors fp32 [2, G, MP] or
              [1, K / group, MP]                            gemm_fp16.py
              x alone                                       gemm_tiled.py, gemm_hopper.py

All sums in fp32; values outside fp16 are clamped to its range in HalfRows. NaN stays NaN, in Int8Rows as the
scale of its block. Group-local quantization
after the idea of SmoothQuant-style block scaling; the split norm is our own.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.activation import activation, to_half
from localchat_cuda.kernels.all_reduce import PeerMemory, sum_over_ranks
from localchat_cuda.kernels.int4.gemm_int8 import factors_of, lanes
from localchat_cuda.kernels.int4.pack import BLOCK_K, W4
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

Order = Literal["lanes", "slots"]
Mode = Literal["embed", "norm", "act_and_mul", "plain"]
_MODES: dict[str, int] = {"plain": 0, "norm": 1, "act_and_mul": 2, "embed": 3}
ALONE = 32
"""Row count up to which each row has its own program.

All counts of a class give equal bits.
"""
TWICE = 4
"""Row count from which a norm in another order takes two kernels.

Out-of-order columns are read in pieces of 32 bytes where 4 are needed, so one matrix is read that way instead
of each partial sum, residual and weight.
"""
HALF_RESIDUAL = 1.0 / 16
"""Factor of a residual, before it is divided by its rms, in HalfRows: single channels of large models go beyond
the range of fp16, and then reach a million. A power of two changes no bit of a number above 0.001."""


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Activations of the int8 variant."""

    x: torch.Tensor
    factors: torch.Tensor
    group: int = BLOCK_K
    """16: for ggml's block formats, factors x_scale, three unused, and int32 sums of the values of 32 columns
    and of 16."""

    @staticmethod
    def empty(rows: int, k: int, device: torch.device, group: int = BLOCK_K) -> "Int8Rows":
        x = torch.empty(2 * rows, k, dtype=torch.int8, device=device)
        # Zeros: the kernel multiplies lanes past the last row too and drops their results.
        factors = torch.zeros(k // BLOCK_K, lanes(rows), factors_of(group), device=device)
        return Int8Rows(x, factors, group)


@dataclass(frozen=True, slots=True)
class HalfRows:
    """Activations of the fp16 variants."""

    x: torch.Tensor
    factors: torch.Tensor
    """Sum of x per group and row, and minus the sum of x times the offset of unpacked weights.

    The offset is 1024 in the lower half of a block and 64 in the upper half. Groups below 128, which lie in one
    half, have only the sum. A variant that subtracts the offset itself has no rows, [2, G, 0]."""
    order: Order = "lanes"
    """Order of k within a block, in which each 32 columns are an operand (plane and h).

    `lanes`: the eight values of a lane are contiguous (gemm_fp16.py). `slots`: the instruction's order of k,
    for operands in shared memory (gemm_tiled.py, gemm_hopper.py).
    """
    group: int = BLOCK_K

    @staticmethod
    def empty(
        rows: int,
        k: int,
        device: torch.device,
        order: Order = "lanes",
        group: int = BLOCK_K,
        *,
        factored: bool = True,
    ) -> "HalfRows":
        x = torch.empty(rows, k, dtype=torch.float16, device=device)
        sums = 2 if group == BLOCK_K else 1
        room = padded(rows) if factored else 0
        return HalfRows(x, torch.zeros(sums, k // group, room, device=device), order, group)


Rows: TypeAlias = Int8Rows | HalfRows


@dataclass(frozen=True, slots=True)
class FloatRows:
    """Intermediate activations between two kernels: x fp32 [M, K], not readable by a gemm."""

    x: torch.Tensor

    @staticmethod
    def empty(rows: int, k: int, device: torch.device) -> "FloatRows":
        return FloatRows(torch.empty(rows, k, device=device))

    @property
    def factors(self) -> torch.Tensor:
        """A tensor that is never written: this format has no factors."""
        return self.x


def padded(rows: int) -> int:
    """Return MP, the rows that the factors of the fp16 variants have room for."""
    return max(8, power_of_two(rows))


@triton.jit
def _group_sum(v, j, s: tl.constexpr, GROUP: tl.constexpr):
    """Sum of the columns of group s: of v [R, 128] where j [128] lies in it."""
    return tl.sum(tl.where((j // GROUP == s)[None, :], v, 0), 1)


@triton.jit
def _packed_column(j, GROUP: tl.constexpr):
    """Column of a packed block for columns j of x: those of groups of 32 have half before quad."""
    if GROUP == 32:
        j = (j & ~56) + ((j & 24) << 1) + ((j & 32) >> 2)
    elif GROUP == 16:  # quad(16) group(8) half(4) pair(2), as ggml's block formats have them
        j = (j & ~62) + ((j & 6) << 3) + ((j & 56) >> 2)
    return j


@triton.jit
def packed_cell(j, GROUP: tl.constexpr, LANES: tl.constexpr):
    """Return where HalfRows store column j, in lane or in slot order."""
    # p = plane(64) quad(16) half(8) pair(4) h(2) i
    p = _packed_column(j, GROUP)
    cell = (p & ~63) + ((p & 2) << 4) + (p & 1)
    if LANES:
        cell += ((p & 48) >> 1) + ((p & 12) >> 1)
    else:
        cell += ((p & 12) << 1) + ((p & 48) >> 3)
    return cell


@triton.jit
def write_rows(
    v,
    x,
    factors,
    block,
    m,
    there,
    K: tl.constexpr,
    MQ: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Write one block of 128 values of some rows: v [R, 128] of the rows m [R] where `there` [R].

    FORMAT 0: int8. 1: fp16 in lane order. 2: fp16 in slot order. 3: fp32 unchanged. 4: as 2 without factors.
    """
    j = tl.arange(0, 128)
    inside = there[:, None]
    if FORMAT == 3:
        tl.store(x + m[:, None] * K + block * 128 + j[None, :], v, mask=inside)
    elif FORMAT == 0:
        # As integers sizes keep their order, with NaN above all, which a maximum of floats would drop.
        peak = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
        scale = tl.maximum(peak * (1.0 / 32512.0), 1e-30, propagate_nan=tl.PropagateNan.ALL)
        rounded = tl.floor(v * (1.0 / scale)[:, None] + 0.5).to(tl.int32)
        high = (rounded + 128) >> 8
        low = rounded - high * 256
        p = _packed_column(j, GROUP)
        if GROUP != 16:
            p = (p & ~3) + ((p & 1) << 1) + ((p >> 1) & 1)
        cell = (2 * m)[:, None] * K + block * 128 + p[None, :]
        tl.store(x + cell, high.to(tl.int8), mask=inside)
        tl.store(x + cell + K, low.to(tl.int8), mask=inside)
        if GROUP == 128:
            pointers = factors + (block * MQ + m) * 4
            tl.store(pointers, scale * 0.0625, mask=there)
            tl.store(pointers + 1, scale * tl.sum(rounded, 1), mask=there)
            upper = tl.sum(tl.where((j >= 64)[None, :], rounded, 0), 1)
            tl.store(pointers + 2, 8 * scale * upper, mask=there)
        elif GROUP == 16:  # sums as they are, of 32 columns and of 16
            pointers = factors + (block * MQ + m) * 16
            tl.store(pointers, scale, mask=there)
            for s in tl.static_range(4):
                first = _group_sum(rounded, j, 2 * s, 16)
                second = _group_sum(rounded, j, 2 * s + 1, 16)
                both = (first + second).to(tl.float32, bitcast=True)
                tl.store(pointers + 4 + s, both, mask=there)
                tl.store(pointers + 8 + 2 * s, first.to(tl.float32, bitcast=True), mask=there)
                tl.store(pointers + 9 + 2 * s, second.to(tl.float32, bitcast=True), mask=there)
        else:
            pointers = factors + (block * MQ + m) * (8 if GROUP == 32 else 4)
            tl.store(pointers, scale * 0.0625, mask=there)
            for s in tl.static_range(128 // GROUP):
                tl.store(pointers + 1 + s, scale * _group_sum(rounded, j, s, GROUP), mask=there)
    else:
        half = to_half(v)
        cell = packed_cell(j, GROUP, FORMAT == 1)
        tl.store(x + m[:, None] * K + block * 128 + cell[None, :], half, mask=inside)
        if FORMAT != 4:
            f = half.to(tl.float32)
            if GROUP == 128:
                tl.store(factors + block * MQ + m, tl.sum(f, 1), mask=there)
                offset = tl.where(j < 64, 1024.0, 64.0)
                less = -tl.sum(f * offset[None, :], 1)
                tl.store(factors + (K // 128 + block) * MQ + m, less, mask=there)
            else:
                for s in tl.static_range(128 // GROUP):
                    pointers = factors + (block * (128 // GROUP) + s) * MQ + m
                    tl.store(pointers, _group_sum(f, j, s, GROUP), mask=there)


@triton.jit
def sum_partials(source, offsets, inside, stride, S: tl.constexpr):
    """Sum the elements at `offsets` of S matrices in fp32. The matrices are `stride` apart."""
    total = tl.load(source + offsets, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    for s in tl.static_range(1, S):
        part = tl.load(source + s * stride + offsets, mask=inside, other=0.0, cache_modifier=".cg")
        total += part.to(tl.float32)
    return total


@triton.jit(do_not_specialize=["M", "room"])
def _prepare_kernel(
    source,
    ids,
    residual,
    weight,
    squares,
    x,
    factors,
    factor,
    shift,
    order,
    words,
    addresses,
    counts,
    room,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    MQ: tl.constexpr,
    S: tl.constexpr,
    MODE: tl.constexpr,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    GELU: tl.constexpr,
    ORDER: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROOMY: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    block = tl.program_id(0)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = m < M
    inside = there[:, None]
    i = block * 128 + tl.arange(0, 128)
    if ORDER:
        i = tl.load(order + i)
    w = tl.full((128,), 1.0, tl.float32)
    if MODE == 1 or MODE == 3:
        w = tl.load(weight + i).to(tl.float32)
    wait(PDL)
    offsets = m[:, None] * K + i[None, :]
    if MODE == 3:
        row = tl.load(ids + m, mask=there, other=0).to(tl.int64)
        v = tl.load(source + row[:, None] * N + i[None, :], mask=inside, other=0.0)
        v = v.to(tl.float32) * factor
    else:
        here = m[:, None] * N + i[None, :]
        v = sum_partials(source, here, inside, M * N, S)
    if MODE == 2:
        v = activation(v, GELU) * sum_partials(source, here + K, inside, M * N, S)
    if RANKS > 1:
        run = m * (K // 128) + block
        in_row = inside & (i >= 0)[None, :]
        v = sum_over_ranks(v, run, in_row, words, addresses, counts, room, RANK, RANKS)
    if MODE == 1:
        v += tl.load(residual + offsets, mask=inside, other=0.0)
    if MODE == 1 or MODE == 3:
        tl.store(residual + offsets, v, mask=inside)
        square = tl.sum(v * v, 1)
        v = v * w[None, :]
        if MODE == 1:
            square = square * factor * factor + shift
            v = v * factor
        tl.store(squares + m * (K // 128) + block, square, mask=there)
    write_rows(v, x, factors, block, m, there, K, MQ, FORMAT, GROUP)


def rows_per_program(rows: int) -> int:
    """Return the rows of a one-warp program.

    Four for large row counts: starting a program takes longer than 128 values do, and fewer programs of more
    rows keep fewer loads in flight (512 rows of 3,584 columns: 11 us, of eight rows 17, of 16 25).
    """
    return 1 if rows <= ALONE else 4


def format_of(rows: Rows | FloatRows) -> int:
    if isinstance(rows, FloatRows):
        return 3
    if isinstance(rows, Int8Rows):
        return 0
    if rows.order == "slots":
        return 2 if rows.factors.shape[2] else 4
    return 1


def room_of(rows: Rows | FloatRows) -> int:
    """Return the rows that `rows.factors` has room for."""
    if isinstance(rows, HalfRows):
        return rows.factors.shape[2]
    return rows.factors.shape[1]


def check_rows(rows: Rows | FloatRows, m: int, k: int, device: torch.device) -> None:
    """Raise ValueError unless `rows` holds exactly m rows of k columns."""
    if isinstance(rows, FloatRows):
        require("rows.x", rows.x, (m, k), device, torch.float32)
    elif isinstance(rows, Int8Rows):
        require("rows.x", rows.x, (2 * m, k), device, torch.int8)
        room = k // BLOCK_K, lanes(m), factors_of(rows.group)
        require("rows.factors", rows.factors, room, device, torch.float32)
    else:
        require("rows.x", rows.x, (m, k), device, torch.float16)
        none = rows.order == "slots" and not rows.factors.shape[2]
        room = 2 if rows.group == BLOCK_K else 1, k // rows.group, 0 if none else padded(m)
        require("rows.factors", rows.factors, room, device, torch.float32)


def check_slot_rows(rows: HalfRows, weight: W4) -> None:
    """Raise ValueError unless the rows are in slot order and fit the weight."""
    m = rows.x.shape[0]
    if m < 1 or rows.order != "slots":
        raise ValueError(f"rows: at least 1 in slot order wanted, {m} in {rows.order}")
    if rows.group != weight.group:
        raise ValueError(f"rows: of groups of {weight.group} wanted, {rows.group} given")
    require("rows.x", rows.x, (m, weight.features_in), weight.codes.device, torch.float16)


def check_result(
    rows: HalfRows, weight: W4, out: torch.Tensor | HalfRows, splits: int
) -> tuple[torch.Tensor, int]:
    """Return the memory of `out` and the group of its rows.

    Raises ValueError if a gemm of `rows` cannot write it.
    """
    m = rows.x.shape[0]
    n = weight.features_out
    device = weight.codes.device
    if isinstance(out, torch.Tensor):
        require("out", out, (splits, m, n), device, torch.float32)
        return out, BLOCK_K
    if out.x.data_ptr() == rows.x.data_ptr() != 0:
        raise ValueError("out: memory of its own wanted, other programs still read these rows")
    if out.order != "slots":
        raise ValueError(f"out: slot order wanted, {out.order} given")
    require("out.x", out.x, (m, n // 2), device, torch.float16)
    return out.x, out.group


def prepare(
    mode: Mode,
    source: torch.Tensor,
    rows: Rows | FloatRows,
    *,
    ids: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    squares: torch.Tensor | None = None,
    factor: float = 1.0,
    eps: float = 0.0,
    gelu: bool = False,
    order: torch.Tensor | None = None,
    peers: PeerMemory | None = None,
) -> None:
    """Run one step between gemms; modes and formats in the module docstring.

    source: partial products [S, M, N], fp32, fp16 or bf16; embed: the table [vocabulary, K] with
    `ids` int32 or int64 [M]. residual fp32 [M, K] (read and written; embed only writes), weight [K]
    of the norm, squares fp32 [M, G] (written): for embed and norm. `factor`: of the table's rows, or of the
    rows that a norm writes, with squares from which the gemm finds the right rms, given `eps`.
    order int32 [K], a permutation, or None. Writes `rows`. `peers`: a norm without order adds the partial
    products of all ranks, which call this together (kernels/all_reduce.py).
    """
    device = source.device
    k = rows.x.shape[1]
    if k % BLOCK_K:
        raise ValueError(f"rows.x: columns in {BLOCK_K}s wanted, {k} given")
    if mode == "embed":
        if ids is None:
            raise ValueError("ids: wanted by mode embed")
        m = ids.shape[0]
        n = k
        splits = 1
        require("ids", ids, (m,), device, torch.int32, torch.int64)
        require("source", source, (None, k), device)
    else:
        splits, m, n = source.shape
        require("source", source, (splits, m, n), device)
        if n < (2 * k if mode == "act_and_mul" else k):
            raise ValueError(f"source: {n} columns are too few for mode {mode} with {k}")
    check_rows(rows, m, k, device)
    if mode in ("embed", "norm"):
        if residual is None or weight is None or squares is None:
            raise ValueError(f"residual, weight, squares: wanted by mode {mode}")
        require("residual", residual, (m, k), device, torch.float32)
        require("weight", weight, (k,), device)
        require("squares", squares, (m, k // BLOCK_K), device, torch.float32)
    if order is not None:
        require("order", order, (k,), device, torch.int32)
        if mode == "norm" and m >= TWICE:
            flat = FloatRows.empty(m, k, device)
            prepare(
                mode,
                source,
                flat,
                residual=residual,
                weight=weight,
                squares=squares,
                factor=factor,
                eps=eps,
            )
            prepare("plain", flat.x[None], rows, order=order)
            return
    if peers is not None and (mode != "norm" or order is not None or n != k or m * k > peers.most):
        raise ValueError("peers: only a norm of all columns without order adds up ranks")
    gpu = traits(device)
    several = rows_per_program(m)
    # Converts a block's part of mean + eps to that of the unscaled row, times the square of the factor.
    shift = (factor**2 - 1.0) * eps * BLOCK_K
    KernelLaunch(_prepare_kernel, (k // BLOCK_K, cdiv(m, several)), gpu, warps=1, rows=m).run(
        *(source, tensor_or(ids, source), tensor_or(residual, source), tensor_or(weight, source)),
        *(tensor_or(squares, source), rows.x, rows.factors, factor, shift),
        *(tensor_or(order, source), *_peer_arguments(peers, source), m),
        N=n,
        K=k,
        MQ=room_of(rows),
        S=splits,
        MODE=_MODES[mode],
        FORMAT=format_of(rows),
        ROWS=several,
        GELU=gelu,
        ORDER=order is not None,
        GROUP=BLOCK_K if isinstance(rows, FloatRows) else rows.group,
        RANK=0 if peers is None else peers.rank,
        RANKS=1 if peers is None else peers.ranks,
    )


def _peer_arguments(
    peers: PeerMemory | None, placeholder: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    if peers is None:
        return placeholder, placeholder, placeholder, 1
    return peers.words, peers.addresses, peers.counts, peers.most
