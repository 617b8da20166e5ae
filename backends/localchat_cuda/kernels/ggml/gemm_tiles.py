"""GEMM and dequantization with weights in ggml's block formats: one tile, and the format as constants.

Letters: M rows, N output and K input features, S splits of K, B = ceil(K / 256), G groups of 256 columns.

    x    fp16 or bf16 [M, K] (in the interpreter also fp32)    pack.GgmlTensor of N x K
    out  fp32 [S, M, C], of which `gemm` writes N columns from `column` on

A program owns TILES row tiles of 16 output features, a warp each, and a split of the column blocks. It loads
the elements of a block straight into the layout of tensor-core operands, 16 bytes for each lane. One shift and
mask give the codes of a group, exact in fp16; the sum over a group is multiplied with its scale in fp32, and
the group's minimum with the sum of x. So no weight is rounded, and sums are fp32. Grid (T / TILES, S).

Rows of x are padded to 8, 16, 32 or 64 by repeating valid ones. Not supported: more than 64 rows; they
go through `dequantize` and the library.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from localchat_cuda.ggml_forms import BLOCK, ROWS
from localchat_cuda.kernels.ggml.pack import TABLE, GgmlTensor, GgmlWeight, dense
from localchat_cuda.kernels.launch import options, power_of_two, require, set_carveout, traits

MAX_ROWS = 64
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_TILES = 2
_WARPS_PER_SM, _MOST_SPLITS = 16, 16
"""Warps of a multiprocessor that the splits of K aim at: 1 to 2 KB of weights in flight each."""


def reference(x: torch.Tensor, weight: GgmlTensor | GgmlWeight) -> torch.Tensor:
    """Compute the gemm [M, N] in fp32 with plain torch."""
    return x.float() @ dense(weight).t()


@triton.jit
def _elements(
    plane, first, b, part, T, B, PARTS: tl.constexpr, GROUP: tl.constexpr, TILES: tl.constexpr
):
    """Load elements of one column block and part as a left operand [16 * TILES, GROUP]."""
    SIZE: tl.constexpr = 16 * GROUP
    i = tl.arange(0, TILES * SIZE)
    tile = tl.minimum(first + i // 128 % TILES, T - 1).to(tl.int64)
    at = ((tile * B + b) * PARTS + part) * SIZE + i // (128 * TILES) * 128 + i % 128
    w = tl.load(plane + at, eviction_policy="evict_first").to(tl.int32)
    w = tl.permute(tl.reshape(w, (GROUP // 16, 2, TILES, 8, 4, 2, 2)), (2, 1, 3, 0, 5, 4, 6))
    return tl.reshape(w, (16 * TILES, GROUP))


@triton.jit
def _values(
    low, high, table, f: tl.constexpr, g: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    OFFSET: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Decode field `f` of `low` and `g` of `high`: fp16, exact."""
    code = (low >> (LOW * f)) & ((1 << LOW) - 1)
    if HIGH:
        code |= ((high >> (HIGH * g)) & ((1 << HIGH) - 1)) << LOW
    if TABLE:
        return tl.load(table + code)
    else:
        # 0x6400 is 1024, whose last ten bits count ones: no conversion from integers
        return (code | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - (1024.0 + OFFSET)


@triton.jit
def _side(numbers, factors, n, block, g: tl.constexpr, G: tl.constexpr, FACTORS: tl.constexpr):
    """Load scales or minimums of group `g` in fp32; `n`: places of rows in their tiles."""
    if FACTORS:
        number = tl.load(numbers + block * 16 + n).to(tl.float32)
        return number * tl.load(factors + (block * G + g) * 16 + n).to(tl.float32)
    else:
        return tl.load(numbers + (block * G + g) * 16 + n).to(tl.float32)


@triton.jit(do_not_specialize=["M", "N", "C", "column"])
def _gemm_kernel(
    x, low, high, scales, factors, minimums, minimum_factors, table, out, M, N, C, column,
    K: tl.constexpr, MP: tl.constexpr, TILES: tl.constexpr, SPLITS: tl.constexpr,
    GROUP: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, PARTS: tl.constexpr,
    OFFSET: tl.constexpr, FACTORS: tl.constexpr, MINIMUM: tl.constexpr, TABLE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    B: tl.constexpr = (K + 255) // 256
    G: tl.constexpr = 256 // GROUP
    FIELDS: tl.constexpr = G // PARTS
    if PDL:
        gdc_launch_dependents()
    T = (N + 15) // 16
    first, split = tl.program_id(0) * TILES, tl.program_id(1)
    row = tl.arange(0, 16 * TILES)
    tile = tl.minimum(first + row // 16, T - 1).to(tl.int64)
    m, k = tl.arange(0, MP), tl.arange(0, GROUP)
    x_row = x + (m % M)[None, :] * K + k[:, None]
    total = tl.zeros((16 * TILES, MP), tl.float32)
    if PDL:
        gdc_wait()
    for b in tl.range(split * B // SPLITS, (split + 1) * B // SPLITS, 1, num_stages=1):
        block = tile * B + b
        upper = 0
        if HIGH:
            upper = _elements(high, first, b, 0, T, B, 1, GROUP, TILES)
        for g in tl.static_range(G):
            if g % FIELDS == 0:
                lower = _elements(low, first, b, g // FIELDS, T, B, PARTS, GROUP, TILES)
            at = b * 256 + g * GROUP
            if K % 256 == 0:
                xs = tl.load(x_row + at)
            else:
                xs = tl.load(x_row + at, mask=(at + k < K)[:, None], other=0.0)
            w = _values(lower, upper, table, g % FIELDS, g, LOW, HIGH, OFFSET, TABLE)
            part = tl.dot(w.to(xs.dtype), xs, input_precision="ieee")
            total += part * _side(scales, factors, row % 16, block, g, G, FACTORS)[:, None]
            if MINIMUM:
                least = _side(minimums, minimum_factors, row % 16, block, g, G, FACTORS)
                total -= least[:, None] * tl.sum(xs.to(tl.float32), 0)[None, :]
    n = first * 16 + row
    target = out + ((split * M + m).to(tl.int64) * C)[None, :] + column + n[:, None]
    tl.store(target, total, mask=(m < M)[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["N"])
def _dequantize_kernel(
    low, high, scales, factors, minimums, minimum_factors, table, out, N,
    K: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, PARTS: tl.constexpr, OFFSET: tl.constexpr, FACTORS: tl.constexpr,
    MINIMUM: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    B: tl.constexpr = (K + 255) // 256
    G: tl.constexpr = 256 // GROUP
    FIELDS: tl.constexpr = G // PARTS
    T = (N + 15) // 16
    first, b = tl.program_id(0) * TILES, tl.program_id(1)
    row, k = tl.arange(0, 16 * TILES), tl.arange(0, GROUP)
    block = tl.minimum(first + row // 16, T - 1).to(tl.int64) * B + b
    n = first * 16 + row
    target = out + n.to(tl.int64)[:, None] * K + k[None, :]
    upper = 0
    if HIGH:
        upper = _elements(high, first, b, 0, T, B, 1, GROUP, TILES)
    for g in tl.static_range(G):
        if g % FIELDS == 0:
            lower = _elements(low, first, b, g // FIELDS, T, B, PARTS, GROUP, TILES)
        at = b * 256 + g * GROUP
        w = _values(lower, upper, table, g % FIELDS, g, LOW, HIGH, OFFSET, TABLE).to(tl.float32)
        w *= _side(scales, factors, row % 16, block, g, G, FACTORS)[:, None]
        if MINIMUM:
            w -= _side(minimums, minimum_factors, row % 16, block, g, G, FACTORS)[:, None]
        inside = (n < N)[:, None] & (at + k < K)[None, :]
        tl.store(target + at, w.to(out.dtype.element_ty), mask=inside)


_tables: dict[torch.device, torch.Tensor] = {}


def _table(device: torch.device) -> torch.Tensor:
    """Values of a table's codes in fp16, one copy for each device."""
    if device not in _tables:
        _tables[device] = torch.tensor(TABLE, dtype=torch.float16, device=device)
    return _tables[device]


def _arguments(weight: GgmlTensor) -> tuple[torch.Tensor, ...]:
    """Tensors of the weight as the kernels take them; where there is none, another stands for it."""
    none, table = weight.scales, weight.scales
    if weight.form.table:
        table = _table(weight.low.device)
    return (
        weight.low,
        weight.low if weight.high is None else weight.high,
        weight.scales,
        none if weight.factors is None else weight.factors,
        none if weight.minimums is None else weight.minimums,
        none if weight.minimum_factors is None else weight.minimum_factors,
        table,
    )


def _constants(weight: GgmlTensor) -> dict[str, int | bool]:
    form = weight.form
    low, high = form.planes
    return {
        "K": weight.features_in,
        "GROUP": form.group,
        "LOW": low,
        "HIGH": high,
        "PARTS": weight.low.shape[2],
        "OFFSET": form.offset,
        "FACTORS": form.factors,
        "MINIMUM": form.minimum,
        "TABLE": form.table,
    }


def splits_for(n: int, k: int, sms: int) -> int:
    """Choose the splits of K for a weight of N x K: enough warps to fill the GPU."""
    programs = -(-n // (ROWS * _TILES))
    wanted = round(_WARPS_PER_SM * sms / (programs * _TILES))
    return max(1, min(wanted, -(-k // BLOCK), _MOST_SPLITS))


def gemm(
    x: torch.Tensor,
    weight: GgmlTensor,
    out: torch.Tensor,
    column: int = 0,
    *,
    pdl: bool = True,
) -> None:
    """Write partial sums into columns of `out` [S, M, C] from `column` on. M is 1 to MAX_ROWS."""
    m, n, k, device = x.shape[0], weight.features_out, weight.features_in, weight.low.device
    require("x", x, (None, k), FLOATS, device)
    if not 1 <= m <= MAX_ROWS:
        raise ValueError(f"x: 1 to {MAX_ROWS} rows wanted, {m} given")
    require("out", out, (None, m, None), (torch.float32,), device)
    splits, columns = out.shape[0], out.shape[2]
    if not 0 <= column <= columns - n:
        raise ValueError(f"column: {n} columns from {column} of {columns} wanted")
    if not 1 <= splits <= -(-k // BLOCK):
        raise ValueError(f"out: 1 to {-(-k // BLOCK)} splits wanted, {splits} given")
    pdl = pdl and traits(device).pdl
    kernel = _gemm_kernel[(triton.cdiv(n, ROWS * _TILES), splits)](
        x,
        *_arguments(weight),
        out,
        m,
        n,
        columns,
        column,
        MP=max(8, power_of_two(m)),
        TILES=_TILES,
        SPLITS=splits,
        PDL=pdl,
        **_constants(weight),
        **options(pdl, _TILES, stages=1),
    )
    set_carveout(kernel, m)


def dequantize(weight: GgmlTensor, out: torch.Tensor) -> None:
    """Write the weight [N, K] into `out` fp16, bf16 or fp32, rounded once."""
    n, k = weight.features_out, weight.features_in
    require("out", out, (n, k), FLOATS, weight.low.device)
    _dequantize_kernel[(triton.cdiv(n, ROWS * _TILES), -(-k // BLOCK))](
        *_arguments(weight),
        out,
        n,
        TILES=_TILES,
        **_constants(weight),
        **options(False, _TILES),
    )
