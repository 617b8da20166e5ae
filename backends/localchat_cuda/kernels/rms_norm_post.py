"""RMSNorm of a sublayer's output before the residual addition, and the next norm after it.

For int4 gemms; rms_norm.add_norm does it for gemms that read [T, H]. Letters: T rows, H columns, S partial
sums, G = H / 128.

    y = sum over S;  residual = (residual + y / rms(y) * post) * scale;  out = residual / rms(residual) * weight

Programs of one block of 128 columns, as in int4/activations.py, in two kernels,
since y's rms is of the whole row. The first writes y [T, H] and four sums of each block; the second adds,
writes rows, and leaves 1/rms of the residual to the gemm, as int4/activations.py does. Residuals of such models
grow beyond the range of fp16, the format of some rows, so the rows are scaled down by a power of two near their
rms. The four sums give that rms well enough before the residual is computed; the squares are those of the
scaled rows.

    y fp32, fp16 or bf16 [S, T, H]; residual fp32 [T, H], read and written; post and weight [H]
    grids (G, T / rows of a program); sums fp32 [T, G, 4]: of y^2, r^2, r z and z^2, with z = y * post
    and r the residual before

The scale from four sums is our own.
"""

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.int4.activations import (
    Rows,
    check_rows,
    format_of,
    room_of,
    rows_per_program,
    sum_partials,
    write_rows,
)
from localchat_cuda.kernels.int4.pack import BLOCK_K
from localchat_cuda.kernels.launch import (
    KernelLaunch,
    cdiv,
    release,
    require,
    tensor_or,
    traits,
    wait,
)


@triton.jit(do_not_specialize=["T"])
def _sums_kernel(
    source,
    residual,
    post,
    y,
    sums,
    T,
    H: tl.constexpr,
    S: tl.constexpr,
    ROWS: tl.constexpr,
    ROOMY: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    group = tl.program_id(0)
    i = group * 128 + tl.arange(0, 128)
    t = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = t < T
    inside = there[:, None]
    gain = tl.load(post + i).to(tl.float32)
    wait(PDL)
    offsets = t[:, None] * H + i[None, :]
    v = sum_partials(source, offsets, inside, T * H, S)
    r = tl.load(residual + offsets, mask=inside, other=0.0)
    tl.store(y + offsets, v, mask=inside)
    z = v * gain[None, :]
    to = sums + (t * (H // 128) + group) * 4
    tl.store(to, tl.sum(v * v, 1), mask=there)
    tl.store(to + 1, tl.sum(r * r, 1), mask=there)
    tl.store(to + 2, tl.sum(r * z, 1), mask=there)
    tl.store(to + 3, tl.sum(z * z, 1), mask=there)


@triton.jit
def _whole(sums, offsets, inside):
    """Add up the groups' sums of a row."""
    return tl.sum(tl.load(sums + offsets, mask=inside, other=0.0, cache_modifier=".cg"), 1)


@triton.jit(do_not_specialize=["T"])
def _prepare_kernel(
    y,
    sums,
    residual,
    post,
    weight,
    squares,
    x,
    factors,
    order,
    eps,
    factor,
    T,
    H: tl.constexpr,
    MQ: tl.constexpr,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    ORDER: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    G: tl.constexpr = H // 128
    group = tl.program_id(0)
    i = group * 128 + tl.arange(0, 128)
    if ORDER:
        i = tl.load(order + i)
    first = tl.load(post + i).to(tl.float32)
    gain = tl.load(weight + i).to(tl.float32)
    g = tl.arange(0, triton.next_power_of_2(G))
    t = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = t < T
    inside = there[:, None]
    valid = inside & (g < G)[None, :]
    four = (t * G)[:, None] * 4 + g[None, :] * 4
    offsets = t[:, None] * H + i[None, :]
    wait(PDL)
    v = tl.load(y + offsets, mask=inside, other=0.0, cache_modifier=".cg")
    r = tl.load(residual + offsets, mask=inside, other=0.0)
    yy = _whole(sums, four, valid)
    rr = _whole(sums, four + 1, valid)
    rz = _whole(sums, four + 2, valid)
    zz = _whole(sums, four + 3, valid)
    inverse = tl.rsqrt(yy / H + eps)
    zz = zz * inverse * inverse
    # Where residual and sum cancel, the mean is mostly rounding error, but the rows are small in any case.
    mean = (rr + 2.0 * rz * inverse + zz) / H
    scale = tl.exp2(-tl.floor(0.5 * tl.log2(tl.maximum(mean * factor * factor, 1.0))))
    v = (v * inverse[:, None] * first[None, :] + r) * factor
    tl.store(residual + offsets, v, mask=inside)
    v = v * scale[:, None]
    tl.store(squares + t * G + group, tl.sum(v * v, 1), mask=there)
    write_rows(v * gain[None, :], x, factors, group, t, there, H, MQ, FORMAT, GROUP)


def prepare(
    y: torch.Tensor,
    residual: torch.Tensor,
    post: torch.Tensor,
    weight: torch.Tensor,
    rows: Rows,
    squares: torch.Tensor,
    eps: float,
    scale: float = 1.0,
    *,
    order: torch.Tensor | None = None,
) -> None:
    """Normalize `y` [S, T, H], add it to the residual, write the inputs of an int4 gemm.

    These are `rows` and `squares` fp32 [T, G], from which the gemm divides by the rms. H in 128s.
    order int32 [H]: of the columns of rows, as in int4/activations.py. Algorithm in the module docstring.
    """
    t, h = residual.shape
    device = residual.device
    if h % BLOCK_K:
        raise ValueError(f"residual: columns in {BLOCK_K}s wanted, {h} given")
    require("residual", residual, (t, h), device, torch.float32)
    require("y", y, (y.shape[0], t, h), device)
    require("post", post, (h,), device)
    require("weight", weight, (h,), device)
    require("squares", squares, (t, h // BLOCK_K), device, torch.float32)
    check_rows(rows, t, h, device)
    if order is not None:
        require("order", order, (h,), device, torch.int32)
    gpu = traits(device)
    splits = y.shape[0]
    groups = h // BLOCK_K
    several = rows_per_program(t)
    total = torch.empty(t, h, device=device)
    sums = torch.empty(t, groups, 4, device=device)
    grid = groups, cdiv(t, several)
    KernelLaunch(_sums_kernel, grid, gpu, warps=1, rows=t).run(
        y, residual, post, total, sums, t, h, splits, several
    )
    room = room_of(rows)
    KernelLaunch(_prepare_kernel, grid, gpu, warps=1, rows=t).run(
        *(total, sums, residual, post, weight, squares, rows.x, rows.factors),
        *(tensor_or(order, total), eps, scale, t, h, room, format_of(rows), several),
        *(order is not None, rows.group),
    )
