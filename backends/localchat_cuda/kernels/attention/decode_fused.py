"""Rotary embedding, KV storage and decode attention in one launch, for few short sequences.

Letters as in reference.py, decode.py and rope.py. Each of the T sequences has one new token, and no more pages
than `splits`. One kernel does what `rope.rope_store` and `decode.attend` do one after the other, and saves more
than a launch: no kernel of the step writes the keys and values of earlier tokens, so each program loads its
page before it waits for the qkv gemm. The new token never comes from memory: the last program of each key head
rotates its key, stores key and value, and adds them to its own sums. All programs of a key head rotate its
queries, which is why more rows are faster in two launches; so are longer ranges, of whose pages one alone could
be loaded early.

    qkv   [S, T, (H + 2 J) D] fp32, fp16 or bf16, partial sums; rows may be apart, as parts of longer ones
    sums, peaks, masses as of decode.py, for `decode.merge`

Grid (T * J, splits). One stream of a 7B model at 300 tokens takes 3.0 us a layer, in two launches 3.5 (H200).
Not for FP8 pages, latents, drafts, and layers without keys or values of their own.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.attention.decode import LOG2E, Partials, capped
from localchat_cuda.kernels.attention.reference import AttentionBatch, Rules
from localchat_cuda.kernels.launch import KernelLaunch, release, require, tensor_or, traits, wait
from localchat_cuda.kernels.rope import require_pages

MOST_SEQUENCES = 4
_MOST_COLUMNS = 128
_ROWS = 16
"""The last two: columns of a head, and query heads of a key head."""
_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


class FusedShape(NamedTuple):
    """Constants of the kernel. For the letters see reference.py and rope.py."""

    H: int
    J: int
    D: int
    R: int
    """Rotated columns of a head."""
    P: int
    S: int
    ROWS: int
    """Query heads of a tile."""
    BIAS: bool
    NORM: bool
    WINDOW: int
    SOFT_CAP: float
    """Rules.soft_cap."""


@triton.jit
def _head_halves(source, row, head, inside, halves, norm, shape: tl.constexpr):
    """Sum the partial products of heads [N] of the row at `row`, with bias and norm.

    Returns their columns `halves`, two of [N, D/2 and more]. `source`: the products, and what else all heads
    share.
    """
    qkv, stride, bias, eps = source
    low, high = halves
    S: tl.constexpr = shape.S
    pointer = row + head * shape.D
    a = tl.zeros((pointer.shape[0], low.shape[0]), tl.float32)
    b = tl.zeros((pointer.shape[0], low.shape[0]), tl.float32)
    for s in tl.static_range(S):
        part = qkv + s * stride + pointer[:, None]
        a += tl.load(part + low[None, :], mask=inside, other=0.0).to(tl.float32)
        b += tl.load(part + high[None, :], mask=inside, other=0.0).to(tl.float32)
    if shape.BIAS:
        own = bias + head[:, None] * shape.D
        a += tl.load(own + low[None, :], mask=inside, other=0.0).to(tl.float32)
        b += tl.load(own + high[None, :], mask=inside, other=0.0).to(tl.float32)
    if shape.NORM:
        there = low < shape.D
        inverse = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / shape.D + eps)[:, None]
        a = a * inverse * tl.load(norm + low, mask=there, other=0.0).to(tl.float32)[None, :]
        b *= inverse
        b *= tl.load(norm + high, mask=high < shape.D, other=0.0).to(tl.float32)[None, :]
    return a, b


@triton.jit
def _page(
    k, v, cell, key, old, low, high, d, D: tl.constexpr, HALF: tl.constexpr, D_POW2: tl.constexpr
):
    """Load the keys [D/2, P] in halves, and the values [P, D], of a page.

    Values past the old tokens are 0.
    """
    n = tl.arange(0, key.shape[0])
    there = (key < old)[:, None]
    if HALF == D // 2:
        a = tl.load(k + cell + n[None, :] * D + low[:, None])
        b = tl.load(k + cell + n[None, :] * D + high[:, None])
    else:
        half = (tl.arange(0, HALF) < D // 2)[:, None]
        a = tl.load(k + cell + n[None, :] * D + low[:, None], mask=half, other=0.0)
        b = tl.load(k + cell + n[None, :] * D + high[:, None], mask=half, other=0.0)
    if D_POW2 != D:
        there = there & (d < D)[None, :]
    return a, b, tl.load(v + cell + n[:, None] * D + d[None, :], mask=there, other=0.0)


@triton.jit(do_not_specialize=["width", "T"])
def _fused_kernel(
    qkv,
    bias,
    angles,
    q_norm,
    k_norm,
    eps,
    k,
    v,
    batch,
    partials,
    scale,
    width,
    page_stride,
    row_stride,
    part_stride,
    T,
    shape: tl.constexpr,
    QUERIES: tl.constexpr,
    PDL: tl.constexpr,
):
    ROWS: tl.constexpr = shape.ROWS
    H: tl.constexpr = shape.H
    J: tl.constexpr = shape.J
    D: tl.constexpr = shape.D
    P: tl.constexpr = shape.P
    S: tl.constexpr = shape.S
    HALF: tl.constexpr = triton.next_power_of_2(D // 2)
    D_POW2: tl.constexpr = triton.next_power_of_2(D)
    release(PDL)
    pid = tl.program_id(0)
    sequence = pid // J
    group = pid % J
    split = tl.program_id(1)
    start = tl.load(batch.starts + sequence)
    old = tl.load(batch.lengths + sequence) - 1
    table = batch.tables + tl.load(batch.slots + sequence).to(tl.int64) * width
    pages = tl.cdiv(old, P)
    number = split
    if shape.WINDOW > 0:
        number += tl.maximum(old - shape.WINDOW + 1, 0) // P
    i = tl.arange(0, HALF)
    low = i
    high = D // 2 + i
    if shape.R < D:
        low = tl.where(i < shape.R // 2, i, i + shape.R // 2)
        high = tl.where(i < shape.R // 2, i + shape.R // 2, high)
    d = tl.arange(0, D_POW2)
    half = i < D // 2
    cos = tl.load(angles + old * D + i, mask=half, other=0.0)[None, :]
    sin = tl.load(angles + old * D + D // 2 + i, mask=half, other=0.0)[None, :]
    page = tl.load(table + tl.minimum(number, tl.maximum(pages - 1, 0)))
    cell = page.to(tl.int64) * page_stride + group * (P * D)
    # No kernel of the step writes earlier tokens, so their loads begin before the wait.
    key = number * P + tl.arange(0, P)
    a, b, values = _page(k, v, cell, key, old, low, high, d, D, HALF, D_POW2)
    new_page = tl.load(table + old // P)
    is_last = split == tl.num_programs(1) - 1
    wait(PDL)
    r = tl.arange(0, ROWS)
    valid = r < H // J
    head = group * (H // J) + r
    inside = valid[:, None] & half[None, :]
    source = (qkv, part_stride, bias, eps)
    begin = start * row_stride
    qa, qb = _head_halves(source, begin, head, inside, (low, high), q_norm, shape)
    # Loads for the new token begin here, because later ones would wait for memory a second time.
    own = H + group + tl.arange(0, 1)
    columns = tl.where(is_last, D, 0)
    its = (i < columns // 2)[None, :]
    ka, kb = _head_halves(source, begin, own, its, (low, high), k_norm, shape)
    at_v = begin + (H + J + group) * D + d
    value = tl.zeros((D_POW2,), tl.float32)
    for s in tl.static_range(S):
        part = tl.load(qkv + s * part_stride + at_v, mask=d < columns, other=0.0)
        value += part.to(tl.float32)
    if shape.BIAS:
        value += tl.load(bias + (H + J + group) * D + d, mask=d < D, other=0.0).to(tl.float32)
    rotated = (qa * cos - qb * sin).to(QUERIES)
    qb = (qb * cos + qa * sin).to(QUERIES)
    qa = rotated
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D_POW2), tl.float32)
    if number < pages:
        logits = capped(
            tl.dot(qb, b.to(qb.dtype), tl.dot(qa, a.to(qa.dtype))) * scale, shape.SOFT_CAP
        )
        seen = key < old
        if shape.WINDOW > 0:
            seen = seen & (key > old - shape.WINDOW)
        logits = tl.where(seen[None, :], logits, float("-inf"))
        peak = tl.max(logits, 1)
        weights = tl.exp2(logits - tl.where(peak == float("-inf"), 0.0, peak)[:, None])
        acc = tl.dot(weights.to(QUERIES), values.to(QUERIES))
        mass = tl.sum(weights, 1)
    if is_last:
        key_a = (ka * cos - kb * sin).to(k.dtype.element_ty)
        key_b = (kb * cos + ka * sin).to(k.dtype.element_ty)
        stored = value.to(v.dtype.element_ty)
        new = new_page.to(tl.int64) * page_stride + group * (P * D) + old % P * D
        tl.store(k + new + low[None, :], key_a, mask=half[None, :])
        tl.store(k + new + high[None, :], key_b, mask=half[None, :])
        tl.store(v + new + d, stored, mask=d < D)
        new_a = key_a.to(QUERIES).to(tl.float32)
        new_b = key_b.to(QUERIES).to(tl.float32)
        logits = tl.sum(qa.to(tl.float32) * new_a + qb.to(tl.float32) * new_b, 1)
        logits = capped(logits * scale, shape.SOFT_CAP)
        higher = tl.maximum(peak, logits)
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(logits - anchor)
        decay = tl.exp2(peak - anchor)
        rounded = weights.to(QUERIES).to(tl.float32)
        acc = acc * decay[:, None] + rounded[:, None] * stored.to(QUERIES).to(tl.float32)[None, :]
        mass = mass * decay + weights
        peak = higher
    row = (split * T + start) * H + head
    tl.store(partials.peaks + row, peak, mask=valid)
    tl.store(partials.masses + row, mass, mask=valid)
    if (number < pages) | is_last:
        out = partials.sums + row[:, None].to(tl.int64) * D + d[None, :]
        tl.store(out, acc, mask=valid[:, None] & (d < D)[None, :])


def serves(
    qkv: torch.Tensor, h: int, d: int, k: torch.Tensor, exponents: torch.Tensor | None
) -> bool:
    """Return whether `store_and_attend` takes a layer of H query heads, of steps that it takes."""
    j = k.shape[1]
    small = d <= _MOST_COLUMNS and h <= _ROWS * j
    return small and exponents is None and qkv.shape[2] == (h + 2 * j) * d


def store_and_attend(
    qkv: torch.Tensor,
    angles: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: AttentionBatch,
    partials: Partials,
    rules: Rules,
    *,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    columns: int = 0,
) -> None:
    """Rotate and store the new token of each sequence, and fill `partials` with its attention.

    `partials` have at least as many ranges as the longest sequence has pages: later pages would be ignored.
    `angles`, `bias`, norms and `columns` as `rope.rope_store` has them, the rest as `decode.attend`; `dtype`:
    of rotated queries. With PDL the batch and the pages are read before the kernel waits for its predecessor:
    the kernels that write them must have ended, or must not release their dependents early.
    """
    splits, t, width = partials.sums.shape
    h = partials.peaks.shape[2]
    device = qkv.device
    d = width // h
    j = k.shape[1]
    page = k.shape[2]
    require_pages("k", k, d, device)
    require_pages("v", v, d, device)
    require("qkv", qkv, (None, t, (h + 2 * j) * d), device, contiguous=False)
    require("angles", angles, (None, d), device, torch.float32)
    require("starts", batch.starts, (t,), device, torch.int32)
    if k.stride() != v.stride():
        raise ValueError(f"v: strides of k wanted, {v.stride()} given for {k.stride()}")
    gpu = traits(device)
    shape = FusedShape(
        H=h,
        J=j,
        D=d,
        R=columns or d,
        P=page,
        S=qkv.shape[0],
        ROWS=_ROWS,
        BIAS=bias is not None,
        NORM=q_norm is not None,
        WINDOW=rules.window,
        SOFT_CAP=rules.soft_cap,
    )
    norms = (tensor_or(q_norm, qkv), tensor_or(k_norm, qkv), eps)
    scale = rules.scale_for(d) * LOG2E.value
    strides = (k.stride(0), qkv.stride(1), qkv.stride(0))
    KernelLaunch(_fused_kernel, (t * j, splits), gpu, warps=4, rows=t).run(
        *(qkv, tensor_or(bias, qkv), angles, *norms, k, v, batch, partials, scale),
        *(batch.tables.shape[1], *strides, t, shape, _TYPES[dtype]),
    )
