"""Output gates: RMSNorm of a delta net's heads times SiLU of the gate, and the gates of Mamba 2 and attention.

Letters as in shapes.py; of attention, H heads of V columns; of a Mamba 2, H groups of V columns.

    normed   out = x / rms(x) * weight * silu(z)        x [T, H, V], z [P, T, H V], weight [V]
    groups   out = u / rms(u) * weight, u = x * silu(z)  weight [H V]
    gated    out = x * sigmoid(z)                       x [T, H, V], z [P, T, H V], weight None

out [T, H V] in the model's dtype, x in any; columns of z are dense. Grid T * H, or up to a 16th of it
where they are many; fp32 inside.
"""

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.activation import to_half
from localchat_cuda.kernels.delta_net.prepare import sigmoid
from localchat_cuda.kernels.launch import (
    KernelLaunch,
    cdiv,
    power_of_two,
    release,
    require,
    tensor_or,
    traits,
    wait,
)

_ALONE = 1024
_TOGETHER = 2048
"""Number of heads up to which each has its own program.

The second number is the columns of all heads of a program above it.
"""


def reference(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
    *,
    groups: bool = False,
) -> None:
    """`gate` in plain torch, same arguments."""
    gate = z.float().sum(0).view(x.shape)
    if groups:
        assert weight is not None
        u = x.float() * torch.nn.functional.silu(gate)
        u *= torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)
        out.copy_(u.view(out.shape) * weight.float())
        return
    if weight is None:
        out.copy_((x.float() * gate.sigmoid()).view(out.shape))
        return
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    out.copy_((normed * weight.float() * torch.nn.functional.silu(gate)).view(out.shape))


@triton.jit(do_not_specialize=["N"])
def _gate_kernel(
    x,
    z,
    weight,
    out,
    eps,
    N,
    part_stride,
    row_stride,
    H: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    P: tl.constexpr,
    NORM: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    ROOMY: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, W)
    cell = (n < N)[:, None] & (i < V)[None, :]
    if GROUPS:
        gain = tl.load(weight + (n % H * V)[:, None] + i[None, :], mask=cell, other=0.0)
        gain = gain.to(tl.float32)
    elif NORM:
        gain = tl.load(weight + i, mask=i < V, other=0.0).to(tl.float32)[None, :]
    wait(PDL)
    gate = tl.zeros((ROWS, W), tl.float32)
    row = z + (n // H)[:, None] * row_stride + (n % H * V)[:, None] + i[None, :]
    for p in tl.static_range(P):
        gate += tl.load(row + p * part_stride, mask=cell, other=0.0).to(tl.float32)
    offsets = n[:, None] * V + i[None, :]
    value = tl.load(x + offsets, mask=cell, other=0.0).to(tl.float32)
    factor = sigmoid(gate)
    if NORM:
        factor *= gate
    if GROUPS:
        value *= factor
    if NORM:
        inverse = tl.rsqrt(tl.sum(value * value, 1) / V + eps)
        value *= inverse[:, None] * gain
    if not GROUPS:
        value *= factor
    if out.dtype.element_ty == tl.float16:
        tl.store(out + offsets, to_half(value), mask=cell)
    else:
        tl.store(out + offsets, value.to(out.dtype.element_ty), mask=cell)


def gate(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
    *,
    groups: bool = False,
) -> None:
    """Fill `out`; shapes in the module docstring. `groups`: gate before the norm, which has a weight."""
    t, h, v = x.shape
    device = x.device
    require("x", x, (t, h, v), device)
    require("z", z, (None, t, h * v), device, contiguous=False)
    require("out", out, (t, h * v), device)
    if weight is not None:
        require("weight", weight, (h * v if groups else v,), device)
    if t == 0:
        return
    width = power_of_two(v)
    together = 1
    if t * h > _ALONE:
        together = max(1, min(16, _TOGETHER // width))
    warps = min(8, max(1, together * width // 512))
    KernelLaunch(_gate_kernel, (cdiv(t * h, together),), traits(device), warps=warps, rows=t).run(
        *(x, z, tensor_or(weight, x), out, eps, t * h, z.stride(0), z.stride(1)),
        H=h,
        V=v,
        W=width,
        P=z.shape[0],
        NORM=weight is not None,
        GROUPS=groups,
        ROWS=together,
    )
