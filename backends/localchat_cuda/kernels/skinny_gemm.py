"""GEMM of 1 to 64 rows with an fp16 or bf16 weight: y = x w^T.

For the output head, and every layer of an unquantized model; weights are read once, at memory
bandwidth.

Letters: M rows, N output and K input features, S splits of K.

    x [M, K] and weight [N, K] fp16 or bf16, one dtype
    out [M, N] fp32, fp16 or bf16, or partial sums fp32 [S, M, N]

One row: no tensor cores, four output features a program, K in runs of 512 (4.5 TB/s of 4.64 on an H200), of
short rows several at once. More rows: weights as the left operand of the tensor cores, 64 features a program, x
padded to 16, 32 or 64 columns by repeating rows. Partial sums give weights of few features as many programs as
the GPU has multiprocessors. Accumulation in fp32; grid (N / features, S). Not supported: more than 64 rows,
where the library's gemm is as good.
"""
# mypy: disable-error-code="assignment"
# (Triton unrolls loops over tuples that grow; no type says that)

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
_FEATURES = 64
_RUN = 128
"""Tile of a program of several rows: output features, and columns of K at once."""
_CROWDED_ROWS = 32
"""Padded rows up to which a multiprocessor may have two programs."""
_RUNS_OF_SPLIT = 4
_MOST_SPLITS = 4
"""Fewest runs of a split, and largest number of splits."""


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
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    RUNS: tl.constexpr = (K + BK - 1) // BK
    release(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    split = tl.program_id(1)
    first = split * RUNS // SPLITS * BK
    last = (split + 1) * RUNS // SPLITS * BK
    row = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K
    k = tl.arange(0, BK)
    m = tl.arange(0, MP)
    xs = x + (m % M)[None, :] * K
    acc = tl.zeros((BN, MP), tl.float32)
    wait(PDL)
    for c in tl.range(first, last, BK, num_stages=STAGES):
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
    where = (split * M + m)[None, :].to(tl.int64) * N + n[:, None]
    tl.store(out + where, acc.to(out.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


def gemm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Write y = x w^T into `out`; shapes in the module docstring."""
    m, k = x.shape
    n = weight.shape[0]
    device = weight.device
    splits = 1 if out.dim() == 2 else out.shape[0]
    if not 1 <= m <= MAX_ROWS:
        raise ValueError(f"x: 1 to {MAX_ROWS} rows wanted, {m} given")
    require("x", x, (m, k), device, torch.float16, torch.bfloat16)
    require("weight", weight, (n, k), device, x.dtype)
    require("out", out[0] if out.dim() > 2 else out, (m, n), device)
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
    padded = _padded(m)
    # What shared memory has room for.
    stages = 4 if gpu.hopper or padded <= 32 else 3
    KernelLaunch(_rows_kernel, (cdiv(n, _FEATURES), splits), gpu, warps=4).run(
        *(x, weight, out, m),
        N=n,
        K=k,
        MP=padded,
        BN=_FEATURES,
        BK=_RUN,
        STAGES=stages,
        SPLITS=splits,
    )


def partial_sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return partial sums fp32 [S, M, N] of x w^T, S of `splits_for`."""
    m, k = x.shape
    n = weight.shape[0]
    sums = torch.empty(splits_for(m, n, k, traits(weight.device)), m, n, device=x.device)
    gemm(x, weight, sums)
    return sums


def splits_for(m: int, n: int, k: int, gpu: Traits) -> int:
    """Return S of `partial_sums`. M counts only through the columns that x is padded to.

    1,536 x 8,960 takes an H200 21 us without splits and 10 so, with 8 and with 64 rows. More than one program
    for each multiprocessor pays up to 32 rows.
    """
    if m == 1:
        return 1
    tiles = cdiv(n, _FEATURES)
    programs = gpu.sms // tiles
    if _padded(m) <= _CROWDED_ROWS:
        programs = cdiv(gpu.sms, tiles)
    return max(1, min(programs, k // (_RUNS_OF_SPLIT * _RUN), _MOST_SPLITS))


def _padded(m: int) -> int:
    """Return the columns that M rows are padded to."""
    return max(16, power_of_two(m))
