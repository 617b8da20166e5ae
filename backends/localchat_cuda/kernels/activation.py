"""Activations of feed-forward layers: SiLU or tanh-GELU of gate, times up; gpt-oss's variant; squared ReLU.

Letters: T rows, F columns of the result, S partial sums.

    gate_up  fp32, fp16 or bf16 [S, T, 2F], gate in the first F columns; [T, 2F] stands for S = 1
    up       fp16, bf16 or fp32 [T, F], rows any distance apart: then gate_up is gate alone, [S, T, F]
    out      fp16, bf16 or fp32 [T, F]

Grid (T, F / 1024), fp32 inside. Both activations are gate times a sigmoid: silu of gate itself, the GELU
of 2 sqrt(2/pi) (gate + 0.044715 gate^3). GLU variants: Shazeer, 2020; GELU: Hendrycks and Gimpel, 2016.
"""

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.launch import (
    KernelLaunch,
    cdiv,
    release,
    require,
    tensor_or,
    traits,
    wait,
)

_BLOCK = 1024
CLAMPED_SLOPE = tl.constexpr(1.702)
"""Factor inside the sigmoid of a clamped gate."""


def reference(gate_up: torch.Tensor, *, gelu: bool = False) -> torch.Tensor:
    """Compute the result in fp32 with plain torch."""
    values = gate_up.float() if gate_up.dim() == 2 else gate_up.float().sum(0)
    gate, up = values.chunk(2, 1)
    if gelu:
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    return torch.nn.functional.silu(gate) * up


def square_reference(y: torch.Tensor) -> torch.Tensor:
    """`square_relu` in fp32 with plain torch."""
    return torch.relu(y.float().sum(0)).square()


@triton.jit
def activation(gate, GELU: tl.constexpr):
    """Apply SiLU or GELU to fp32 values."""
    slope = gate
    if GELU:
        # Clamped where the exponential would overflow fp32.
        slope = gate * (1.5957691216057308 + 0.07135481282553545 * gate * gate)
        slope = tl.maximum(slope, -80.0)
    return gate / (1.0 + tl.exp(-slope))


def clamped_reference(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """`gated` with a limit, in fp32 with plain torch."""
    gate, up = gate_up.float().chunk(2, 1)
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return gate * torch.sigmoid(CLAMPED_SLOPE.value * gate) * (up + 1.0)


@triton.jit
def gated(gate, up, LIMIT: tl.constexpr, GELU: tl.constexpr):
    """silu(gate) * up or gelu(gate) * up, or with a LIMIT gpt-oss's: gate up to it times a steeper sigmoid,
    times up within it plus 1."""
    if LIMIT > 0.0:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        return gate / (1.0 + tl.exp(gate * -CLAMPED_SLOPE)) * (up + 1.0)
    else:
        return activation(gate, GELU) * up


@triton.jit
def to_half(v):
    """Round to fp16 and clamp to its range. NaN stays NaN, so that it reaches the logits."""
    v = tl.maximum(v, -65504.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(v, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)


@triton.jit(do_not_specialize=["T"])
def _act_and_mul_kernel(
    gate_up,
    other,
    out,
    T,
    stride,
    F: tl.constexpr,
    S: tl.constexpr,
    GELU: tl.constexpr,
    OTHER: tl.constexpr,
    SQUARE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOMY: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < F
    gate = tl.zeros((BLOCK,), tl.float32)
    up = tl.zeros((BLOCK,), tl.float32)
    wait(PDL)
    for s in tl.static_range(S):
        row = gate_up + (s * T + t) * (F if OTHER or SQUARE else 2 * F) + i
        gate += tl.load(row, mask=inside, other=0.0).to(tl.float32)
        if not (OTHER or SQUARE):
            up += tl.load(row + F, mask=inside, other=0.0).to(tl.float32)
    if OTHER:
        up = tl.load(other + t * stride + i, mask=inside, other=0.0).to(tl.float32)
    if SQUARE:
        v = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        v *= v
    else:
        v = activation(gate, GELU) * up
    if out.dtype.element_ty == tl.float16:
        tl.store(out + t * F + i, to_half(v), mask=inside)
    else:
        tl.store(out + t * F + i, v.to(out.dtype.element_ty), mask=inside)


def act_and_mul(
    gate_up: torch.Tensor,
    out: torch.Tensor,
    *,
    gelu: bool = False,
    up: torch.Tensor | None = None,
    square: bool = False,
) -> None:
    """Write the activation into `out`; shapes in the module docstring. `square`: as `square_relu`."""
    t, f = out.shape
    parts = gate_up[None] if gate_up.dim() == 2 else gate_up
    columns = 2 * f if up is None and not square else f
    require("out", out, (t, f), out.device)
    require("gate_up", parts, (parts.shape[0], t, columns), out.device)
    if up is not None:
        require("up", up, (t, f), out.device, contiguous=False)
    if t == 0:
        return
    grid = (t, cdiv(f, _BLOCK))
    KernelLaunch(_act_and_mul_kernel, grid, traits(out.device), warps=4, rows=t).run(
        *(parts, tensor_or(up, parts), out, t, tensor_or(up, parts).stride(0)),
        F=f,
        S=parts.shape[0],
        GELU=gelu,
        OTHER=up is not None,
        SQUARE=square,
        BLOCK=_BLOCK,
    )


def square_relu(y: torch.Tensor, out: torch.Tensor) -> None:
    """Write the square of relu(y) of partial sums y [S, T, F] into `out`: layers without a gate."""
    act_and_mul(y, out, square=True)
