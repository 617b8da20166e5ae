"""Rule that changes a state, over chunks of 64 tokens: prompts.

Letters as in shapes.py; B tokens of a chunk, c the sum of the logarithms of the decays of a chunk up to a
token. Of each value head, with the state S before the chunk:

    N      = beta k k^T exp(c_i - c_j) below the diagonal;   A = (1 + N)^-1
    u, w   = A (beta v), A (beta exp(c) k)                    changes of the state, and what they owe to S
    d      = u - w S
    out    = exp(c) q S + (q k^T exp(c_i - c_j) up to the diagonal) d
    S      = exp(c_B) S + (exp(c_B - c) k)^T d

In a Mamba 2, d = beta v, and skip v joins the output.

One kernel computes u, w and c of all chunks of a delta net at once, grid (chunks, H); another goes through
those of a sequence, grid (S, H, V / BV). Products of the model's dtype, sums and states in fp32. A is made of
inverses of diagonal blocks of 8, merged by products: powers of all of N would grow beyond fp32 where keys are
alike. WY form: Yang et al., 2024 (arXiv 2406.06484), with decays 2412.06464; blocks as in
flash-linear-attention. Mamba 2: Dao and Gu, 2024 (arXiv 2405.21060).
"""

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.delta_net.recurrent import (
    load_sequence,
    matrix_pointers,
    store_own_inputs,
)
from localchat_cuda.kernels.delta_net.shapes import (
    CHUNK,
    ChunkedPart,
    DeltaShape,
    LayerStates,
    Prepared,
    Projection,
    Source,
    require_rule,
)
from localchat_cuda.kernels.launch import launch_kernel, require, tensor_or, traits

LEAST_COLUMNS = 64
"""Fewest columns of a key and of a value. Narrower heads, which are rare, take the recurrent form.

With keys of 16, or keys of 64 and values of 32 in fp16, `_chunk_kernel` reads outside of shared memory on
Hopper if Triton 3.6's own assembler (ptxas 12.8.93) made it. Keys of 16 are right with that of the CUDA
toolkit."""
_SMALL_SHARED = (86, 89, 120)
"""Compute capabilities with 100 KB of shared memory."""


def stages_of(capability: int) -> int:
    """Stages of the pipeline that loads a sequence's chunks."""
    return 1 if capability in _SMALL_SHARED else 2


@triton.jit
def _product(a, b):
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _inverse(n, same, diagonal):
    """Invert 1 + n, with n [64, 64] below the diagonal.

    `same` is true where row and column share a block of 8.
    """
    # (1 + n)^-1 = (1 - n)(1 + n^2)(1 + n^4).. up to the power that is 0: in blocks of 8 first.
    own = tl.where(same, n, 0.0)
    square = _product(own, own)
    result = tl.where(diagonal, 1.0, 0.0) + square
    result += _product(_product(square, square), result)
    result -= _product(own, result)
    # With their inverses D: 1 + n = D^-1 (1 + D (n - own)), and the product is 0 to the power of 8.
    m = _product(result, tl.where(same, 0.0, n))
    square = _product(m, m)
    result += _product(_product(square, square), result)
    result += _product(square, result)
    return result - _product(m, result)


@triton.jit
def _chunk_kernel(
    prepared, batch, chunks, keys, values, sums, shape: tl.constexpr, B: tl.constexpr
):
    C: tl.constexpr = 2 * shape.G * shape.K + shape.H * shape.V
    s = tl.load(chunks + tl.program_id(0) * 2)
    h = tl.program_id(1)
    if s >= 0:
        rows = tl.load(chunks + tl.program_id(0) * 2 + 1) * B + tl.arange(0, B)
        there = rows < tl.load(batch.counts + s)
        t = tl.load(batch.starts + s) + rows
        k = tl.arange(0, shape.K)
        v = tl.arange(0, shape.V)
        token = prepared.x + t * C
        key = tl.load(
            token[:, None] + shape.K0 + h // (shape.H // shape.G) * shape.K + k[None, :],
            mask=there[:, None],
            other=0.0,
        )
        c = tl.cumsum(tl.load(prepared.decay + t * shape.H + h, mask=there, other=0.0), 0)
        rate = tl.load(prepared.beta + t * shape.H + h, mask=there, other=0.0)
        r = tl.arange(0, B)
        below = r[:, None] > r[None, :]
        apart = tl.where(below, c[:, None] - c[None, :], 0.0)
        n = tl.dot(key, tl.trans(key), input_precision="ieee") * rate[:, None] * tl.exp(apart)
        n = tl.where(below, n, 0.0)
        same = (r // 8)[:, None] == (r // 8)[None, :]
        inverse = _inverse(n, same, r[:, None] == r[None, :])
        inverse = inverse.to(prepared.x.dtype.element_ty)
        value = tl.load(
            token[:, None] + shape.V0 + h * shape.V + v[None, :],
            mask=there[:, None],
            other=0.0,
        )
        change = (value.to(tl.float32) * rate[:, None]).to(prepared.x.dtype.element_ty)
        u = tl.dot(inverse, change, input_precision="ieee")
        owed = (key.to(tl.float32) * (rate * tl.exp(c))[:, None]).to(prepared.x.dtype.element_ty)
        w = tl.dot(inverse, owed, input_precision="ieee")
        out = t * shape.H + h
        tl.store(
            values + out[:, None] * shape.V + v[None, :],
            u.to(values.dtype.element_ty),
            mask=there[:, None],
        )
        tl.store(
            keys + out[:, None] * shape.K + k[None, :],
            w.to(keys.dtype.element_ty),
            mask=there[:, None],
        )
        tl.store(sums + out, c, mask=there)


@triton.jit
def _scan_kernel(
    prepared,
    source,
    keys,
    values,
    sums,
    states,
    batch,
    out,
    skip,
    shape: tl.constexpr,
    B: tl.constexpr,
    STAGES: tl.constexpr,
):
    x = prepared.x
    K: tl.constexpr = shape.K
    C: tl.constexpr = 2 * shape.G * K + shape.H * shape.V
    s = tl.program_id(0)
    h = tl.program_id(1)
    first = tl.program_id(2) * shape.BV
    g = h // (shape.H // shape.G)
    row, count, length, entry = load_sequence(batch, s)
    if count > 0:
        k = tl.arange(0, K)
        v = first + tl.arange(0, shape.BV)
        r = tl.arange(0, B)
        upto = r[:, None] >= r[None, :]
        state_pointers = matrix_pointers(states.matrices, entry, h, k, v, shape)
        rows = tl.where(length > count, K, 0)
        state = tl.load(state_pointers, mask=(k < rows)[:, None], other=0.0)
        if not shape.DELTA:
            factor = tl.load(skip + h)
        for start in tl.range(0, count, B, num_stages=STAGES):
            there = (start + r < count)[:, None]
            t = row + start + r
            token = (x + t * C)[:, None] + k[None, :]
            query = tl.load(token + shape.Q0 + g * K, mask=there, other=0.0)
            key = tl.load(token + shape.K0 + g * K, mask=there, other=0.0)
            cell = t * shape.H + h
            inside = start + r < count
            stored_state = state.to(x.dtype.element_ty)
            if shape.DELTA:
                w = tl.load(keys + cell[:, None] * K + k[None, :], mask=there, other=0.0)
                u = tl.load(values + cell[:, None] * shape.V + v[None, :], mask=there, other=0.0)
                c = tl.load(sums + cell, mask=inside, other=0.0)
                change = u.to(tl.float32) - tl.dot(w, stored_state, input_precision="ieee")
            else:
                value = (x + t * C + shape.V0 + h * shape.V)[:, None] + v[None, :]
                value = tl.load(value, mask=there, other=0.0).to(tl.float32)
                c = tl.cumsum(tl.load(prepared.decay + cell, mask=inside, other=0.0), 0)
                change = value * tl.load(prepared.beta + cell, mask=inside, other=0.0)[:, None]
            last = tl.min(c, 0)  # sums only fall
            c = tl.where(inside, c, last)
            apart = tl.where(upto, c[:, None] - c[None, :], 0.0)
            weights = tl.dot(query, tl.trans(key), input_precision="ieee") * tl.exp(apart)
            weights = tl.where(upto, weights, 0.0).to(x.dtype.element_ty)
            output = tl.dot(query, stored_state, input_precision="ieee") * tl.exp(c)[:, None]
            output += tl.dot(weights, change.to(x.dtype.element_ty), input_precision="ieee")
            if not shape.DELTA:
                output += factor * value
            tl.store(
                out + cell[:, None] * shape.V + v[None, :],
                output.to(out.dtype.element_ty),
                mask=there,
            )
            change = (change * tl.exp(last - c)[:, None]).to(x.dtype.element_ty)
            state = state * tl.exp(last) + tl.dot(tl.trans(key), change, input_precision="ieee")
        tl.store(state_pointers, state)
        sequence = (entry, row + count, count, length)
        store_own_inputs(source, states.inputs, sequence, first, h, shape)


def takes(states: LayerStates) -> bool:
    """Whether keys and values are wide enough for the chunked form."""
    return min(states.matrices.shape[2:]) >= LEAST_COLUMNS


def apply(
    prepared: Prepared,
    projection: Projection,
    states: LayerStates,
    part: ChunkedPart,
    out: torch.Tensor,
    skip: torch.Tensor | None = None,
) -> None:
    """Update the states and fill the rows of `out` [T, H, V], like recurrent.reference."""
    s, h, k, v = require_rule(prepared, projection, states, part.batch, out, skip)
    device = out.device
    require("chunks", part.chunks, (None, 2), device, torch.int32)
    if not takes(states):
        raise ValueError(
            f"matrices: keys and values of {LEAST_COLUMNS} columns wanted, {k} and {v} given"
        )
    x = prepared.x
    t = x.shape[0]
    qkvz = projection.qkvz
    shape = DeltaShape.of(states, qkvz.shape[0], delta=skip is None)
    keys = values = x
    sums = prepared.decay
    if skip is None:
        keys = torch.empty(t, h, k, dtype=x.dtype, device=device)
        values = torch.empty(t, h, v, dtype=x.dtype, device=device)
        sums = torch.empty(t, h, device=device)
        launch_kernel(
            _chunk_kernel,
            (part.chunks.shape[0], h),
            prepared,
            part.batch,
            part.chunks,
            keys,
            values,
            sums,
            shape,
            CHUNK,
            num_warps=4,
        )
    major, minor = traits(device).capability
    launch_kernel(
        _scan_kernel,
        (s, h, v // shape.BV),
        *(prepared, Source.of(qkvz), keys, values, sums, states, part.batch, out),
        *(tensor_or(skip, sums), shape, CHUNK, stages_of(10 * major + minor)),
        num_warps=4,
    )
