"""Output gates: RMSNorm of a delta net's heads times SiLU of the gate, and the gate of attention.

Letters as in shapes.py; of attention, H heads of V columns.

    normed   out = x / rms(x) * weight * silu(z)        x [T, H, V], z [P, T, H V], weight [V]
    gated    out = x * sigmoid(z)                       x [T, H, V], z [P, T, H V], weight None

out [T, H V] in the model's dtype, x in any; columns of z are dense. Grid T * H, or a 16th of it where they are
many; fp32 inside.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from localchat_cuda.kernels.activation import to_half
from localchat_cuda.kernels.delta_net.prepare import sigmoid
from localchat_cuda.kernels.delta_net.shapes import FLOATS
from localchat_cuda.kernels.launch import (
    options,
    own_carveout,
    power_of_two,
    require,
    set_carveout,
    tensor_or,
    traits,
)

_ALONE = 1024
_TOGETHER = 16
"""Number of heads up to which each has its own program.

The second number is the heads per program above it.
"""


def reference(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor | None, out: torch.Tensor, eps: float
) -> None:
    """`gate` in plain torch, same arguments."""
    gate = z.float().sum(0).view(x.shape)
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
    ROWS: tl.constexpr,
    ROOMY: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, W)
    cell = (n < N)[:, None] & (i < V)[None, :]
    if NORM:
        gain = tl.load(weight + i, mask=i < V, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    gate = tl.zeros((ROWS, W), tl.float32)
    row = z + (n // H)[:, None] * row_stride + (n % H * V)[:, None] + i[None, :]
    for p in tl.static_range(P):
        gate += tl.load(row + p * part_stride, mask=cell, other=0.0).to(tl.float32)
    offsets = n[:, None] * V + i[None, :]
    value = tl.load(x + offsets, mask=cell, other=0.0).to(tl.float32)
    factor = sigmoid(gate)
    if NORM:
        inverse = tl.rsqrt(tl.sum(value * value, 1) / V + eps)
        value *= inverse[:, None] * gain[None, :]
        factor *= gate
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
    pdl: bool = True,
) -> None:
    """Fill `out`; shapes in the module docstring."""
    t, h, v = x.shape
    device = x.device
    require("x", x, (t, h, v), FLOATS, device)
    require("z", z, (None, t, h * v), FLOATS, device, contiguous=False)
    require("out", out, (t, h * v), FLOATS, device)
    if weight is not None:
        require("weight", weight, (v,), FLOATS, device)
    if t == 0:
        return
    pdl = pdl and traits(device).pdl
    together = 1 if t * h <= _ALONE else _TOGETHER
    kernel = _gate_kernel[(triton.cdiv(t * h, together),)](
        x,
        z,
        tensor_or(weight, x),
        out,
        eps,
        t * h,
        z.stride(0),
        z.stride(1),
        H=h,
        V=v,
        W=power_of_two(v),
        P=z.shape[0],
        NORM=weight is not None,
        ROWS=together,
        ROOMY=own_carveout(t),
        PDL=pdl,
        **options(pdl, 1 if together == 1 else 4),
    )
    set_carveout(kernel, t)
