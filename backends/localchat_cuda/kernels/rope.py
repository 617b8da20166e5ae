"""Rotary position embedding, and storing of new keys and values in the paged KV cache.

Letters: T tokens, S partial sums, H query heads, J key/value heads, D head dimension, P tokens per
page.

One kernel reads the output of the qkv gemm (partial sums of an int4 gemm, or one fp16/bf16 matrix),
adds the bias if the model has one, normalizes q and k per head if the model does (Qwen3), rotates q
and k, and writes q [T, H, D] and, at each token's position in its sequence's block table, k and v.

    qkv       [S, T, (H + 2 J) D] fp32, fp16 or bf16: q heads, k heads, v heads; without v heads k are also
              v, before their norm and rotation; with q heads alone nothing is stored
    angles    fp32 [positions, D]: cosines of the D/2 pairs, then sines (`angles`, `angle_table`)
    positions int32 [T];  slots int32 [T]: row of the block table;  tables int32 [slots, width]
    k, v      [pages, J, P, D]: a page of one head is contiguous, as a tile of attention is;
              or bytes with `exponents` (attention/kv_fp8.py); then q and k are rotated once more

Grid (T, (H + 2 J) / heads of a program), one warp each; fp32 inside. The rotation pairs element i
with i + R/2, as checkpoints on the Hugging Face hub have it, for the first R columns of a head: R = D but for
few models. The other columns form pairs i and i + (D - R)/2 with cosine 1 and sine 0 in the table.
RoFormer (Su et al., 2021); paging after vLLM (Kwon et al., 2023).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.attention import kv_fp8
from localchat_cuda.kernels.launch import KernelLaunch, release, require, tensor_or, traits, wait

_RUN = 8192
_ALONE = 32
"""Up to this token count each head has a program of its own."""


def angle_table(
    positions: int, d: int, radians: Sequence[float], device: torch.device, magnitude: float = 1.0
) -> torch.Tensor:
    """Compute the table fp32 [positions, D] that the kernel reads.

    `radians` per position of the R/2 rotated pairs; `magnitude` multiplies their cosines and sines.
    """
    if device.type == "meta":
        # Compiling ahead needs no numbers, and `arange` on this device imports sympy.
        return torch.empty(positions, d, device=device)
    turning = len(radians)
    half = d // 2
    rates = torch.tensor([*radians], dtype=torch.float64, device=device)
    table = torch.zeros(positions, d, device=device)
    table[:, turning:half] = 1.0
    # In chunks: in fp64 a long context would take four times the table's memory.
    for low in range(0, positions, _RUN):
        rows = slice(low, min(low + _RUN, positions))
        token_positions = torch.arange(rows.start, rows.stop, dtype=torch.float64, device=device)
        angle = token_positions[:, None] * rates
        table[rows, :turning] = angle.cos() * magnitude
        table[rows, half : half + turning] = angle.sin() * magnitude
    return table


def angles(positions: int, d: int, theta: float, device: torch.device) -> torch.Tensor:
    """Compute the table of an unscaled rotation of all columns."""
    return angle_table(positions, d, [theta ** (-i / d) for i in range(0, d, 2)], device)


def reference(
    qkv: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    tables: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    v_norm: bool = False,
    eps: float = 1e-6,
    columns: int = 0,
    exponents: torch.Tensor | None = None,
) -> None:
    """`rope_store` in plain torch, same arguments."""
    t, h, d = q.shape
    half = (columns or d) // 2
    j = k.shape[1]
    page = k.shape[2]
    total = qkv.float().sum(0)
    if bias is not None:
        total = total + bias.float()
    heads = total.view(t, -1, d)
    cos, sin = table[positions.long()].view(t, 1, 2, d // 2).unbind(2)

    def rotate(x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        if norm is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm.float()
        a = x[..., :half]
        b = x[..., half : 2 * half]
        still = x[..., 2 * half :]
        c = cos[..., :half]
        s = sin[..., :half]
        x = torch.cat((a * c - b * s, b * c + a * s, still), -1)
        return x if exponents is None else _spread(x, half)

    q.copy_(rotate(heads[:, :h], q_norm))
    if heads.shape[1] == h:
        return
    pages = tables[slots.long(), positions.long() // page].long()
    offsets = positions.long() % page
    keys = rotate(heads[:, h : h + j], k_norm)
    values = heads[:, -j:]
    if v_norm:
        values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    if exponents is None:
        k[pages, :, offsets] = keys.to(k.dtype)
        v[pages, :, offsets] = values.to(v.dtype)
        return
    for i, (cache, new) in enumerate(((k, keys), (v, values))):
        cache[pages, :, offsets], exponents[pages, :, offsets, i] = kv_fp8.encode_reference(new)


def _spread(x: torch.Tensor, half: int) -> torch.Tensor:
    """Rotate x [..., D] by the Hadamard matrix of 8-bit keys, in the kernel's pairs of columns."""
    d = x.shape[-1]
    columns = torch.arange(d, device=x.device)
    low = torch.cat((columns[:half], columns[2 * half : half + d // 2]))
    high = torch.cat((columns[half : 2 * half], columns[half + d // 2 :]))
    pairs = torch.cat((low, high))
    rotated = torch.empty_like(x)
    rotated[..., pairs] = kv_fp8.hadamard_reference(x[..., pairs])
    return rotated


class Cache(NamedTuple):
    """Pages of a layer, as kernels read them."""

    k: torch.Tensor
    v: torch.Tensor
    marks: torch.Tensor
    """Exponents of FP8 keys and values, or any tensor. Readers see those of both as a word."""
    page_stride: int
    mark_stride: int

    @staticmethod
    def of(k: torch.Tensor, v: torch.Tensor, exponents: torch.Tensor | None) -> "Cache":
        """Return the pages for a kernel that reads them."""
        if exponents is None:
            return Cache(k, v, k, k.stride(0), 0)
        return Cache(k, v, exponents.view(torch.int16), k.stride(0), exponents.stride(0) // 2)


class RopeShape(NamedTuple):
    """Constants of the kernel. For the letters see the module docstring."""

    H: int
    J: int
    D: int
    R: int
    """Rotated columns of a head."""
    P: int
    S: int
    BIAS: bool
    NORM: bool
    """Queries and keys are normalized per head; NORM_V: values, without weights."""
    NORM_V: bool
    STORED: int
    """Heads after the queries: none, keys that are also values, or keys and values."""
    HEADS: int
    """Heads of a program."""
    CODED: bool
    """Pages are FP8."""


@triton.jit
def partial_sum(qkv, offsets, inside, stride, S: tl.constexpr):
    """Load columns and sum their partial products."""
    if S == 1:
        return tl.load(qkv + offsets, mask=inside, other=0.0).to(tl.float32)
    else:
        s = tl.arange(0, triton.next_power_of_2(S))
        there = (s < S)[:, None] & inside[None, :]
        parts = tl.load(qkv + s[:, None] * stride + offsets[None, :], mask=there, other=0.0)
        return tl.sum(parts.to(tl.float32), 0)


@triton.jit(do_not_specialize=["T", "width"])
def _rope_kernel(
    qkv,
    bias,
    table,
    positions,
    slots,
    tables,
    q,
    cache,
    q_norm,
    k_norm,
    eps,
    T,
    width,
    shape: tl.constexpr,
    ROOMY: tl.constexpr,
    PDL: tl.constexpr,
):
    H: tl.constexpr = shape.H
    J: tl.constexpr = shape.J
    D: tl.constexpr = shape.D
    R: tl.constexpr = shape.R
    P: tl.constexpr = shape.P
    HEADS: tl.constexpr = shape.HEADS
    release(PDL)
    t = tl.program_id(0)
    first = tl.program_id(1) * HEADS
    i = tl.arange(0, triton.next_power_of_2(D // 2))
    inside = i < D // 2
    low = i
    high = D // 2 + i
    if R < D:
        low = tl.where(i < R // 2, i, i + R // 2)
        high = tl.where(i < R // 2, i + R // 2, high)
    # no kernel of the chain writes anything but qkv, so the rest is read before the wait
    position = tl.load(positions + t)
    page = tl.load(tables + tl.load(slots + t) * width + position // P).to(tl.int64)
    cos = tl.load(table + position * D + i, mask=inside, other=0.0)
    sin = tl.load(table + position * D + D // 2 + i, mask=inside, other=0.0)
    wait(PDL)
    columns: tl.constexpr = (H + J * shape.STORED) * D
    for n in tl.static_range(HEADS):
        head = first + n
        offset = t * columns + head * D
        if shape.STORED == 1:
            offset -= tl.where(head < H + J, 0, J * D)
        a = partial_sum(qkv, offset + low, inside, T * columns, shape.S)
        b = partial_sum(qkv, offset + high, inside, T * columns, shape.S)
        if shape.BIAS:
            a += tl.load(bias + head * D + low, mask=inside, other=0.0).to(tl.float32)
            b += tl.load(bias + head * D + high, mask=inside, other=0.0).to(tl.float32)
        if head < H + J:
            if shape.NORM:
                gain = q_norm if head < H else k_norm
                inverse = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / D + eps)
                a = a * inverse * tl.load(gain + low, mask=inside, other=0.0).to(tl.float32)
                b = b * inverse * tl.load(gain + high, mask=inside, other=0.0).to(tl.float32)
            rotated = a * cos - b * sin
            b = b * cos + a * sin
            a = rotated
        elif shape.NORM_V:
            inverse = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / D + eps)
            a *= inverse
            b *= inverse
        if shape.CODED and head < H + J:
            a, b = kv_fp8.hadamard(a, b, D)
        if head < H:
            out = q + (t * H + head) * D
            tl.store(out + low, a.to(q.dtype.element_ty), mask=inside)
            tl.store(out + high, b.to(q.dtype.element_ty), mask=inside)
        elif shape.CODED:
            code_a, code_b, exponent = kv_fp8.encode(a, b)
            second = (head - H) // J
            row = (head - H) % J * P + position % P
            at_row = page * cache.page_stride + row * (D // 2)
            if second == 0:
                kv_fp8.put(cache.k + at_row, code_a, code_b, low, high, inside, D, R)
            else:
                kv_fp8.put(cache.v + at_row, code_a, code_b, low, high, inside, D, R)
            mark = page * cache.mark_stride + row * 2 + second
            tl.store(cache.marks + mark, exponent.to(tl.uint8))
        else:
            cell = page * cache.page_stride + position % P * D
            if head < H + J:
                out = cache.k + cell + (head - H) * (P * D)
                tl.store(out + low, a.to(cache.k.dtype.element_ty), mask=inside)
                tl.store(out + high, b.to(cache.k.dtype.element_ty), mask=inside)
            else:
                out = cache.v + cell + (head - H - J) * (P * D)
                tl.store(out + low, a.to(cache.v.dtype.element_ty), mask=inside)
                tl.store(out + high, b.to(cache.v.dtype.element_ty), mask=inside)


def require_pages(
    name: str,
    pages: torch.Tensor,
    d: int,
    device: torch.device,
    exponents: torch.Tensor | None = None,
) -> None:
    """Raise ValueError unless `pages` is [pages, J, P, D] with each page's heads dense.

    Any stride between pages is allowed, so that keys and values may share one tensor [pages, 2, J, P, D]. With
    `exponents` the pages hold words of two FP8 bytes.
    """
    width = d if exponents is None else d // 2
    if pages.dim() != 4 or pages.shape[3] != width:
        expected = f"pages x heads x tokens x {width}"
        raise ValueError(f"{name}: {expected} wanted, {tuple(pages.shape)} given")
    _, heads, page, _ = pages.shape
    if pages.stride()[1:] != (page * width, width, 1) or pages.device != device or heads == 0:
        raise ValueError(f"{name}: pages of dense heads on {device} wanted")
    if (pages.dtype == torch.int16) != (exponents is not None):
        raise ValueError(f"{name}: codes with exponents wanted, or numbers without")
    if exponents is not None:
        kv_fp8.require_exponents(exponents, pages, device)


def heads_of(tokens: int, heads: int) -> int:
    """Return the heads of a program: one for few tokens, else several.

    Starting a program takes longer than one head's 256 bytes (of a 7B model 6.5 and 3.0 us for 128 tokens with
    one and with four heads, 90 and 15 us for 2,048 with one and with nine).
    """
    if tokens <= _ALONE:
        return 1
    max_heads = 4 if tokens <= 256 else 9
    return next(n for n in range(max_heads, 0, -1) if heads % n == 0)


def rope_store(
    qkv: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    tables: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    v_norm: bool = False,
    eps: float = 1e-6,
    columns: int = 0,
    exponents: torch.Tensor | None = None,
) -> None:
    """Rotate and store; shapes in the module docstring.

    `q_norm` and `k_norm` [D] come together or not at all; with `v_norm` values are normalized without weights.
    `columns`: R, 0 for all of a head. With `exponents` k
    and v are FP8 bytes. With PDL all but qkv is read before the kernel waits for its predecessor: the kernel
    that writes it must have ended, or must not release its dependents early.
    """
    t, h, d = q.shape
    device = q.device
    require_pages("k", k, d, device, exponents)
    require_pages("v", v, d, device, exponents)
    j = k.shape[1]
    page = k.shape[2]
    splits = qkv.shape[0]
    stored = max(0, min(2, (qkv.shape[2] // d - h) // j))
    require("qkv", qkv, (splits, t, (h + stored * j) * d), device)
    require("table", table, (None, d), device, torch.float32)
    require("positions", positions, (t,), device, torch.int32)
    require("slots", slots, (t,), device, torch.int32)
    require("tables", tables, (None, None), device, torch.int32)
    require("q", q, (t, h, d), device)
    if k.stride() != v.stride():
        raise ValueError(f"v: strides of k wanted, {v.stride()} given for {k.stride()}")
    if columns % 2 or not 0 <= columns <= d:
        raise ValueError(f"columns: an even number of 0 to {d} wanted, {columns} given")
    if bias is not None:
        require("bias", bias, ((h + stored * j) * d,), device)
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm, k_norm: both or neither wanted")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            require(name, norm, (d,), device)
    gpu = traits(device)
    written = h + 2 * j if stored else h
    together = heads_of(t, written)
    shape = RopeShape(
        H=h,
        J=j,
        D=d,
        R=columns or d,
        P=page,
        S=splits,
        BIAS=bias is not None,
        NORM=q_norm is not None,
        NORM_V=v_norm,
        STORED=stored,
        HEADS=together,
        CODED=exponents is not None,
    )
    mark_stride = 0 if exponents is None else exponents.stride(0)
    cache = Cache(k, v, tensor_or(exponents, k), k.stride(0), mark_stride)
    norms = (tensor_or(q_norm, qkv), tensor_or(k_norm, qkv), eps)
    KernelLaunch(_rope_kernel, (t, written // together), gpu, warps=1, rows=t).run(
        *(qkv, tensor_or(bias, qkv), table, positions, slots, tables, q, cache, *norms, t),
        *(tables.shape[1], shape),
    )
