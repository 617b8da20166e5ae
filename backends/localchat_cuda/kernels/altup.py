"""Alternating updates (AltUp): a layer predicts all streams of a residual, and corrects them by its result.

Letters: A streams, T rows, H columns, S partial sums. Stream 0 is active: a layer computes with it alone.

    m(x) = tanh(router norm(x) / H), A numbers a row
    predict     streams[1:] += norm(y);  streams += C streams, C [A, A] = prediction m(streams[0]);
                out = x, the norm of streams[0]
    add_laurel  residual = (streams[0] + norm(y) + x + norm(laurel)) / sqrt(2);  out = norm(residual)
    correct     active = residual + norm(y);  streams += (1 + correction m(active)) (active - streams[0]);
                out = streams[0] scaled

    streams fp32 [A, T, H], read and written; residual fp32 [T, H]; y and laurel [S, T, H] fp32, fp16 or bf16;
    gains of norms [H]; out [T, H] fp32, fp16 or bf16

Grid (T,): a program a row, which keeps all of its streams in registers, in fp32. Not supported: more than a
few streams of a few thousand columns.

AltUp: Baykal et al., 2023 (arXiv 2301.13310). Laurel, a low-rank product beside attention: Menghani et al.,
2024 (arXiv 2411.07501).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.launch import KernelLaunch, release, require, row_warps, traits, wait

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_HALF_POWER = tl.constexpr(0.5**0.5)


class AltUpWeights(NamedTuple):
    """Weights of a layer's alternating updates, of one dtype."""

    router: torch.Tensor
    """[A, H]"""
    norm: torch.Tensor
    """[H], of what the router reads."""
    prediction: torch.Tensor
    """[A * A, A]"""
    correction: torch.Tensor
    """[A, A]"""
    scale: torch.Tensor
    """[H], of the corrected stream 0."""


class Added(NamedTuple):
    """Partial sums [S, T, H] that pass through a norm with a gain [H] before the addition."""

    y: torch.Tensor
    gain: torch.Tensor


def _normed(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain.float()


def _added(part: Added, eps: float) -> torch.Tensor:
    return _normed(part.y.float().sum(0), part.gain, eps)


def _routed(x: torch.Tensor, weights: AltUpWeights, eps: float) -> torch.Tensor:
    rows = _normed(x, weights.norm, eps) / x.shape[1]
    return torch.tanh(rows @ weights.router.float().t())


def predict_reference(
    streams: torch.Tensor,
    weights: AltUpWeights,
    gain: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    before: Added | None = None,
) -> None:
    """`predict` in plain torch, same arguments."""
    if before is not None:
        streams[1:] += _added(before, eps)
    count, rows = streams.shape[:2]
    routed = _routed(streams[0], weights, eps) @ weights.prediction.float().t()
    streams += torch.einsum("tkj,jth->kth", routed.view(rows, count, count), streams)
    out.copy_(_normed(streams[0], gain, eps))


def add_laurel_reference(
    streams: torch.Tensor,
    attention: Added,
    laurel: Added,
    gains: tuple[torch.Tensor, torch.Tensor],
    residual: torch.Tensor,
    out: torch.Tensor,
    eps: float,
) -> None:
    """`add_laurel` in plain torch, same arguments."""
    total = streams[0] + _added(attention, eps) + _added(laurel, eps)
    residual.copy_((total + _normed(streams[0], gains[0], eps)) * _HALF_POWER.value)
    out.copy_(_normed(residual, gains[1], eps))


def correct_reference(
    streams: torch.Tensor,
    residual: torch.Tensor,
    part: Added,
    weights: AltUpWeights,
    out: torch.Tensor,
    eps: float,
) -> None:
    """`correct` in plain torch, same arguments."""
    active = residual + _added(part, eps)
    shares = 1.0 + _routed(active, weights, eps) @ weights.correction.float().t()
    streams += shares.t()[..., None] * (active - streams[0])
    out.copy_(streams[0] * weights.scale.float())


@triton.jit
def _norm(x, gain, H: tl.constexpr, eps):
    return x * tl.rsqrt(tl.sum(x * x, 0) / H + eps) * gain


@triton.jit
def _sum(y, gain, t, i, inside, T, H: tl.constexpr, S: tl.constexpr, eps):
    """Partial sums of a row, added up and normed."""
    total = tl.zeros(i.shape, tl.float32)
    for s in tl.static_range(S):
        total += tl.load(y + (s * T + t) * H + i, mask=inside, other=0.0).to(tl.float32)
    return _norm(total, gain, H, eps)


@triton.jit
def _route(x, gain, router, H: tl.constexpr, eps):
    """m(x) of a row x [H] by a router [A, H]: [A]."""
    routed = tl.sum(router * _norm(x, gain, H, eps)[None, :], 1) / H
    return 1.0 - 2.0 / (tl.exp(2.0 * routed) + 1.0)


@triton.jit
def _row(tile, a, number):
    """Select a row of a tile [A, H]."""
    return tl.sum(tl.where((a == number)[:, None], tile, 0.0), 0)


@triton.jit(do_not_specialize=["T"])
def _predict_kernel(
    streams,
    before,
    weights,
    gain,
    out,
    eps,
    T,
    A: tl.constexpr,
    H: tl.constexpr,
    S: tl.constexpr,
    ROOMY: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    t = tl.program_id(0).to(tl.int64)
    a = tl.arange(0, triton.next_power_of_2(A))
    i = tl.arange(0, triton.next_power_of_2(H))
    there = a < A
    inside = i < H
    tile = there[:, None] & inside[None, :]
    square = there[:, None] & there[None, :]
    routes = tl.load(weights.router + a[:, None] * H + i[None, :], mask=tile, other=0.0).to(
        tl.float32
    )
    first = tl.load(weights.norm + i, mask=inside, other=0.0).to(tl.float32)
    last = tl.load(gain + i, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    offsets = (a[:, None] * T + t) * H + i[None, :]
    x = tl.load(streams + offsets, mask=tile, other=0.0)
    if S > 0:
        gain_before = tl.load(before.gain + i, mask=inside, other=0.0).to(tl.float32)
        total = _sum(before.y, gain_before, t, i, inside, T, H, S, eps)
        x += tl.where((a > 0)[:, None], total[None, :], 0.0)
    routed = _route(_row(x, a, 0), first, routes, H, eps)
    for k in tl.static_range(A):
        cells = weights.prediction + (k * A + a[:, None]) * A + a[None, :]
        shares = tl.load(cells, mask=square, other=0.0).to(tl.float32)
        shares = tl.sum(shares * routed[None, :], 1) + tl.where(a == k, 1.0, 0.0)
        row_sum = tl.sum(x * shares[:, None], 0)
        tl.store(streams + (k * T + t) * H + i, row_sum, mask=inside)
        if k == 0:
            normed = _norm(row_sum, last, H, eps)
            tl.store(out + t * H + i, normed.to(out.dtype.element_ty), mask=inside)


def predict(
    streams: torch.Tensor,
    weights: AltUpWeights,
    gain: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    before: Added | None = None,
) -> None:
    """Predict the streams of a layer.

    The streams beyond the first receive what the layer `before` adds to them first.
    """
    a, t, h = _check(streams, out, before)
    _check_weights(weights, a, h, streams.device)
    require("gain", gain, (h,), _FLOATS, streams.device)
    if t == 0:
        return
    splits = 0 if before is None else before.y.shape[0]
    added = before or Added(streams, gain)
    KernelLaunch(_predict_kernel, (t,), traits(streams.device), warps=row_warps(h), rows=t).run(
        streams, added, weights, gain, out, eps, t, a, h, splits
    )


@triton.jit(do_not_specialize=["T"])
def _add_laurel_kernel(
    streams,
    attention,
    other,
    first,
    second,
    residual,
    out,
    eps,
    T,
    H: tl.constexpr,
    S: tl.constexpr,
    SL: tl.constexpr,
    ROOMY: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, triton.next_power_of_2(H))
    inside = i < H
    gain = tl.load(attention.gain + i, mask=inside, other=0.0).to(tl.float32)
    gain_laurel = tl.load(other.gain + i, mask=inside, other=0.0).to(tl.float32)
    gain_first = tl.load(first + i, mask=inside, other=0.0).to(tl.float32)
    gain_second = tl.load(second + i, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    x = tl.load(streams + t * H + i, mask=inside, other=0.0)
    total = x + _sum(attention.y, gain, t, i, inside, T, H, S, eps) + _norm(x, gain_first, H, eps)
    total += _sum(other.y, gain_laurel, t, i, inside, T, H, SL, eps)
    total *= _HALF_POWER
    tl.store(residual + t * H + i, total, mask=inside)
    total = _norm(total, gain_second, H, eps)
    tl.store(out + t * H + i, total.to(out.dtype.element_ty), mask=inside)


def add_laurel(
    streams: torch.Tensor,
    attention: Added,
    laurel: Added,
    gains: tuple[torch.Tensor, torch.Tensor],
    residual: torch.Tensor,
    out: torch.Tensor,
    eps: float,
) -> None:
    """Write the residual after attention, and its norm. `gains`: of the norms before attention and after."""
    _, t, h = _check(streams, out, attention, laurel)
    device = streams.device
    require("residual", residual, (t, h), (torch.float32,), device)
    for gain in gains:
        require("gains", gain, (h,), _FLOATS, device)
    if t == 0:
        return
    sums = (attention.y.shape[0], laurel.y.shape[0])
    KernelLaunch(_add_laurel_kernel, (t,), traits(device), warps=row_warps(h), rows=t).run(
        streams, attention, laurel, *gains, residual, out, eps, t, h, *sums
    )


@triton.jit(do_not_specialize=["T"])
def _correct_kernel(
    streams,
    residual,
    part,
    weights,
    out,
    eps,
    T,
    A: tl.constexpr,
    H: tl.constexpr,
    S: tl.constexpr,
    ROOMY: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    t = tl.program_id(0).to(tl.int64)
    a = tl.arange(0, triton.next_power_of_2(A))
    i = tl.arange(0, triton.next_power_of_2(H))
    there = a < A
    inside = i < H
    tile = there[:, None] & inside[None, :]
    routes = tl.load(weights.router + a[:, None] * H + i[None, :], mask=tile, other=0.0).to(
        tl.float32
    )
    cells = weights.correction + a[:, None] * A + a[None, :]
    shares = tl.load(cells, mask=there[:, None] & there[None, :], other=0.0).to(tl.float32)
    first = tl.load(weights.norm + i, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(part.gain + i, mask=inside, other=0.0).to(tl.float32)
    last = tl.load(weights.scale + i, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    active = tl.load(residual + t * H + i, mask=inside, other=0.0)
    active += _sum(part.y, gain, t, i, inside, T, H, S, eps)
    routed = _route(active, first, routes, H, eps)
    shares = 1.0 + tl.sum(shares * routed[None, :], 1)
    offsets = (a[:, None] * T + t) * H + i[None, :]
    x = tl.load(streams + offsets, mask=tile, other=0.0)
    x += shares[:, None] * (active - _row(x, a, 0))[None, :]
    tl.store(streams + offsets, x, mask=tile)
    corrected_row = _row(x, a, 0) * last
    tl.store(out + t * H + i, corrected_row.to(out.dtype.element_ty), mask=inside)


def correct(
    streams: torch.Tensor,
    residual: torch.Tensor,
    part: Added,
    weights: AltUpWeights,
    out: torch.Tensor,
    eps: float,
) -> None:
    """Correct the streams by the residual and the output of the MLP. Shapes are in the module docstring."""
    a, t, h = _check(streams, out, part)
    _check_weights(weights, a, h, streams.device)
    require("residual", residual, (t, h), (torch.float32,), streams.device)
    if t == 0:
        return
    KernelLaunch(_correct_kernel, (t,), traits(streams.device), warps=row_warps(h), rows=t).run(
        streams, residual, part, weights, out, eps, t, a, h, part.y.shape[0]
    )


def _check(streams: torch.Tensor, out: torch.Tensor, *parts: Added | None) -> tuple[int, int, int]:
    """Raise ValueError for tensors that the kernels cannot read; returns A, T and H."""
    require("streams", streams, (None, None, None), (torch.float32,))
    a, t, h = streams.shape
    require("out", out, (t, h), _FLOATS, streams.device)
    for part in parts:
        if part is not None:
            require("y", part.y, (part.y.shape[0], t, h), _FLOATS, streams.device)
            require("gain", part.gain, (h,), _FLOATS, streams.device)
    return a, t, h


def _check_weights(weights: AltUpWeights, a: int, h: int, device: torch.device) -> None:
    shapes = (a, h), (h,), (a * a, a), (a, a), (h,)
    for name, tensor, shape in zip(weights._fields, weights, shapes, strict=True):
        require(name, tensor, shape, _FLOATS, device)
