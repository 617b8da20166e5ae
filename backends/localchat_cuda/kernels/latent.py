"""Multi-head latent attention around its kernel: norms and rotations of queries and latents, and their pages.

Letters: T tokens, S partial sums, H query heads, N plain and E rotated columns of a query head, D columns of a
latent, Q of the latent of queries, P tokens per page.

A token's keys and values of all heads are one row: a latent of D columns, normalized, and a rotated key of
E that the heads share. Each head's keys and values would be products of the latent. The key's matrix is
multiplied into the queries instead, the value's into what attention gives: it runs over the rows themselves.

    q        [S, T, ..] fp32, fp16 or bf16 beginning with H heads of N plain columns and E to rotate
    latents  [S', T, ..] (or q itself) ending with D columns and E to rotate; of its own it may begin with the
             Q of the latent of queries
    table    fp32 [positions, E] (rope.angle_table)      positions, slots int32 [T]
    tables   int32 [slots, width]
    plain    [T, H, N] fp16 or bf16
    queries  [T, H, D + E], of which the last E are written
    pages    [pages, 1, P, D + E]

Columns are rotated in pairs of neighbours, or half of E apart; the pages have them half of E apart. fp32
inside. Grids: store (T, H / heads of a program + 1), norm (T,). The absorbed form of DeepSeek-V2 (arXiv
2405.04434); paging after vLLM.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.launch import KernelLaunch, power_of_two, release, require, traits, wait
from localchat_cuda.kernels.rope import heads_of, partial_sum, require_pages


def store_reference(
    q: torch.Tensor,
    latents: torch.Tensor,
    gain: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    tables: torch.Tensor,
    plain: torch.Tensor,
    queries: torch.Tensor,
    pages: torch.Tensor,
    eps: float,
    *,
    neighbours: bool,
) -> None:
    """`store` in plain torch, same arguments."""
    (t, h, n), (d, tail) = plain.shape, _widths(gain, table)
    cos, sin = table[positions.long()].view(t, 1, 2, tail // 2).unbind(2)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        pairs = x.unflatten(-1, (-1, 2)).unbind(-1) if neighbours else x.chunk(2, -1)
        return torch.cat((pairs[0] * cos - pairs[1] * sin, pairs[1] * cos + pairs[0] * sin), -1)

    heads = q[..., : h * (n + tail)].float().sum(0).view(t, h, n + tail)
    plain.copy_(heads[..., :n])
    queries[..., d:] = rotate(heads[..., n:]).to(queries.dtype)
    rows = latents[..., -(d + tail) :].float().sum(0)
    page_rows = tables[slots.long(), positions.long() // pages.shape[2]].long()
    row = torch.cat((_normed(rows[:, :d], gain, eps), rotate(rows[:, None, d:])[:, 0]), -1)
    pages[page_rows, 0, positions.long() % pages.shape[2]] = row.to(pages.dtype)


def norm_reference(y: torch.Tensor, gain: torch.Tensor, out: torch.Tensor, eps: float) -> None:
    """`norm` in plain torch, same arguments."""
    out.copy_(_normed(y[..., : len(gain)].float().sum(0), gain, eps))


def _normed(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain.float()


class LatentShape(NamedTuple):
    """Constants of the kernel that stores. For the letters see the module docstring."""

    H: int
    N: int
    D: int
    E: int
    Q_COLUMNS: int
    COLUMNS: int
    """Columns of the products q and latents."""
    P: int
    S: int
    SL: int
    """Partial sums of q and of latents."""
    HEADS: int
    """Heads of a program."""
    NEIGHBOURS: bool
    """Rotation pairs neighbouring columns, not halves."""


@triton.jit(do_not_specialize=["T", "width"])
def _store_kernel(
    q,
    latents,
    gain,
    table,
    positions,
    slots,
    tables,
    plain,
    queries,
    pages,
    eps,
    T,
    width,
    page_stride,
    shape: tl.constexpr,
    ROOMY: tl.constexpr,
    PDL: tl.constexpr,
):
    N: tl.constexpr = shape.N
    D: tl.constexpr = shape.D
    E: tl.constexpr = shape.E
    HEADS: tl.constexpr = shape.HEADS
    release(PDL)
    t = tl.program_id(0)
    block = tl.program_id(1)
    i = tl.arange(0, E // 2)
    turned = i < E // 2
    low = 2 * i if shape.NEIGHBOURS else i
    high = low + (1 if shape.NEIGHBOURS else E // 2)
    # no kernel of the chain writes anything but the gemms' results, so the rest is read before the wait
    position = tl.load(positions + t)
    page = tl.load(tables + tl.load(slots + t) * width + position // shape.P).to(tl.int64)
    cos = tl.load(table + position * E + i)
    sin = tl.load(table + position * E + E // 2 + i)
    wait(PDL)
    if block < shape.H // HEADS:
        n = tl.arange(0, triton.next_power_of_2(shape.N))
        for local_head in tl.static_range(HEADS):
            head = block * HEADS + local_head
            offset = t * shape.Q_COLUMNS + head * (N + E)
            head += t * shape.H
            x = partial_sum(q, offset + n, n < N, T * shape.Q_COLUMNS, shape.S)
            tl.store(plain + head * N + n, x.to(plain.dtype.element_ty), mask=n < N)
            a = partial_sum(q, offset + N + low, turned, T * shape.Q_COLUMNS, shape.S)
            b = partial_sum(q, offset + N + high, turned, T * shape.Q_COLUMNS, shape.S)
            out = queries + head * (D + E) + D + i
            tl.store(out, (a * cos - b * sin).to(queries.dtype.element_ty))
            tl.store(out + E // 2, (b * cos + a * sin).to(queries.dtype.element_ty))
    else:
        d = tl.arange(0, D)
        offset = (t + 1) * shape.COLUMNS - (D + E)
        row = partial_sum(latents, offset + d, d < D, T * shape.COLUMNS, shape.SL)
        row *= tl.rsqrt(tl.sum(row * row, 0) / D + eps) * tl.load(gain + d).to(tl.float32)
        cell = pages + page * page_stride + position % shape.P * (D + E)
        tl.store(cell + d, row.to(pages.dtype.element_ty))
        a = partial_sum(latents, offset + D + low, turned, T * shape.COLUMNS, shape.SL)
        b = partial_sum(latents, offset + D + high, turned, T * shape.COLUMNS, shape.SL)
        tl.store(cell + D + i, (a * cos - b * sin).to(pages.dtype.element_ty))
        tl.store(cell + D + E // 2 + i, (b * cos + a * sin).to(pages.dtype.element_ty))


@triton.jit(do_not_specialize=["T"])
def _norm_kernel(
    y,
    gain,
    out,
    eps,
    T,
    Q: tl.constexpr,
    COLUMNS: tl.constexpr,
    S: tl.constexpr,
    ROOMY: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    t = tl.program_id(0)
    i = tl.arange(0, triton.next_power_of_2(Q))
    weight = tl.load(gain + i, mask=i < Q, other=0.0).to(tl.float32)
    wait(PDL)
    x = partial_sum(y, t * COLUMNS + i, i < Q, T * COLUMNS, S)
    x *= tl.rsqrt(tl.sum(x * x, 0) / Q + eps) * weight
    tl.store(out + t * Q + i, x.to(out.dtype.element_ty), mask=i < Q)


def store(
    q: torch.Tensor,
    latents: torch.Tensor,
    gain: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    tables: torch.Tensor,
    plain: torch.Tensor,
    queries: torch.Tensor,
    pages: torch.Tensor,
    eps: float,
    *,
    neighbours: bool,
) -> None:
    """Norm and rotate; shapes in the module docstring. `gain` [D]; `neighbours`: how columns are paired.

    With PDL all but q and latents is read before the kernel waits for its predecessor, as in rope_store.
    """
    (t, h, n), (d, tail), device = plain.shape, _widths(gain, table), q.device
    require("q", q, (None, t, None), device)
    require("latents", latents, (None, t, None), device)
    require("gain", gain, (d,), device)
    require("table", table, (None, tail), device, torch.float32)
    for name, tensor in (("positions", positions), ("slots", slots)):
        require(name, tensor, (t,), device, torch.int32)
    require("tables", tables, (None, None), device, torch.int32)
    require("plain", plain, (t, h, n), device)
    require("queries", queries, (t, h, d + tail), device)
    require_pages("pages", pages, d + tail, device)
    if q.shape[2] < h * (n + tail):
        raise ValueError(f"q: {h * (n + tail)} columns or more wanted, {q.shape[2]} given")
    if power_of_two(d) != d or power_of_two(tail) != tail or latents.shape[2] < d + tail:
        raise ValueError(f"gain, table: powers of two wanted, {d} and {tail} columns given")
    together = heads_of(t, h)
    shape = LatentShape(
        H=h,
        N=n,
        D=d,
        E=tail,
        Q_COLUMNS=q.shape[2],
        COLUMNS=latents.shape[2],
        P=pages.shape[2],
        S=q.shape[0],
        SL=latents.shape[0],
        HEADS=together,
        NEIGHBOURS=neighbours,
    )
    grid = (t, h // together + 1)
    warps = 4
    if t <= 16:
        warps = 1
    KernelLaunch(_store_kernel, grid, traits(device), warps, rows=t).run(
        *(q, latents, gain, table, positions, slots, tables, plain, queries, pages, eps, t),
        *(tables.shape[1], pages.stride(0), shape),
    )


def norm(y: torch.Tensor, gain: torch.Tensor, out: torch.Tensor, eps: float) -> None:
    """Norm the first Q columns of partial sums y [S, T, ..].

    `out` is [T, Q], and `gain` is [Q].
    """
    (s, t, columns), q, device = y.shape, len(gain), y.device
    require("y", y, (s, t, columns), device)
    require("gain", gain, (q,), device)
    require("out", out, (t, q), device)
    KernelLaunch(_norm_kernel, (t,), traits(device), warps=4, rows=t).run(
        y, gain, out, eps, t, q, columns, s
    )


def _widths(gain: torch.Tensor, table: torch.Tensor) -> tuple[int, int]:
    """D and E."""
    return len(gain), table.shape[1]
