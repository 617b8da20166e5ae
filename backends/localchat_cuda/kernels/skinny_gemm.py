"""GEMM of 1 to 64 rows with an fp16 or bf16 weight: y = x w^T.

For the output head, and every layer of an unquantized model; weights are read once, at memory
bandwidth.

Letters: M rows, N output and K input features.

    x [M, K] and weight [N, K] fp16 or bf16, one dtype      out [M, N] fp32, fp16 or bf16

One row: no tensor cores, four output features a program, K in runs of 512 (4.5 TB/s of 4.64 on an H200), of
short rows several at once. More rows: weights as the left operand of the tensor cores, 32 or 64 features a
program, x padded to 16, 32 or 64 columns by repeating rows. Accumulation in fp32; grid (N / features,). Not
supported: more than 64 rows, where the library's gemm is as good.
"""
# mypy: disable-error-code="assignment"
# (Triton unrolls loops over tuples that grow; no type says that)

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.launch import (
    KernelLaunch,
    Traits,
    cdiv,
    power_of_two,
    release,
    require,
    traits,
    wait,
)

MAX_ROWS = 64
_DEEP = 3
"""Runs of a row that are loaded before the first is used.

Only if they divide a short row, and all programs are resident at once: each program then waits for memory a
third as often. Other shapes lose 2 to 4 % by it."""
_SHORT = 8
"""Runs of a short row."""
_RESIDENT = 16
"""Programs of a multiprocessor."""


def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute the gemm in fp32 with plain torch."""
    return x.float() @ weight.float().t()


@triton.jit
def add_products(w, x, acc):
    """Add products of rows w [BN, BK] and x [BK] to acc, rounding once: so every kernel has the same sums."""
    return tl.fma(w.to(tl.float32), x.to(tl.float32)[None, :], acc)


@triton.jit
def _load_run(row, columns, K: tl.constexpr, MASKED: tl.constexpr):
    """Load columns of the weight's rows at `row` [BN, 1]. Each is read once."""
    pointers = row + columns[None, :]
    if MASKED:
        inside = (columns < K)[None, :]
        return tl.load(pointers, mask=inside, other=0.0, eviction_policy="evict_first")
    else:
        return tl.load(pointers, eviction_policy="evict_first")


@triton.jit
def _one_row_kernel(
    x,
    weight,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    MASKED: tl.constexpr = K % (BK * DEPTH) != 0
    release(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K
    k = tl.arange(0, BK)
    # The first runs are peeled so that their loads are issued before the wait for x.
    ws = ()
    for d in tl.static_range(DEPTH):
        ws = ws + (_load_run(row, d * BK + k, K, MASKED),)
    wait(PDL)
    acc = tl.zeros((BN, BK), tl.float32)
    for d in tl.static_range(DEPTH):
        xs = tl.load(x + d * BK + k, mask=d * BK + k < K, other=0.0)
        acc = add_products(ws[d], xs, acc)
    for c in tl.range(BK * DEPTH, K, BK * DEPTH, num_stages=1):
        ws = ()
        for d in tl.static_range(DEPTH):
            ws = ws + (_load_run(row, c + d * BK + k, K, MASKED),)
        for d in tl.static_range(DEPTH):
            columns = c + d * BK + k
            acc = add_products(ws[d], tl.load(x + columns, mask=columns < K, other=0.0), acc)
    y = tl.sum(acc, 1)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["M"])
def _rows_kernel(
    x,
    weight,
    out,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    MP: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K
    k = tl.arange(0, BK)
    m = tl.arange(0, MP)
    xs = x + (m % M)[None, :] * K
    acc = tl.zeros((BN, MP), tl.float32)
    wait(PDL)
    for c in tl.range(0, K, BK, num_stages=STAGES):
        columns = c + k
        if K % BK == 0:
            w = tl.load(row + columns[None, :], eviction_policy="evict_first")
            acc = tl.dot(w, tl.load(xs + columns[:, None]), acc)
        else:
            w = tl.load(
                row + columns[None, :],
                mask=(columns < K)[None, :],
                other=0.0,
                eviction_policy="evict_first",
            )
            acc = tl.dot(
                w, tl.load(xs + columns[:, None], mask=(columns < K)[:, None], other=0.0), acc
            )
    where = m[None, :].to(tl.int64) * N + n[:, None]
    tl.store(out + where, acc.to(out.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


def gemm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Write y = x w^T into `out`; shapes in the module docstring."""
    m, k = x.shape
    n = weight.shape[0]
    device = weight.device
    if not 1 <= m <= MAX_ROWS:
        raise ValueError(f"x: 1 to {MAX_ROWS} rows wanted, {m} given")
    require("x", x, (m, k), (torch.float16, torch.bfloat16), device)
    require("weight", weight, (n, k), (x.dtype,), device)
    require("out", out, (m, n), (torch.float32, torch.float16, torch.bfloat16), device)
    gpu = traits(device)
    if m == 1:
        features = 4
        run = min(512, power_of_two(k))
        programs = cdiv(n, features)
        runs = cdiv(k, run)
        few = programs <= _RESIDENT * gpu.sms and runs <= _SHORT
        depth = _DEEP if few and runs % _DEEP == 0 else 1
        KernelLaunch(_one_row_kernel, (programs,), gpu, warps=4, rows=1).run(
            *(x, weight, out), N=n, K=k, BN=features, BK=run, DEPTH=depth
        )
        return
    padded = max(16, power_of_two(m))
    tile = _tile_for(n, k, padded, gpu)
    KernelLaunch(_rows_kernel, (cdiv(n, tile.features),), gpu, warps=tile.warps).run(
        *(x, weight, out, m),
        N=n,
        K=k,
        MP=padded,
        BN=tile.features,
        BK=tile.run,
        STAGES=tile.stages,
    )


class _Tile(NamedTuple):
    """Work of a program of `_rows_kernel`."""

    features: int
    run: int
    """Columns of a step of its loop."""
    stages: int
    warps: int


def _tile_for(n: int, k: int, padded: int, gpu: Traits) -> _Tile:
    """Few features go in programs of 32, else half of an H200 has none: 37 us, not 49, for 3,584 x 18,944."""
    if gpu.hopper and padded == 16 and cdiv(n, 32) <= gpu.sms and k % 256 == 0:
        return _Tile(32, 256, 6, 2)
    stages = 4 if gpu.hopper or padded <= 32 else 3  # what shared memory has room for
    return _Tile(64, 128 if k % 128 == 0 else 64, stages, 4)
