"""Short causal convolution of a gated delta net or a Mamba 2, and the norms and gates that follow it.

Letters as in shapes.py. In the model's dtype x is the sum of the partial sums, and

    c[t]     = silu(sum over i of conv[:, TAPS - 1 - i] * x[t - i])       i from 0 to TAPS - 1
    q, k     = c of a head over its length (rsqrt of the sum of squares + 1e-6), q by K^-1/2 too;  v = c
    decay[t] = weights.decay * softplus(a + dt_bias),  beta[t] = sigmoid(b)

A Mamba 2 adds a bias before silu, leaves q and k as they are, and its beta is softplus(a + dt_bias).

x before the step's first token of a sequence comes from its state, and is 0 before the first token of all.
Grid (T, 2 G + H + 1), or a 16th of T for many tokens: a head each, the last one the gates; fp32 inside.
Yang et al., Gated Delta Networks (2024, arXiv 2412.06464); Dao and Gu, Mamba 2 (2024, arXiv 2405.21060).
"""

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.delta_net.shapes import (
    TAPS,
    DeltaNetWeights,
    DeltaShape,
    LayerStates,
    Prepared,
    Projection,
    Tokens,
    require_projection,
    require_states,
)
from localchat_cuda.kernels.launch import (
    KernelLaunch,
    cdiv,
    release,
    require,
    tensor_or,
    traits,
    wait,
)

_NORM_EPS = 1e-6
_ALONE = 32
"""Number of tokens up to which each has its own programs."""
_TOGETHER = 16


def reference(
    projection: Projection,
    weights: DeltaNetWeights,
    states: LayerStates,
    tokens: Tokens,
    out: Prepared,
) -> None:
    """`prepare` in plain torch, same arguments."""
    t, c = out.x.shape
    g = states.key_heads
    k = states.matrices.shape[2]
    h = states.matrices.shape[1]
    x = projection.qkvz[..., :c].float().sum(0).to(out.x.dtype)
    total = torch.zeros(t, c, device=x.device)
    rows = torch.arange(t, device=x.device)
    slots, positions, offsets = (tensor.long() for tensor in tokens)
    for back in range(TAPS):
        earlier = states.inputs[slots, (TAPS - 1 - back + offsets).clamp(max=TAPS - 2)]
        value = torch.where((offsets >= back)[:, None], x[(rows - back).clamp(min=0)], earlier)
        value = torch.where((positions >= back)[:, None], value, torch.zeros_like(value))
        total += value.float() * weights.conv[:, TAPS - 1 - back].float()
    if weights.bias is not None:
        total += weights.bias.float()
    total = torch.nn.functional.silu(total)
    if weights.skip is not None:
        out.x.copy_(total)
        step = torch.nn.functional.softplus(projection.ba[..., :h].float().sum(0) + weights.dt_bias)
        out.decay.copy_(weights.decay * step)
        out.beta.copy_(step)
        return
    qk = total[:, : 2 * g * k].view(t, 2, g, k)
    values = total[:, 2 * g * k :]
    qk = qk * torch.rsqrt(qk.square().sum(-1, keepdim=True) + _NORM_EPS)
    qk[:, 0] *= k**-0.5
    out.x.copy_(torch.cat((qk.reshape(t, -1), values), 1))
    b, a = projection.ba[..., : 2 * h].float().sum(0).chunk(2, 1)
    out.decay.copy_(weights.decay * torch.nn.functional.softplus(a + weights.dt_bias))
    out.beta.copy_(b.sigmoid())


@triton.jit
def sigmoid(v):
    """Compute the sigmoid of fp32 values without overflow; NaN stays NaN."""
    return 1.0 / (1.0 + tl.exp(tl.minimum(-v, 80.0, propagate_nan=tl.PropagateNan.ALL)))


@triton.jit(do_not_specialize=["T"])
def _prepare_kernel(
    qkvz,
    ba,
    weights,
    inputs,
    tokens,
    out,
    eps,
    T,
    part_stride,
    row_stride,
    ba_part_stride,
    ba_row_stride,
    shape: tl.constexpr,
    P_BA: tl.constexpr,
    BIASED: tl.constexpr,
    BT: tl.constexpr,
    ROOMY: tl.constexpr,
    PDL: tl.constexpr,
):
    G: tl.constexpr = shape.G
    H: tl.constexpr = shape.H
    TAPS: tl.constexpr = shape.TAPS
    P: tl.constexpr = shape.P
    release(PDL)
    C: tl.constexpr = 2 * G * shape.K + H * shape.V
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    there = t < T
    head = tl.program_id(1)
    if head < 2 * G + H:
        # The step buffer and the states were complete before the step began.
        slot = tl.load(tokens.slots + t, mask=there, other=0)
        position = tl.load(tokens.positions + t, mask=there, other=0)
        offset = tl.load(tokens.offsets + t, mask=there, other=0)
        W: tl.constexpr = triton.next_power_of_2(shape.K if shape.K > shape.V else shape.V)
        i = tl.arange(0, W)
        column = shape.Q0 + head * shape.K
        width = shape.K
        if head >= 2 * G:
            column = shape.V0 + (head - 2 * G) * shape.V
            width = shape.V
        elif head >= G:
            column = shape.K0 + (head - G) * shape.K
        cell = there[:, None] & (i < width)[None, :]
        columns = column + i
        total = tl.zeros((BT, W), tl.float32)
        wait(PDL)
        for back in tl.static_range(TAPS):
            own = offset >= back
            row = qkvz + (t - back)[:, None] * row_stride + columns[None, :]
            value = tl.zeros((BT, W), tl.float32)
            for p in tl.static_range(P):
                value += tl.load(row + p * part_stride, mask=cell & own[:, None], other=0.0).to(
                    tl.float32
                )
            value = value.to(out.x.dtype.element_ty).to(tl.float32)
            if back > 0:
                earlier = (position >= back) & (offset < back)
                entry = slot * (TAPS - 1) + TAPS - 1 - back + offset
                input_pointers = inputs + entry[:, None] * C + columns[None, :]
                value += tl.load(input_pointers, mask=cell & earlier[:, None], other=0.0).to(
                    tl.float32
                )
            tap = tl.load(
                weights.conv + columns * TAPS + TAPS - 1 - back, mask=i < width, other=0.0
            )
            total += value * tap.to(tl.float32)[None, :]
        if BIASED:
            conv_bias = tl.load(weights.bias + columns, mask=i < width, other=0.0)
            total += conv_bias.to(tl.float32)[None, :]
        total *= sigmoid(total)
        if shape.DELTA and head < 2 * G:
            inverse = tl.rsqrt(tl.sum(total * total, 1) + eps)
            if head < G:
                inverse *= shape.K**-0.5
            total *= inverse[:, None]
        tl.store(
            out.x + t[:, None] * C + columns[None, :], total.to(out.x.dtype.element_ty), mask=cell
        )
    else:
        H_POW2: tl.constexpr = triton.next_power_of_2(H)
        h = tl.arange(0, H_POW2)
        gates = there[:, None] & (h < H)[None, :]
        rate = tl.load(weights.decay + h, mask=h < H, other=0.0)
        bias = tl.load(weights.dt_bias + h, mask=h < H, other=0.0)
        b = tl.zeros((BT, H_POW2), tl.float32)
        a = tl.zeros((BT, H_POW2), tl.float32)
        wait(PDL)
        for p in tl.static_range(P_BA):
            product = ba + p * ba_part_stride + t[:, None] * ba_row_stride + h[None, :]
            a += tl.load(product + (H if shape.DELTA else 0), mask=gates, other=0.0).to(tl.float32)
            if shape.DELTA:
                b += tl.load(product, mask=gates, other=0.0).to(tl.float32)
        a += bias[None, :]
        clamped = tl.minimum(a, 20.0, propagate_nan=tl.PropagateNan.ALL)
        softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(clamped)))
        cells = t[:, None] * H + h[None, :]
        tl.store(out.decay + cells, rate[None, :] * softplus, mask=gates)
        beta = sigmoid(b) if shape.DELTA else softplus
        tl.store(out.beta + cells, beta, mask=gates)


def prepare(
    projection: Projection,
    weights: DeltaNetWeights,
    states: LayerStates,
    tokens: Tokens,
    out: Prepared,
) -> None:
    """Fill `out`; shapes in the module docstring."""
    t, c = out.x.shape
    device = out.x.device
    dtype = out.x.dtype
    h, _, _ = require_states(states, out.x)
    delta = weights.skip is None
    require_projection(projection, t, c, 2 * h if delta else h, device)
    require("conv", weights.conv, (c, TAPS), device, dtype)
    if weights.bias is not None:
        require("bias", weights.bias, (c,), device, dtype)
    for name in ("decay", "dt_bias"):
        require(name, getattr(weights, name), (h,), device, torch.float32)
    for name in tokens._fields:
        require(name, getattr(tokens, name), (t,), device, torch.int32)
    require("x", out.x, (t, c), device)
    require("out.decay", out.decay, (t, h), device, torch.float32)
    require("out.beta", out.beta, (t, h), device, torch.float32)
    qkvz, ba = projection
    together = 1 if t <= _ALONE else _TOGETHER
    shape = DeltaShape.of(states, qkvz.shape[0], delta=delta)
    strides = (*qkvz.stride()[:2], *ba.stride()[:2])
    present = weights._replace(
        bias=tensor_or(weights.bias, weights.conv), skip=tensor_or(weights.skip, weights.decay)
    )
    grid = (cdiv(t, together), 2 * shape.G + h + 1)
    warps = 4
    if together == 1:
        warps = 1
    KernelLaunch(_prepare_kernel, grid, traits(device), warps, rows=t).run(
        *(qkvz, ba, present, states.inputs, tokens, out, _NORM_EPS, t, *strides, shape),
        P_BA=ba.shape[0],
        BIASED=weights.bias is not None,
        BT=together,
    )
