"""RMSNorm over whole rows, with the residual added first.

For unquantized gemms, the last norm, and large row counts. Letters: T rows, H columns, S partial sums.

    residual += sum over S of y;  out = residual / rms(residual) * weight
    residual = (residual + y / rms(y) * post) * scale                     with `post`, a norm of y, the sum

Grid (T,), one row a program, fp32 inside. y [S, T, H] fp32, fp16 or bf16; residual fp32 [T, H],
read and written; weight and post [H]; out fp16 or bf16 [T, H], and where `packed` is given the same once
more, as the int4 gemms of experts read it: with zeros up to the columns of their weight, which are H or up
to 127 more. A `bias` [H] of y is added, too. Without a weight, out is the residual. RMSNorm: Zhang and
Sennrich, 2019; norms of y: Gemma 2 (Gemma Team, 2024).
"""

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.activation import to_half
from localchat_cuda.kernels.int4.activations import HalfRows, packed_cell
from localchat_cuda.kernels.launch import (
    KernelLaunch,
    power_of_two,
    release,
    require,
    row_warps,
    tensor_or,
    traits,
    wait,
)


def reference(
    y: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
    packed: HalfRows | None = None,
    bias: torch.Tensor | None = None,
    post: torch.Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """`add_norm` in plain torch, without packed rows."""
    if y is not None:
        total = y.float().sum(0)
        if post is not None:
            total = _normed(total, post, eps)
        residual += total
    if bias is not None:
        residual += bias.float()
    residual *= scale
    if weight is not None:
        residual = _normed(residual, weight, eps)
    out.copy_(residual)


def _normed(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain.float()


@triton.jit(do_not_specialize=["T"])
def _norm_kernel(
    y,
    residual,
    weight,
    out,
    packed,
    own,
    eps,
    scale,
    T,
    H: tl.constexpr,
    H_PACKED: tl.constexpr,
    S: tl.constexpr,
    GROUP: tl.constexpr,
    BIASED: tl.constexpr,
    POST: tl.constexpr,
    NORM: tl.constexpr,
    ROOMY: tl.constexpr,
    PDL: tl.constexpr,
):
    # `own` is the bias, or the weight of the norm of y.
    release(PDL)
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, triton.next_power_of_2(H))
    inside = i < H
    if POST:
        first = tl.load(own + i, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        gain = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    x = tl.load(residual + t * H + i, mask=inside, other=0.0)
    if S > 0:
        total = tl.zeros(i.shape, tl.float32)
        for s in tl.static_range(S):
            total += tl.load(y + (s * T + t) * H + i, mask=inside, other=0.0).to(tl.float32)
        if POST:
            total = total * tl.rsqrt(tl.sum(total * total, 0) / H + eps) * first
            x = (x + total) * scale
        else:
            x += total
        if BIASED:
            x += tl.load(own + i, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + t * H + i, x, mask=inside)
    if NORM:
        x = x * tl.rsqrt(tl.sum(x * x, 0) / H + eps) * gain
    tl.store(out + t * H + i, x.to(out.dtype.element_ty), mask=inside)
    if GROUP > 0:
        pointers = packed + t * H_PACKED + packed_cell(i, GROUP, False)
        tl.store(pointers, to_half(x), mask=i < H_PACKED)


def add_norm(
    y: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
    packed: HalfRows | None = None,
    bias: torch.Tensor | None = None,
    post: torch.Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """Add `y` (None: nothing) to the residual and normalize; shapes in the module docstring.

    `packed` (in slot order, no factors): where to write the result, too. `bias`, `post` (not both): of y.
    `scale`: of the sum with `post`.
    """
    t, h = residual.shape
    device = residual.device
    require("residual", residual, (t, h), device, torch.float32)
    require("out", out, (t, h), device)
    if y is not None:
        require("y", y, (y.shape[0], t, h), device)
    columns = 0 if packed is None else packed.x.shape[1]
    if packed is not None:
        require("packed", packed.x, (t, None), device, torch.float16)
        if not h <= columns <= power_of_two(h):
            raise ValueError(f"packed: {h} to {power_of_two(h)} columns wanted, {columns} given")
    if weight is not None:
        require("weight", weight, (h,), device)
    if bias is not None:
        require("bias", bias, (h,), device)
        if y is None or post is not None:
            raise ValueError("bias: one without y or with post")
    if post is not None:
        require("post", post, (h,), device)
    if t == 0:
        return
    gpu = traits(device)
    splits = 0 if y is None else y.shape[0]
    group = 0 if packed is None else packed.group
    packed_x = out if packed is None else packed.x
    own = bias if post is None else post
    KernelLaunch(_norm_kernel, (t,), gpu, warps=row_warps(h), rows=t).run(
        *(tensor_or(y, residual), residual, tensor_or(weight, residual), out, packed_x),
        *(tensor_or(own, residual), eps, scale, t, h, columns, splits, group),
        *(bias is not None, post is not None, weight is not None),
    )
