"""DRY and top-n-sigma on the GPU. Only steps with such a request launch them.

Letters as in sample.py; reference: localchat/backend_api/sampling/reference.py and repetition.py.

Between `process_kernel` and `measure_kernel`:
1. `repeats_kernel` (P, tokens / 1024), with DRY: for each token that would continue a repetition, its length.
2. `adjust_kernel` (P, B): subtract DRY's penalties, and sum up logits and squares of a block.
3. `cut_kernel` (P, B): remove the logits below top-n-sigma's bound.
Both update the maxima and masses of blocks in `Scratch.blocks`, so the other kernels see usual logits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.launch import cdiv, launch_kernel, power_of_two, require
from localchat_cuda.kernels.sampling.candidates import clean, row_best, store_block
from localchat_cuda.kernels.sampling.state import (
    BLOCK,
    Draws,
    PenaltyTokens,
    SamplingTensors,
    Scratch,
    column,
    setting,
)

_MULTIPLIER = column("dry_multiplier")
_BASE = column("dry_base")
_ALLOWED = column("dry_allowed_length")
_LAST_N = column("dry_penalty_last_n")
_SIGMA = column("top_n_sigma")
_LONGEST = tl.constexpr(1e9)
"""More tokens than any text has, and fewer than an int32 holds."""
_SUMS = tl.constexpr(3)
"""Of each block the number of finite logits, their sum, and the sum of their squares."""


class RareTensors(NamedTuple):
    """Inputs and workspace of rare samplers for P draws."""

    breakers: torch.Tensor
    """int32 [S, words]: `SamplingParams.dry_breakers` of each slot."""
    repeats: torch.Tensor
    """int32 [P, V], zeros: 1 + the length of the repetition that each token would continue."""
    sums: torch.Tensor
    """fp64 [P, B, 3]."""


@triton.jit
def _breaks(breakers, slot, token, words):
    """Mark tokens across which DRY sees no repetition."""
    word = tl.load(
        breakers + slot * words + token // 32, mask=(token >= 0) & (token < words * 32), other=0
    )
    return ((word >> (token % 32)) & 1) == 1


@triton.jit
def _exponents(base):
    """Compute `repetition.longest_exponent`."""
    exponents = (88.7228391 / tl.log(tl.maximum(base, 1.05).to(tl.float64))).to(tl.int32)
    return tl.minimum(exponents, 1024)


@triton.jit(do_not_specialize=["context", "V", "words"])
def repeats_kernel(
    tokens, texts, rare, slots, positions, settings, context, V, words, BLOCK: tl.constexpr
):
    p = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + p).to(tl.int64)
    allowed = tl.minimum(setting(settings, slot, _ALLOWED), _LONGEST).to(tl.int32)
    last_n = tl.minimum(setting(settings, slot, _LAST_N), _LONGEST).to(tl.int32)
    end = tl.load(positions + p)
    begin = tl.where(last_n < 0, 0, tl.maximum(end - last_n, 0))
    if (setting(settings, slot, _MULTIPLIER) > 0.0) & (end - begin > allowed):
        text = tokens + tl.load(texts + p).to(tl.int64) * context
        limit = allowed + _exponents(setting(settings, slot, _BASE))
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        follows = (i > begin) & (i < end)
        repeated = follows
        length = tl.zeros((BLOCK,), tl.int32)
        count = tl.full((), 0, tl.int32)
        remaining = tl.max(repeated.to(tl.int32), 0)
        while remaining > 0:
            last = tl.load(text + end - 1 - count)
            repeated = repeated & (i - 1 - count >= begin)
            other = tl.load(text + i - 1 - count, mask=repeated, other=0)
            repeated = repeated & (other == last)
            if _breaks(rare.breakers, slot, last, words):
                repeated = repeated & (i < 0)
            length += repeated.to(tl.int32)
            count += 1
            remaining = tl.max(repeated.to(tl.int32), 0)
            if (count >= limit) | (end - 1 - count < begin):
                remaining = remaining * 0
        token = tl.load(text + i, mask=follows, other=-1)
        continues = follows & (length >= allowed) & (token >= 0) & (token < V)
        continues = continues & (_breaks(rare.breakers, slot, token, words) == 0)
        tl.atomic_max(rare.repeats + p * V + token, length + 1, mask=continues)


@triton.jit(do_not_specialize=["V"])
def adjust_kernel(scratch, rare, slots, settings, V, BLOCK: tl.constexpr, DRY: tl.constexpr):
    p = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1)
    last = tl.num_programs(1)
    slot = tl.load(slots + p).to(tl.int64)
    i = b * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(scratch.z + p * V + i, mask=i < V, other=float("-inf"))
    if DRY:
        repeat = tl.load(rare.repeats + p * V + i, mask=i < V, other=0)
        base = setting(settings, slot, _BASE)
        allowed = tl.minimum(setting(settings, slot, _ALLOWED), _LONGEST).to(tl.int32)
        exponent = tl.minimum(repeat - 1 - allowed, _exponents(base)).to(tl.float64)
        growth = tl.exp(exponent * tl.log(tl.maximum(base, 1.0).to(tl.float64)))
        penalty = setting(settings, slot, _MULTIPLIER).to(tl.float64) * growth
        x = clean(tl.where(repeat > 0, x - penalty.to(tl.float32), x))
        x = tl.where(x == 0.0, 0.0, x)
        store_block(scratch.blocks, x, p, b, last, 2)
        tl.store(scratch.z + p * V + i, x, mask=i < V)
    finite = x > float("-inf")
    wide = tl.where(finite, x, 0.0).to(tl.float64)
    sums = rare.sums + (p * last + b) * _SUMS
    tl.store(sums, tl.sum(finite.to(tl.float64), 0))
    tl.store(sums + 1, tl.sum(wide, 0))
    tl.store(sums + 2, tl.sum(wide * wide, 0))


@triton.jit(do_not_specialize=["V", "B"])
def cut_kernel(scratch, rare, slots, settings, V, B, B_POW2: tl.constexpr, BLOCK: tl.constexpr):
    p = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1)
    slot = tl.load(slots + p).to(tl.int64)
    sigmas = setting(settings, slot, _SIGMA)
    # Other programs change the maxima of blocks meanwhile, but never the largest one.
    best, _, _ = row_best(scratch.blocks, p, 2, B, B_POW2)
    if (sigmas > 0.0) & (best > float("-inf")):
        c = tl.arange(0, B_POW2)
        sums = rare.sums + (p * B + c) * _SUMS
        count = tl.sum(tl.load(sums, mask=c < B, other=0.0), 0)
        mean = tl.sum(tl.load(sums + 1, mask=c < B, other=0.0), 0) / count
        square = tl.sum(tl.load(sums + 2, mask=c < B, other=0.0), 0) / count
        deviation = tl.sqrt(tl.maximum(square - mean * mean, 0.0))
        floor = (best.to(tl.float64) - sigmas.to(tl.float64) * deviation).to(tl.float32)
        i = b * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(scratch.z + p * V + i, mask=i < V, other=float("-inf"))
        x = tl.where(x >= floor, x, float("-inf"))
        tl.store(scratch.z + p * V + i, x, mask=i < V)
        store_block(scratch.blocks, x, p, b, B, 2)


def adjust(
    draws: Draws,
    settings: SamplingTensors,
    scratch: Scratch,
    rare: RareTensors,
    known: PenaltyTokens | None,
) -> None:
    """Apply DRY and top-n-sigma to `scratch.z`. `known`: required if a draw has DRY."""
    count, vocabulary = scratch.z.shape
    device = scratch.z.device
    blocks = -(-vocabulary // BLOCK)
    slots = settings.top_k.shape[0]
    words = -(-vocabulary // 32)
    require("rare.breakers", rare.breakers, (slots, words), device, torch.int32)
    require("rare.repeats", rare.repeats, (count, vocabulary), device, torch.int32)
    require("rare.sums", rare.sums, (count, blocks, _SUMS.value), device, torch.float64)
    if known is not None:
        context = known.tokens.shape[1]
        launch_kernel(
            repeats_kernel,
            (count, cdiv(context, BLOCK)),
            *(known.tokens, known.texts, rare, draws.slots, draws.positions, settings),
            *(context, vocabulary, words, BLOCK),
            num_warps=4,
        )
    launch_kernel(
        adjust_kernel,
        (count, blocks),
        *(scratch, rare, draws.slots, settings, vocabulary, BLOCK, known is not None),
        num_warps=4,
    )
    launch_kernel(
        cut_kernel,
        (count, blocks),
        *(scratch, rare, draws.slots, settings, vocabulary, blocks, power_of_two(blocks), BLOCK),
        num_warps=4,
    )
