"""Gated short convolution of an LFM2: a causal convolution over gated columns, and a gate on its result.

Letters: T tokens of the step, S sequences, P partial sums, C columns, L tokens that the convolution covers, E
entries of the states: a running sequence has the one of its slot.

    product  [P, T, at least 3 C], fp32, fp16 or bf16: two gates and the columns
    u        = gate1 * columns, rounded to the model's dtype
    out[t]   = gate2 * (sum over i of conv[:, L - 1 - i] * u[t - i])      [T, C], i from 0 to L - 1
    inputs   [E, L - 1, C]: the last u of each sequence, the oldest first

u before the step's first token of a sequence comes from its state, and is 0 before the first token of all. One
kernel fills `out`, grid (T / 16, C / 128), and another stores the inputs, grid (S, C / 128); fp32 inside. LFM2:
Liquid AI, 2025.
"""

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.attention.reference import AttentionBatch, require_batch
from localchat_cuda.kernels.delta_net.shapes import Tokens
from localchat_cuda.kernels.launch import cdiv, launch_kernel, require

_ROWS = 16
_COLUMNS = 128
"""Tokens and columns of a program."""


def reference(
    product: torch.Tensor,
    conv: torch.Tensor,
    inputs: torch.Tensor,
    tokens: Tokens,
    batch: AttentionBatch,
    out: torch.Tensor,
) -> None:
    """`apply` in plain torch, same arguments."""
    c, taps = conv.shape
    gate, last_gate, values = product[..., : 3 * c].float().sum(0).chunk(3, 1)
    u = (gate * values).to(out.dtype)
    rows = torch.arange(out.shape[0], device=out.device)
    slots, positions, offsets = (tensor.long() for tensor in tokens)
    total = torch.zeros(out.shape, device=out.device)
    for back in range(taps):
        earlier = inputs[slots, (taps - 1 - back + offsets).clamp(max=taps - 2)]
        value = torch.where((offsets >= back)[:, None], u[(rows - back).clamp(min=0)], earlier)
        value = torch.where((positions >= back)[:, None], value, torch.zeros_like(value))
        total += value.float() * conv[:, taps - 1 - back].float()
    out.copy_(last_gate * total)
    columns = (batch.starts, batch.counts, batch.lengths, batch.slots)
    for start, count, length, slot in zip(*(x.tolist() for x in columns), strict=True):
        if count:
            stored = inputs[slot] if length > count else torch.zeros_like(inputs[slot])
            inputs[slot] = torch.cat((stored, u[start : start + count]))[1 - taps :]


@triton.jit
def _gated(product, row, column, mask, part_stride, C: tl.constexpr, P: tl.constexpr):
    """Return gate1 * columns in fp32, at pointers `row` with rows and columns broadcast."""
    gate = tl.zeros(mask.shape, tl.float32)
    value = tl.zeros(mask.shape, tl.float32)
    for p in tl.static_range(P):
        pointers = product + p * part_stride + row + column
        gate += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        value += tl.load(pointers + 2 * C, mask=mask, other=0.0).to(tl.float32)
    return gate * value


@triton.jit(do_not_specialize=["T"])
def _conv_kernel(
    product,
    conv,
    inputs,
    tokens,
    out,
    T,
    part_stride,
    row_stride,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = t < T
    inside = column < C
    cell = there[:, None] & inside[None, :]
    slot = tl.load(tokens.slots + t, mask=there, other=0)
    position = tl.load(tokens.positions + t, mask=there, other=0)
    offset = tl.load(tokens.offsets + t, mask=there, other=0)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for back in tl.static_range(TAPS):
        own = cell & (offset >= back)[:, None]
        row = (t - back)[:, None] * row_stride
        value = _gated(product, row, column[None, :], own, part_stride, C, P)
        value = value.to(out.dtype.element_ty).to(tl.float32)
        if back > 0:
            earlier = cell & ((position >= back) & (offset < back))[:, None]
            entry = slot * (TAPS - 1) + TAPS - 1 - back + offset
            pointers = inputs + entry[:, None] * C + column[None, :]
            value += tl.load(pointers, mask=earlier, other=0.0).to(tl.float32)
        tap = tl.load(conv + column * TAPS + TAPS - 1 - back, mask=inside, other=0.0)
        total += value * tap.to(tl.float32)[None, :]
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    for p in tl.static_range(P):
        pointers = product + p * part_stride + t[:, None] * row_stride + C + column[None, :]
        gate += tl.load(pointers, mask=cell, other=0.0).to(tl.float32)
    total *= gate
    tl.store(out + t[:, None] * C + column[None, :], total.to(out.dtype.element_ty), mask=cell)


@triton.jit
def _store_kernel(
    product,
    inputs,
    batch,
    part_stride,
    row_stride,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    P: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    s = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < C
    count = tl.load(batch.counts + s)
    length = tl.load(batch.lengths + s)
    entry = tl.load(batch.slots + s) * (TAPS - 1)
    end = tl.load(batch.starts + s) + count
    if count > 0:
        # An input moves to an older row, so rows are stored in order. Of threads that hold the same column,
        # all load before one stores.
        for row in tl.static_range(TAPS - 1):
            back = TAPS - 1 - row  # tokens from the end
            own = column < tl.where(back <= count, C, 0)
            source = (end - back) * row_stride
            value = _gated(product, source, column, own, part_stride, C, P)
            value = value.to(inputs.dtype.element_ty)
            earlier = column < tl.where((back > count) & (back <= length), C, 0)
            pointers = inputs + (entry + row + count) * C + column
            value += tl.load(pointers, mask=earlier, other=0.0)
            tl.debug_barrier()
            tl.store(inputs + (entry + row) * C + column, value, mask=inside)


def apply(
    product: torch.Tensor,
    conv: torch.Tensor,
    inputs: torch.Tensor,
    tokens: Tokens,
    batch: AttentionBatch,
    out: torch.Tensor,
) -> None:
    """Fill `out` and update the inputs of the sequences; shapes in the module docstring."""
    t, c = out.shape
    taps = conv.shape[1]
    device = out.device
    require("out", out, (t, c), device)
    require("product", product, (None, t, None), device, contiguous=False)
    require("conv", conv, (c, taps), device, out.dtype)
    require("inputs", inputs, (None, taps - 1, c), device, out.dtype)
    for name in tokens._fields:
        require(name, getattr(tokens, name), (t,), device, torch.int32)
    s = require_batch(batch, device)
    if product.shape[2] < 3 * c:
        raise ValueError(f"product: at least {3 * c} columns wanted, {product.shape[2]} given")
    blocks = cdiv(c, _COLUMNS)
    parts = product.shape[0]
    launch_kernel(
        _conv_kernel,
        (cdiv(t, _ROWS), blocks),
        *(product, conv, inputs, tokens, out, t, *product.stride()[:2]),
        *(c, taps, parts, _ROWS, _COLUMNS),
        num_warps=4,
    )
    launch_kernel(
        _store_kernel,
        (s, blocks),
        *(product, inputs, batch, *product.stride()[:2], c, taps, parts, _COLUMNS),
        num_warps=4,
    )
