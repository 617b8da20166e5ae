"""Rule that changes a state, one token after the other: decode rows, and prompt chunks of a few tokens.

Letters as in shapes.py. Of each value head the state S [K, V], 0 before the first token of a sequence:

    S      = exp(decay) S;   S += k (beta (v - k S))^T;   out = q S
    S      = exp(decay) S;   S += k (beta v)^T;           out = q S + skip v      in a Mamba 2

The sequence's last inputs of the convolution are stored with it. Grid (S, H, V / BV): a program has BV columns
of a state in registers while it goes through the tokens; fp32 inside. out [T, H, V] in the model's dtype. Yang
et al., Gated Delta Networks (2024, arXiv 2412.06464); Dao and Gu, Mamba 2 (2024, arXiv 2405.21060).
"""

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.attention.reference import AttentionBatch
from localchat_cuda.kernels.delta_net.shapes import (
    TAPS,
    DeltaShape,
    LayerStates,
    Prepared,
    Projection,
    Source,
    require_rule,
)
from localchat_cuda.kernels.launch import KernelLaunch, release, tensor_or, traits, wait


def reference(
    prepared: Prepared,
    projection: Projection,
    states: LayerStates,
    batch: AttentionBatch,
    out: torch.Tensor,
    skip: torch.Tensor | None = None,
) -> None:
    """`apply` in plain torch, same arguments."""
    shape = DeltaShape.of(states, 1, delta=skip is None)
    g, h, k, v = shape[:4]
    t, c = prepared.x.shape
    x = prepared.x.float()
    q, key = (
        x[:, first : first + g * k].view(t, g, k).repeat_interleave(h // g, 1)
        for first in (shape.Q0, shape.K0)
    )
    value = x[:, shape.V0 : shape.V0 + h * v].view(t, h, v)
    places = zip(
        *(tensor.tolist() for tensor in (batch.starts, batch.counts, batch.lengths, batch.slots)),
        strict=True,
    )
    for start, count, length, slot in places:
        if not count:
            continue
        state = states.matrices[slot].clone()
        if length == count:
            state.zero_()
        for token in range(start, start + count):
            state *= prepared.decay[token].exp()[:, None, None]
            change = value[token]
            if skip is None:
                change = change - torch.einsum("hkv,hk->hv", state, key[token])
            change = change * prepared.beta[token][:, None]
            state += key[token][:, :, None] * change[:, None, :]
            output = torch.einsum("hkv,hk->hv", state, q[token])
            if skip is not None:
                output += skip[:, None] * value[token]
            out[token] = output.to(out.dtype)
        states.matrices[slot] = state
        raw = projection.qkvz[:, start : start + count, :c].float().sum(0)
        earlier = states.inputs[slot] if length > count else torch.zeros_like(states.inputs[slot])
        states.inputs[slot] = torch.cat((earlier, raw.to(earlier.dtype)))[-(TAPS - 1) :]


@triton.jit
def load_sequence(batch, s):
    """Load the first row, row count, length and entry of states of a sequence."""
    row = tl.load(batch.starts + s)
    count = tl.load(batch.counts + s)
    length = tl.load(batch.lengths + s)
    return row, count, length, tl.load(batch.slots + s)


@triton.jit
def matrix_pointers(matrices, entry, h, k, v, shape: tl.constexpr):
    """Return pointers [K, BV] to rows k and columns v of a head's state."""
    state = matrices + (entry * shape.H + h).to(tl.int64) * (shape.K * shape.V)
    return state + k[:, None] * shape.V + v[None, :]


@triton.jit
def _input(source, inputs, rows, position, first, width: tl.constexpr, shape: tl.constexpr):
    """Load input `position` (0 is the oldest) of the TAPS - 1 after the step, from the step or the state."""
    TAPS: tl.constexpr = shape.TAPS
    C: tl.constexpr = 2 * shape.G * shape.K + shape.H * shape.V
    P: tl.constexpr = shape.P
    entry, end, count, length = rows
    back = TAPS - 1 - position  # tokens from the end, at row `end`
    i = tl.arange(0, width)
    new = source.qkvz + (end - back) * source.row_stride + first + i
    total = tl.zeros((width,), tl.float32)
    here = i < tl.where(back <= count, width, 0)
    for p in tl.static_range(P):
        total += tl.load(new + p * source.part_stride, mask=here, other=0.0).to(tl.float32)
    total = total.to(inputs.dtype.element_ty)
    stored = inputs + (entry * (TAPS - 1) + position + count) * C + first + i
    earlier = i < tl.where((back > count) & (back <= length), width, 0)
    return total + tl.load(stored, mask=earlier, other=0.0)


@triton.jit
def store_inputs(source, inputs, rows, first, width: tl.constexpr, shape: tl.constexpr):
    """Store the last inputs of `width` channels from `first` on.

    `rows`: entry of the states, and the `count` tokens before row `end` of a sequence of that `length`.
    """
    TAPS: tl.constexpr = shape.TAPS
    C: tl.constexpr = 2 * shape.G * shape.K + shape.H * shape.V
    entry, _, _, _ = rows
    a = _input(source, inputs, rows, 0, first, width, shape)
    b = _input(source, inputs, rows, 1, first, width, shape)
    c = _input(source, inputs, rows, 2, first, width, shape)
    tl.debug_barrier()  # threads may hold the same channel: all are read before one is overwritten
    out = inputs + entry * (TAPS - 1) * C + first + tl.arange(0, width)
    tl.store(out, a)
    tl.store(out + C, b)
    tl.store(out + 2 * C, c)


@triton.jit
def store_own_inputs(source, inputs, rows, first, h, shape: tl.constexpr):
    """Store the last inputs of a program's values.

    The first program of a key head also stores its queries and keys.
    """
    G: tl.constexpr = shape.G
    K: tl.constexpr = shape.K
    g = h // (shape.H // G)
    store_inputs(source, inputs, rows, shape.V0 + h * shape.V + first, shape.BV, shape)
    if (first == 0) & (h % (shape.H // G) == 0):
        store_inputs(source, inputs, rows, shape.Q0 + g * K, K, shape)
        store_inputs(source, inputs, rows, shape.K0 + g * K, K, shape)


@triton.jit
def _recurrent_kernel(
    prepared,
    source,
    states,
    batch,
    out,
    skip,
    shape: tl.constexpr,
    ROOMY: tl.constexpr,
    PDL: tl.constexpr,
):
    H: tl.constexpr = shape.H
    K: tl.constexpr = shape.K
    release(PDL)
    C: tl.constexpr = 2 * shape.G * K + H * shape.V
    s = tl.program_id(0)
    h = tl.program_id(1)
    first = tl.program_id(2) * shape.BV
    g = h // (H // shape.G)
    row, count, length, entry = load_sequence(batch, s)
    if count > 0:
        k = tl.arange(0, K)
        v = first + tl.arange(0, shape.BV)
        # Of this step only this kernel writes the states of this layer: they are read before the wait.
        state_pointers = matrix_pointers(states.matrices, entry, h, k, v, shape)
        rows = tl.where(length > count, K, 0)
        state = tl.load(state_pointers, mask=(k < rows)[:, None], other=0.0)
        if not shape.DELTA:
            factor = tl.load(skip + h)
        wait(PDL)
        for t in range(row, row + count):
            token = prepared.x + t * C
            query = tl.load(token + shape.Q0 + g * K + k).to(tl.float32)
            key = tl.load(token + shape.K0 + g * K + k).to(tl.float32)
            value = tl.load(token + shape.V0 + h * shape.V + v).to(tl.float32)
            state *= tl.exp(tl.load(prepared.decay + t * H + h))
            change = value * tl.load(prepared.beta + t * H + h)
            if shape.DELTA:
                predicted = tl.sum(state * key[:, None], 0)
                change = (value - predicted) * tl.load(prepared.beta + t * H + h)
            state += key[:, None] * change[None, :]
            output = tl.sum(state * query[:, None], 0)
            if not shape.DELTA:
                output += factor * value
            tl.store(out + (t * H + h) * shape.V + v, output.to(out.dtype.element_ty))
        tl.store(state_pointers, state)
        sequence = (entry, row + count, count, length)
        store_own_inputs(source, states.inputs, sequence, first, h, shape)
    else:
        wait(PDL)


def apply(
    prepared: Prepared,
    projection: Projection,
    states: LayerStates,
    batch: AttentionBatch,
    out: torch.Tensor,
    skip: torch.Tensor | None = None,
) -> None:
    """Change the states and fill the rows of `out`; shapes in the module docstring.

    `skip`: of a Mamba 2; None: a delta net."""
    s, h, _, v = require_rule(prepared, projection, states, batch, out, skip)
    t = prepared.x.shape[0]
    qkvz = projection.qkvz
    shape = DeltaShape.of(states, qkvz.shape[0], delta=skip is None)
    KernelLaunch(_recurrent_kernel, (s, h, v // shape.BV), traits(out.device), warps=4, rows=t).run(
        prepared, Source.of(qkvz), states, batch, out, tensor_or(skip, prepared.decay), shape
    )
