"""Token sampling on the GPU, with the same token ids as localchat/backend_api/sampling/reference.py.

The exceptions are two scores, or a sum and its threshold, within rounding of each other (about 1e-6).

Letters: P draws (positions whose token is drawn), R rows of logits, V vocabulary, B = V / 1024
blocks, S slots of the state table, C = 16,384 candidates.

XTC and the dynamic temperature follow all other filters, in `_shape`. DRY and top-n-sigma are in rare.py. A
step without them runs none of their code.

Five kernels, no synchronisation with the CPU, no sort:
1. `tally_kernel` (P, tokens / 1024): counts of the tokens before a draw, if any is penalised.
2. `process_kernel` (P, B): bias, mask, penalties; per block the maximum and the mass of exp.
3. `measure_kernel` (P, B): per block, if min-p is the only filter, the winner of the draw;
   else how many tokens, or how much mass, lie within each of 16 depths below the best.
4. `collect_kernel` (P, B): the tokens down to the first depth that suffices, in any order, into a
   list of at most C.
5. `_draw_kernel` (P,): the filters and the draw over that list. If the list cannot hold the tokens that a
   filter needs (flat distributions, typical-p without top-k) the same code scans the row.

A filter keeps a prefix of some order, so it is a search for the prefix's last element: halving the
range of the 64-bit key (order, token id), with the range clipped to elements that exist. Masses
are summed as integers (40 fractional bits): the order of the candidates changes no bit. Noise:
localchat/backend_api/sampling/gumbel.py. Gumbel-max without softmax: vLLM's model runner; threshold search:
FlashInfer.
"""

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.launch import (
    KernelLaunch,
    cdiv,
    launch_kernel,
    power_of_two,
    release,
    require,
    traits,
    wait,
)
from localchat_cuda.kernels.sampling.candidates import (
    chance,
    clean,
    collect_kernel,
    greedy,
    gumbel,
    measure_kernel,
    noise,
    process_kernel,
    race,
    row_best,
    tally_kernel,
)
from localchat_cuda.kernels.sampling.rare import RareTensors, adjust
from localchat_cuda.kernels.sampling.rescore import RescoreScratch, Rescoring, rescore
from localchat_cuda.kernels.sampling.state import (
    BLOCK,
    CANDIDATES,
    DEEPEST,
    DROP,
    FRACTION,
    HIGHEST,
    INVERSE_TEMPERATURE,
    LOWEST,
    REACH_COLUMN,
    TOP_P,
    TYPICAL_P,
    Draws,
    Masking,
    PenaltyTokens,
    SamplingTensors,
    Scratch,
    check,
    column,
    setting,
)

_CHUNK = 2048
"""Tokens of a step of the filters."""
_PROBABILITY = column("xtc_probability")
_THRESHOLD = column("xtc_threshold")
_TEMPERATURE = column("temperature")
_RANGE = column("dynatemp_range")
_EXPONENT = column("dynatemp_exponent")


@triton.jit
def _key(x, token):
    """Compute an int64 that rises as x falls; among equals with the token id."""
    bits = x.to(tl.int32, bitcast=True)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ((-1 - rising).to(tl.int64) << 32) | token.to(tl.int64)


@triton.jit
def _chunk(tokens, c, CHUNK: tl.constexpr):
    """Load values and ids of a chunk of `tokens`. -inf past their end.

    `tokens`: values and ids of the list, or of the row if the third is 1; and how many they are.
    """
    values, ids, all_tokens, n = tokens
    index = c * CHUNK + tl.arange(0, CHUNK)
    inside = index < n
    x = tl.load(values + index, mask=inside, other=float("-inf"))
    token = tl.load(ids + index, mask=index < n * (1 - all_tokens), other=0)
    return x, token + index * all_tokens


@triton.jit
def _weight(x, best):
    return (tl.exp(x - best) * FRACTION).to(tl.int64)


@triton.jit
def _distance(x, token, best, mean):
    """Compute the key of typical-p: rises with the distance of x - best from its mean."""
    return _key(-tl.abs((x - best) - mean), token)


@triton.jit
def _kept(x, token, limits):
    """Mark tokens within top-k (keys up to `limit`) and typical-p (distances up to `far`).

    `limits`: these two, between the best logit and the mean of its distances.
    """
    best, limit, far, mean = limits
    return (
        (x > float("-inf")) & (_key(x, token) <= limit) & (_distance(x, token, best, mean) <= far)
    )


@triton.jit
def _total(tokens, limits, CHUNK: tl.constexpr, FALL: tl.constexpr):
    """Sum the masses of the kept tokens; FALL: of the masses times best - x."""
    best = limits[0]
    total = tl.zeros((CHUNK,), tl.int64)
    for c in range(tl.cdiv(tokens[3], CHUNK)):
        x, token = _chunk(tokens, c, CHUNK)
        kept = _kept(x, token, limits)
        if FALL:
            fall = tl.where(kept, best - x, 0.0)
            total += tl.where(kept, (tl.exp(-fall) * fall * FRACTION).to(tl.int64), 0)
        else:
            total += tl.where(kept, _weight(x, best), 0)
    return tl.sum(total, 0)


@triton.jit
def _search(tokens, limits, needed, CHUNK: tl.constexpr, MASS: tl.constexpr, TYPICAL: tl.constexpr):
    """Return the key at which the weights of a prefix reach `needed`.

    Weights are tokens or masses of the kept tokens; the order is that of falling x, or of rising distance. All
    tokens if the sum is never reached.
    """
    best, _, _, mean = limits
    low = tl.full((), LOWEST, tl.int64)
    high = tl.full((), HIGHEST, tl.int64)
    # low: its prefix is too short. high: its prefix suffices, or it lies past the last element.
    while low + 1 < high:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        total = tl.zeros((CHUNK,), tl.int64)
        below = tl.full((CHUNK,), LOWEST, tl.int64)
        above = tl.full((CHUNK,), HIGHEST, tl.int64)
        for c in range(tl.cdiv(tokens[3], CHUNK)):
            x, token = _chunk(tokens, c, CHUNK)
            kept = _kept(x, token, limits)
            if TYPICAL:
                key = _distance(x, token, best, mean)
            else:
                key = _key(x, token)
            inside = kept & (key <= middle)
            if MASS:
                total += tl.where(inside, _weight(x, best), 0)
            else:
                total += inside.to(tl.int64)
            below = tl.maximum(below, tl.where(inside, key, LOWEST))
            above = tl.minimum(above, tl.where(kept & (key > middle), key, HIGHEST))
        if tl.sum(total, 0) >= needed:
            high = tl.max(below, 0)
        else:
            low = tl.min(above, 0) - 1
    return high


@triton.jit
def _survives(x, token, limits, nucleus, floor):
    """Mark tokens that top-k, typical-p, top-p and min-p keep."""
    return _kept(x, token, limits) & (_key(x, token) <= nucleus) & (x >= floor)


@triton.jit
def _shape(tokens, limits, nucleus, top, floor, inverse, seed, settings, slot, CHUNK: tl.constexpr):
    """Apply XTC and the dynamic temperature to the tokens that the other filters keep.

    `top`: the largest of their logits. Returns the lowest key that XTC leaves, the largest logit that is left,
    and the inverse temperature.
    """
    first = tl.full((), LOWEST, tl.int64)
    threshold = setting(settings, slot, _THRESHOLD)
    excludes = chance(seed) < setting(settings, slot, _PROBABILITY)
    if excludes & (threshold <= 0.5):
        total = tl.zeros((CHUNK,), tl.int64)
        for c in range(tl.cdiv(tokens[3], CHUNK)):
            x, token = _chunk(tokens, c, CHUNK)
            kept = _survives(x, token, limits, nucleus, floor)
            total += tl.where(kept, _weight(x, top), 0)
        needed = (threshold.to(tl.float64) * tl.sum(total, 0).to(tl.float64)).to(tl.int64)
        needed = tl.maximum(needed, 1)
        keys = tl.full((CHUNK,), LOWEST, tl.int64)
        for c in range(tl.cdiv(tokens[3], CHUNK)):
            x, token = _chunk(tokens, c, CHUNK)
            kept = _survives(x, token, limits, nucleus, floor)
            likely = kept & (_weight(x, top) >= needed)
            keys = tl.maximum(keys, tl.where(likely, _key(x, token), LOWEST))
        first = tl.max(keys, 0)
        tops = tl.full((CHUNK,), float("-inf"), tl.float32)
        for c in range(tl.cdiv(tokens[3], CHUNK)):
            x, token = _chunk(tokens, c, CHUNK)
            kept = _survives(x, token, limits, nucleus, floor)
            kept = kept & (_key(x, token) >= first)
            tops = tl.maximum(tops, tl.where(kept, x, float("-inf")))
        top = tl.max(tops, 0)
    span = setting(settings, slot, _RANGE)
    if span > 0.0:
        masses = tl.zeros((CHUNK,), tl.float64)
        falls = tl.zeros((CHUNK,), tl.float64)
        counts = tl.zeros((CHUNK,), tl.int32)
        for c in range(tl.cdiv(tokens[3], CHUNK)):
            x, token = _chunk(tokens, c, CHUNK)
            kept = _survives(x, token, limits, nucleus, floor)
            kept = kept & (_key(x, token) >= first)
            fall = tl.where(kept, top - x, 0.0)
            weight = tl.where(kept, tl.exp(-fall), 0.0)
            masses += weight.to(tl.float64)
            falls += (weight * fall).to(tl.float64)
            counts += kept.to(tl.int32)
        count = tl.sum(counts, 0)
        if count > 1:
            mass = tl.sum(masses, 0)
            entropy = tl.log(mass) + tl.sum(falls, 0) / mass
            share = tl.maximum(entropy / tl.log(count.to(tl.float64)), 1e-30)
            temperature = setting(settings, slot, _TEMPERATURE)
            low = tl.maximum(temperature - span, 0.0).to(tl.float64)
            high = (temperature + span).to(tl.float64)
            exponent = setting(settings, slot, _EXPONENT).to(tl.float64)
            dynamic = low + (high - low) * tl.exp(exponent * tl.log(share))
            inverse = (1.0 / tl.maximum(dynamic, 1e-5)).to(tl.float32)
    return first, top, inverse


@triton.jit
def _sample(
    row,
    listed,
    V,
    best,
    mass,
    inverse,
    filters,
    seed,
    settings,
    slot,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    RARE: tl.constexpr,
):
    """Apply the filters and draw one token.

    `listed`: values, ids and number of the candidates. `filters`: settings of the slot, as unpacked here.
    """
    values, ids, n = listed
    k, reach, typical, top_p, drop = filters
    needed = (top_p.to(tl.float64) * mass.to(tl.float64) * FRACTION).to(tl.int64)
    limit = tl.full((), HIGHEST, tl.int64)
    far = tl.full((), HIGHEST, tl.int64)
    mean = best * 0.0
    # use the list if it holds every token that a filter needs
    if k > 0:
        all_tokens = (n > C) | ((n < k) & (n < V))
    elif typical < 1.0:
        all_tokens = n >= 0
    else:
        all_tokens = n > C
        if (top_p < 1.0) & (n <= C):
            listed_mass = _total((values, ids, n * 0, n), (best, limit, far, mean), CHUNK, False)
            all_tokens = (listed_mass < needed) & (tl.minimum(reach, -drop) > DEEPEST)
    if RARE:
        # No filter but min-p and rare ones: nothing is listed.
        all_tokens = all_tokens | (n == 0)
    all_tokens = all_tokens.to(tl.int32)
    if all_tokens != 0:
        values = row
        n = V
    tokens = (values, ids, all_tokens, n)
    if (k > 0) & (k < V):
        limit = _search(
            tokens, (best, limit, far, mean), k.to(tl.int64), CHUNK, MASS=False, TYPICAL=False
        )
    top = best
    if typical < 1.0:
        limits = (best, limit, far, mean)
        total = _total(tokens, limits, CHUNK, False)
        fall = _total(tokens, limits, CHUNK, True)
        mean = -(fall.to(tl.float64) / total.to(tl.float64)).to(tl.float32)
        goal = tl.maximum((typical.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
        far = _search(tokens, (best, limit, far, mean), goal, CHUNK, MASS=True, TYPICAL=True)
        tops = tl.full((CHUNK,), float("-inf"), tl.float32)
        for c in range(tl.cdiv(n, CHUNK)):
            x, token = _chunk(tokens, c, CHUNK)
            kept = _kept(x, token, (best, limit, far, mean))
            tops = tl.maximum(tops, tl.where(kept, x, float("-inf")))
        top = tl.max(tops, 0)
    limits = (best, limit, far, mean)
    nucleus = limit
    if top_p < 1.0:
        if (k > 0) | (typical < 1.0):
            total = _total(tokens, limits, CHUNK, False)
            needed = (top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
        needed = tl.maximum(needed, 1)
        nucleus = _search(tokens, limits, needed, CHUNK, MASS=True, TYPICAL=False)
    floor = top + drop
    if RARE:
        first, top, inverse = _shape(
            tokens, limits, nucleus, top, floor, inverse, seed, settings, slot, CHUNK
        )
    won = tl.full((CHUNK,), float("-inf"), tl.float32)
    winner = tl.full((CHUNK,), 0x7FFFFFFF, tl.int32)
    for c in range(tl.cdiv(n, CHUNK)):
        x, token = _chunk(tokens, c, CHUNK)
        kept = _survives(x, token, limits, nucleus, floor)
        if RARE:
            kept = kept & (_key(x, token) >= first)
        score = tl.where(kept, (x - top) * inverse + gumbel(seed, token), float("-inf"))
        better = kept & ((score > won) | ((score == won) & (token < winner)))
        won = tl.where(better, score, won)
        winner = tl.where(better, token, winner)
    return tl.min(tl.where(won == tl.max(won, 0), winner, 0x7FFFFFFF), 0)


@triton.jit(do_not_specialize=["V", "B"])
def _draw_kernel(
    logits,
    draws,
    settings,
    scratch,
    tokens,
    logprobs,
    normalizers,
    V,
    B,
    B_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    RARE: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    wait(PDL)
    p = tl.program_id(0).to(tl.int64)
    slot = tl.load(draws.slots + p).to(tl.int64)
    raw_best, raw_mass, _ = row_best(scratch.blocks, p, 0, B, B_POW2)
    normalizer = tl.where(raw_best == float("-inf"), 0.0, raw_best) + tl.log(
        tl.maximum(raw_mass, 1e-30)
    )
    best, mass, tops = row_best(scratch.blocks, p, 2, B, B_POW2)
    inverse = setting(settings, slot, INVERSE_TEMPERATURE)
    token = tl.full((), -1, tl.int32)
    if best > float("-inf"):
        k = tl.load(settings.top_k + slot)
        typical = setting(settings, slot, TYPICAL_P)
        top_p = setting(settings, slot, TOP_P)
        unfiltered = (k == 0) & (typical >= 1.0) & (top_p >= 1.0)
        if RARE:
            shaped = setting(settings, slot, _PROBABILITY) + setting(settings, slot, _RANGE)
            unfiltered = unfiltered & (shaped == 0.0)
        if inverse == 0.0:
            token = greedy(scratch.z + p * V, tops, V, BLOCK, B_POW2)
        elif unfiltered:
            token = race(scratch.blocks, p, B, B_POW2)
        else:
            count = tl.load(scratch.counts + p)
            listed = (scratch.candidates + p * C, scratch.ids + p * C, count)
            reach = setting(settings, slot, REACH_COLUMN)
            filters = (k, reach, typical, top_p, setting(settings, slot, DROP))
            seed = noise(tl.load(settings.keys + slot), tl.load(draws.positions + p))
            z = scratch.z + p * V
            token = _sample(
                z, listed, V, best, mass, inverse, filters, seed, settings, slot, C, CHUNK, RARE
            )
    tl.store(tokens + p, token)
    row = tl.load(draws.rows + p).to(tl.int64) * V
    own = tl.load(logits + row + tl.maximum(token, 0)).to(tl.float32)
    own = tl.where(
        (token < 0) | (raw_best == float("-inf")), float("-inf"), clean(own) - normalizer
    )
    tl.store(logprobs + p, own)
    tl.store(normalizers + p, normalizer)


def draw(
    logits: torch.Tensor,
    draws: Draws,
    settings: SamplingTensors,
    scratch: Scratch,
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
    normalizers: torch.Tensor,
    *,
    known: PenaltyTokens | None = None,
    masking: Masking | None = None,
    rescoring: Rescoring | None = None,
    rescore_scratch: RescoreScratch | None = None,
    rare: RareTensors | None = None,
) -> None:
    """Draw the tokens of P draws; reference: `localchat.backend_api.sampling.reference.Sampler.draw`.

    logits [R, V] fp32, fp16 or bf16, only read unless there is `rescoring`. Results:
    tokens int32 [P] (-1: nothing to draw), logprobs fp32 [P] of the raw logits, normalizers fp32 [P],
    so that row - normalizer are all log probabilities. known: required if any draw is penalised.
    rescoring, with rescore_scratch: the logits are approximate, and those of likely tokens become exact
    first; logprobs and normalizers are approximate then. rare: required if any draw has a rare sampler,
    which excludes `rescoring`.
    """
    check(logits, draws, settings, scratch)
    vocabulary = logits.shape[1]
    device = logits.device
    count = draws.rows.shape[0]
    require("tokens", tokens, (count,), device, torch.int32)
    require("logprobs", logprobs, (count,), device, torch.float32)
    require("normalizers", normalizers, (count,), device, torch.float32)
    gpu = traits(device)
    blocks = -(-vocabulary // BLOCK)
    if known is not None:
        context = known.tokens.shape[1]
        require("known.texts", known.texts, (count,), device, torch.int32)
        require("known.counts", known.counts, (count, vocabulary), device, torch.int32)
        known.counts.zero_()
        launch_kernel(
            tally_kernel,
            (count, cdiv(context, BLOCK)),
            *(known.tokens, known.texts, known.prompts, known.counts, draws.slots, draws.positions),
            *(context, vocabulary, BLOCK),
        )
    if rescoring is not None:
        assert rescore_scratch is not None, "rescoring needs its scratch"
        rescore(
            *(logits, rescoring, draws, settings, scratch.z, rescore_scratch),
            known=known,
            masking=masking,
        )
    # Behind a kernel that releases its dependents.
    chained = gpu.pdl and (known is None or rescoring is not None)
    changes = (masking is not None, known is not None)
    masking = masking or Masking(draws.rows, draws.rows)
    counts = draws.rows if known is None else known.counts
    room = power_of_two(blocks)
    KernelLaunch(process_kernel, (count, blocks), gpu._replace(pdl=chained), warps=4).run(
        *(logits, draws, settings, masking, counts, scratch, vocabulary),
        *(masking.masks.shape[-1], settings.bias_ids.shape[1], BLOCK, *changes),
    )
    if rare is not None:
        if rescoring is not None:
            raise ValueError("rare samplers need all logits, which rescoring leaves approximate")
        adjust(draws, settings, scratch, rare, known)
        gpu = gpu._replace(pdl=False)
    grid = (count, blocks)
    sizes = (vocabulary, blocks, room, BLOCK)
    KernelLaunch(measure_kernel, grid, gpu, warps=4).run(scratch, draws, settings, *sizes)
    KernelLaunch(collect_kernel, grid, gpu, warps=4).run(
        scratch, draws.slots, settings, *sizes, CANDIDATES
    )
    KernelLaunch(_draw_kernel, (count,), gpu, warps=8).run(
        *(logits, draws, settings, scratch, tokens, logprobs, normalizers, *sizes, CANDIDATES),
        *(_CHUNK, rare is not None),
    )
