"""RMSNorm over whole rows, with the residual added first.

For unquantized gemms, the last norm, and large row counts. Letters: T rows, H columns, S partial sums.

    residual += sum over S of y;  out = residual / rms(residual) * weight

Grid (T,), one row a program, fp32 inside. y [S, T, H] fp32, fp16 or bf16; residual fp32 [T, H],
read and written; weight [H]; out fp16 or bf16 [T, H], and where `packed` is given the same once more, as
the int4 gemms of experts read it: with zeros up to the columns of their weight, which are H or up to 127 more.
A `bias` [H] of y is added, too. RMSNorm: Zhang and Sennrich, 2019.
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

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def reference(
    y: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
) -> None:
    """`add_norm` in plain torch, without packed rows."""
    if y is not None:
        residual += y.float().sum(0)
    if bias is not None:
        residual += bias.float()
    inverse = torch.rsqrt(residual.square().mean(-1, keepdim=True) + eps)
    out.copy_(residual * inverse * weight.float())


@triton.jit(do_not_specialize=["T"])
def _norm_kernel(
    y,
    residual,
    weight,
    out,
    packed,
    bias,
    eps,
    T,
    H: tl.constexpr,
    H_PACKED: tl.constexpr,
    S: tl.constexpr,
    GROUP: tl.constexpr,
    BIASED: tl.constexpr,
    ROOMY: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, triton.next_power_of_2(H))
    inside = i < H
    gain = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    x = tl.load(residual + t * H + i, mask=inside, other=0.0)
    if S > 0:
        total = tl.zeros(i.shape, tl.float32)
        for s in tl.static_range(S):
            total += tl.load(y + (s * T + t) * H + i, mask=inside, other=0.0).to(tl.float32)
        x += total
        if BIASED:
            x += tl.load(bias + i, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + t * H + i, x, mask=inside)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / H + eps) * gain
    tl.store(out + t * H + i, x.to(out.dtype.element_ty), mask=inside)
    if GROUP > 0:
        pointers = packed + t * H_PACKED + packed_cell(i, GROUP, False)
        tl.store(pointers, to_half(x), mask=i < H_PACKED)


def add_norm(
    y: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    packed: HalfRows | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """Add `y` (None: nothing) to the residual and normalize; shapes in the module docstring.

    `packed` (in slot order, no factors): where to write the result, too. `bias`: of y.
    """
    t, h = residual.shape
    device = residual.device
    require("residual", residual, (t, h), (torch.float32,), device)
    require("weight", weight, (h,), _FLOATS, device)
    require("out", out, (t, h), _FLOATS, device)
    if y is not None:
        require("y", y, (y.shape[0], t, h), _FLOATS, device)
    columns = 0 if packed is None else packed.x.shape[1]
    if packed is not None:
        require("packed", packed.x, (t, None), (torch.float16,), device)
        if not h <= columns <= power_of_two(h):
            raise ValueError(f"packed: {h} to {power_of_two(h)} columns wanted, {columns} given")
    if bias is not None:
        require("bias", bias, (h,), _FLOATS, device)
        if y is None:
            raise ValueError("bias: one without y")
    if t == 0:
        return
    gpu = traits(device)
    splits = 0 if y is None else y.shape[0]
    group = 0 if packed is None else packed.group
    packed_x = out if packed is None else packed.x
    KernelLaunch(_norm_kernel, (t,), gpu, warps=row_warps(h), rows=t).run(
        *(tensor_or(y, residual), residual, weight, out, packed_x, tensor_or(bias, weight), eps),
        *(t, h, columns, splits, group, bias is not None),
    )
