"""Sorts the choices of experts into blocks of rows, one expert a block.

Letters as in choice.py; B blocks of M pairs.

    ids      int32 [T, C]
    slots    int32 [B * M]    pairs by expert, in their order; -1: none
    owners   int32 [B]        the expert of a block; -1: the block is not used

Grid (X,): each program counts all pairs and places those of its expert. B is the most that P pairs can need, so
nothing waits for the host. Sorting pairs into padded blocks: MegaBlocks (Gale et al., 2022) and vLLM's
fused_moe; finding each pair's place by counting is our own.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.experts.choice import FEW_ROWS, HALVES, Choices, FewRows
from localchat_cuda.kernels.int4.pack import BLOCK_K, W4
from localchat_cuda.kernels.launch import (
    KernelLaunch,
    Traits,
    power_of_two,
    release,
    require,
    traits,
    wait,
)

_CHUNKS = 1024, 4096
"""Pairs that a program looks at together, in small and in large blocks."""
_LARGE_BLOCK = 64
"""Rows of a block for many pairs. With the number of pairs as the rule, a step could need a kernel that no
prepared step has."""


class Product(NamedTuple):
    """Weights of all experts for one product, and the activation of its results."""

    weight: torch.Tensor | W4
    bias: torch.Tensor | None = None
    limit: float = 0.0
    """Bound of gate and up, whose activation is then activation.gated's. 0: SiLU."""
    gelu: bool = False
    square: bool = False
    """The last two as in Experts."""
    into: int = BLOCK_K
    """Group of the int4 weight that reads the result of gate and up."""


class PairConstants(NamedTuple):
    """Constants of a kernel that multiplies pairs. For the letters see choice.py and gemm_float.py.

    Size: one argument carries all constants of a launch.
    """

    C: int
    N: int
    """Features of an expert, of gate and of up."""
    F: int
    """Features of the result."""
    K: int
    M: int
    """Rows of a block."""
    P_POW2: int
    """Argument of expert_rows."""
    GATED: bool
    BIASED: bool
    LIMIT: float
    GELU: bool
    SQUARE: bool
    SPLITS: int
    WIDTH: int
    """Columns of `squares`, and of x before padding."""
    GROUP: int
    """Columns that share a scale of int4 weights: 32, 64 or 128."""
    E2M1: bool
    INTO: int
    """GROUP of the weight that reads the result of gate and up."""
    ASM: bool
    """Use inline PTX, or its twin in plain Triton."""
    tile: Any
    """The kernel's launch configuration."""


class Blocks(NamedTuple):
    """Pairs sorted by expert, `rows` in a block."""

    slots: torch.Tensor
    owners: torch.Tensor
    rows: int


@triton.jit(do_not_specialize=["P", "B"])
def _sort_kernel(
    ids,
    slots,
    owners,
    P,
    B,
    X: tl.constexpr,
    X_POW2: tl.constexpr,
    M: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    expert = tl.program_id(0)
    i = tl.arange(0, CHUNK)
    bins = tl.arange(0, X_POW2)
    counts = tl.zeros((X_POW2,), tl.int32)
    wait(PDL)
    for start in tl.range(0, P, CHUNK):
        inside = start + i < P
        counts += tl.histogram(tl.load(ids + start + i, mask=inside, other=0), X_POW2, mask=inside)
    first = tl.sum(tl.where(bins < expert, (counts + (M - 1)) // M, 0), 0)
    own = tl.sum(tl.where(bins == expert, counts, 0), 0)
    seen = 0
    for start in tl.range(0, P, CHUNK):
        inside = start + i < P
        mine = tl.load(ids + start + i, mask=inside, other=-1) == expert
        position = first * M + seen + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(slots + position, start + i, mask=mine)
        seen += tl.sum(mine.to(tl.int32), 0)
    last = first + (own + (M - 1)) // M
    m = tl.arange(0, M)
    tl.store(slots + first * M + own + m, m * 0 - 1, mask=first * M + own + m < last * M)
    for start in tl.range(first, last, CHUNK):
        tl.store(owners + start + i, i * 0 + expert, mask=start + i < last)
    if expert == X - 1:
        for start in tl.range(last, B, CHUNK):
            tl.store(owners + start + i, i * 0 - 1, mask=start + i < B)


def most_blocks(pairs: int, experts: int, rows: int) -> int:
    """Return the maximum number of blocks of `rows` for this number of pairs."""
    return min(experts, pairs) + pairs // rows


def sort(ids: torch.Tensor, experts: int, rows: int) -> Blocks:
    """Sort the pairs of ids [T, C] by expert into blocks of `rows`."""
    pairs = ids.numel()
    device = ids.device
    require("ids", ids, (None, None), device, torch.int32)
    count = most_blocks(pairs, experts, rows)
    slots = torch.empty(count * rows, dtype=torch.int32, device=device)
    owners = torch.empty(count, dtype=torch.int32, device=device)
    large = rows >= _LARGE_BLOCK
    KernelLaunch(_sort_kernel, (experts,), traits(device), warps=8 if large else 4).run(
        *(ids, slots, owners, pairs, count),
        X=experts,
        X_POW2=power_of_two(experts),
        M=rows,
        CHUNK=_CHUNKS[large],
    )
    return Blocks(slots, owners, rows)


@triton.jit
def expert_rows(ids, slots, owners, block, P, m, M: tl.constexpr, P_POW2: tl.constexpr):
    """Return the expert of a block or -1, its pairs like `m`, and a mask of the pairs.

    P_POW2 0: blocks of M sorted pairs. Else blocks are pairs themselves (1: of one row), and the first of an
    expert takes all of that expert's, at most M: nothing has to be sorted before.
    """
    if P_POW2 == 0:
        expert = tl.load(owners + block)
        pairs = tl.load(slots + block * M + m, mask=expert + m * 0 >= 0, other=-1)
        inside = pairs >= 0
        pairs = tl.maximum(pairs, 0)
    elif P_POW2 == 1:
        expert = tl.load(ids + block)
        pairs = block + m * 0
        inside = m == 0
    else:
        q = tl.arange(0, P_POW2)
        same = tl.load(ids + q, mask=q < P, other=-1) == tl.load(ids + block)
        rank = tl.cumsum(same.to(tl.int32), 0) - 1
        hit = same[None, :] & (rank[None, :] == m[:, None])
        inside = m < tl.sum(same.to(tl.int32), 0)
        pairs = tl.where(inside, tl.sum(tl.where(hit, q[None, :], 0), 1), block)
        first = tl.min(tl.where(same, q, P_POW2), 0) == block
        expert = tl.where(first, tl.load(ids + block), -1)
    return expert, pairs, inside


def grid_blocks(choices: Choices, blocks: Blocks | None) -> int:
    """Return the blocks of the grid."""
    if blocks is None:
        return choices.ids.numel()
    return blocks.owners.shape[0]


def constants(
    gpu: Traits,
    x: torch.Tensor | FewRows,
    product: Product,
    choices: Choices,
    blocks: Blocks | None,
    out: torch.Tensor,
    rows: int,
    tile: Any,  # noqa: ANN401 (each kernel has a type of its own)
) -> PairConstants:
    """Check the arguments of a product, and return its constants.

    `out` [P, F] is of gate and up, [C, T, H] of down; `rows`: M. Unsorted choices may be of few rows alone.
    """
    weight, bias, limit, gelu, square, into = product
    splits = 0
    width = 1
    if isinstance(x, FewRows):
        splits = x.squares.shape[1]
        width = x.width
        x = x.x
    t, c = choices.ids.shape
    device = x.device
    gated = out.dim() == 2
    pairs: int | None = t * c
    if gated:
        pairs = None
    if isinstance(weight, W4):
        stored = weight.features_out
        k = weight.features_in
        group = weight.group
        e2m1 = weight.e2m1
        require("x", x, (pairs, k), device, torch.float16)
    else:
        stored, k = weight.shape
        group = 0
        e2m1 = False
        require("x", x, (pairs, k), device, *HALVES)
        require("weight", weight, (stored, k), device, x.dtype)
    require("ids", choices.ids, (t, c), device, torch.int32)
    require("weights", choices.weights, (t, c), device, torch.float32)
    if blocks is None and not 1 <= t <= FEW_ROWS:
        raise ValueError(f"ids: 1 to {FEW_ROWS} rows wanted without blocks, {t} given")
    if bias is not None:
        require("bias", bias, (stored,), device)
    if gated:
        require("out", out, (t * c, None), device, x.dtype)
    else:
        require("out", out, (c, t, None), device)
    features = out.shape[-1]
    n = features
    if gated and not square:
        n *= 2
    if stored % n:
        raise ValueError(f"weight: experts of {n} features wanted, {stored} given")
    classes = 0
    if blocks is None and t == 1:
        classes = 1
    elif blocks is None:
        classes = power_of_two(t * c)
    return PairConstants(
        C=c,
        N=n,
        F=features,
        K=k,
        M=rows,
        P_POW2=classes,
        GATED=gated,
        BIASED=bias is not None,
        LIMIT=limit,
        GELU=gelu,
        SQUARE=square,
        SPLITS=splits,
        WIDTH=width,
        GROUP=group,
        E2M1=e2m1,
        INTO=into,
        ASM=gpu.asm,
        tile=tile,
    )
