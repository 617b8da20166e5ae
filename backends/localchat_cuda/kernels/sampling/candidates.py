"""First four kernels of the sampler: process the logits and collect the candidate tokens (see sample.py)."""

import triton
import triton.language as tl

from localchat_cuda.kernels.launch import release, wait
from localchat_cuda.kernels.sampling.state import (
    BLOCK_ROWS,
    DEEPEST,
    DEPTHS,
    DROP,
    FREQUENCY,
    INVERSE_TEMPERATURE,
    LARGEST,
    PRESENCE,
    REACH_COLUMN,
    REPETITION,
    SEEN,
    TOP_P,
    TYPICAL_P,
    setting,
)


@triton.jit(do_not_specialize=["context", "V"])
def tally_kernel(tokens, texts, prompts, counts, slots, positions, context, V, BLOCK: tl.constexpr):
    p = tl.program_id(0)
    slot = tl.load(slots + p).to(tl.int64)
    text = tl.load(texts + p).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = i < tl.load(positions + p)
    token = tl.load(tokens + text * context + i, mask=valid, other=0)
    valid = valid & (token >= 0) & (token < V)
    output = i >= tl.load(prompts + slot)
    pointers = counts + p.to(tl.int64) * V + token
    tl.atomic_add(pointers, 1, mask=valid & output)
    tl.atomic_or(pointers, SEEN, mask=valid & (i < tl.load(prompts + slot)))


@triton.jit
def clean(z):
    z = tl.where(z != z, float("-inf"), z)
    return tl.where(z > LARGEST, LARGEST, z)


@triton.jit
def exp_mass(z, top):
    return tl.sum(tl.exp(z - tl.where(top == float("-inf"), 0.0, top)), 0)


@triton.jit
def changed(
    x,
    i,
    p,
    slot,
    settings,
    masking,
    counts,
    V,
    words,
    width,
    MASKED: tl.constexpr,
    TALLIED: tl.constexpr,
):
    """Apply bias, mask and penalties to logits x of the tokens i. Each is a rising function of the logit, in
    fp32 too: bounds of a logit become bounds of the result."""
    for e in range(tl.load(settings.bias_counts + slot)):
        hit = i == tl.load(settings.bias_ids + slot * width + e)
        x = tl.where(hit, x + tl.load(settings.bias_values + slot * width + e), x)
    if MASKED:
        mask_row = tl.load(masking.rows + p)
        if mask_row >= 0:
            word_index = i // 32
            bits = tl.load(
                masking.masks + mask_row.to(tl.int64) * words + word_index,
                mask=word_index < words,
                other=0,
            )
            x = tl.where(((bits >> (i % 32)) & 1) == 1, x, float("-inf"))
    if TALLIED:
        count = tl.load(counts + p * V + i, mask=i < V, other=0)
        repetition = setting(settings, slot, REPETITION)
        output = count & (SEEN - 1)
        minus = output.to(tl.float32) * setting(settings, slot, FREQUENCY) + setting(
            settings, slot, PRESENCE
        )
        repeated = tl.where(x > 0, x / repetition, x * repetition)
        x = tl.where(count != 0, repeated - tl.where(output > 0, minus, 0.0), x)
    return x


@triton.jit
def store_block(blocks, x, p, b, B, FIRST: tl.constexpr):
    """Store the maximum and the mass of a block in rows FIRST and FIRST + 1."""
    top = tl.max(x, 0)
    tl.store(blocks + (p * BLOCK_ROWS + FIRST) * B + b, top)
    tl.store(blocks + (p * BLOCK_ROWS + FIRST + 1) * B + b, exp_mass(x, top))


@triton.jit(do_not_specialize=["V", "words", "width"])
def process_kernel(
    logits,
    draws,
    settings,
    masking,
    counts,
    scratch,
    V,
    words,
    width,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    TALLIED: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    wait(PDL)
    p = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1)
    last = tl.num_programs(1)
    i = b * BLOCK + tl.arange(0, BLOCK)
    inside = i < V
    slot = tl.load(draws.slots + p).to(tl.int64)
    x = tl.load(
        logits + tl.load(draws.rows + p).to(tl.int64) * V + i, mask=inside, other=float("-inf")
    )
    x = x.to(tl.float32)
    store_block(scratch.blocks, clean(x), p, b, last, 0)
    x = changed(x, i, p, slot, settings, masking, counts, V, words, width, MASKED, TALLIED)
    x = clean(x)
    x = tl.where(x == 0.0, 0.0, x)
    store_block(scratch.blocks, x, p, b, last, 2)
    tl.store(scratch.z + p * V + i, x, mask=inside)
    if b == 0:
        tl.store(scratch.counts + p, 0)


@triton.jit
def row_best(blocks, p, which, B, B_POW2: tl.constexpr):
    """Return the row's maximum, ln of its mass of exp(z - maximum), and block maxima."""
    b = tl.arange(0, B_POW2)
    tops = tl.load(blocks + (p * BLOCK_ROWS + which) * B + b, mask=b < B, other=float("-inf"))
    masses = tl.load(blocks + (p * BLOCK_ROWS + which + 1) * B + b, mask=b < B, other=0.0)
    best = tl.max(tops, 0)
    anchor = tl.where(best == float("-inf"), 0.0, best)
    return best, tl.sum(masses * tl.exp(tops - anchor), 0), tops


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    return (x ^ (x >> 27)) * 0x94D049BB133111EB


@triton.jit
def gumbel(key, token):
    """Compute standard Gumbel noise of a token: -ln(-ln(1 - v)), v from the hash
    (localchat/backend_api/sampling/gumbel.py)."""
    h = _mix(key + (token.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15) >> 32
    v = tl.minimum(
        (h.to(tl.uint32).to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.960464477539063e-08
    )
    # -ln(1 - v) = 2 atanh(v / (2 - v)): the logarithm would lose a small v, and small v win
    s = v / (2.0 - v)
    t = s * s
    tail = t * (
        0.14285714 + t * (0.11111111 + t * (0.09090909 + t * (0.07692308 + t * 0.06666667)))
    )
    small = 2.0 * s * (1.0 + t * (0.33333334 + t * (0.2 + tail)))
    return -tl.log(tl.where(v < 0.5, small, -tl.log(1.0 - v)))


@triton.jit
def chance(key):
    """Compute `gumbel.chance`: a number between 0 and 1 for a decision of the draw."""
    h = (_mix(key) >> 32).to(tl.uint32).to(tl.float32)
    return tl.minimum((h + 0.5) * 2.3283064365386963e-10, 1.0 - 5.960464477539063e-08)


@triton.jit
def noise(key, position):
    """Compute the key of a draw: the last step of `gumbel.draw_key`."""
    x = _mix((key.to(tl.uint64) ^ position.to(tl.uint64)) + 0x9E3779B97F4A7C15)
    return x ^ (x >> 31)


@triton.jit
def depths():
    """List the depths: 16 down to 1 nats below the best, in steps of a fifth."""
    return tl.exp2(4.0 - 0.26666668 * tl.arange(0, DEPTHS).to(tl.float32))


@triton.jit(do_not_specialize=["V", "B"])
def measure_kernel(
    scratch, draws, settings, V, B, B_POW2: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    release(PDL)
    wait(PDL)
    p = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1)
    slot = tl.load(draws.slots + p).to(tl.int64)
    inverse = setting(settings, slot, INVERSE_TEMPERATURE)
    best, _, _ = row_best(scratch.blocks, p, 2, B, B_POW2)
    if (inverse > 0.0) & (best > float("-inf")):
        i = b * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(scratch.z + p * V + i, mask=i < V, other=float("-inf"))
        alive = x > float("-inf")
        k = tl.load(settings.top_k + slot)
        typical = setting(settings, slot, TYPICAL_P)
        top_p = setting(settings, slot, TOP_P)
        pointers = scratch.blocks + (p * BLOCK_ROWS + 4) * B + b
        if (k == 0) & (typical >= 1.0) & (top_p >= 1.0):
            seed = noise(tl.load(settings.keys + slot), tl.load(draws.positions + p))
            kept = alive & (x >= best + setting(settings, slot, DROP))
            score = tl.where(kept, (x - best) * inverse + gumbel(seed, i), float("-inf"))
            top = tl.max(score, 0)
            winner = tl.min(tl.where(kept & (score == top), i, 0x7FFFFF), 0)
            tl.store(pointers, top)
            tl.store(pointers + B, winner.to(tl.float32))
        else:
            near = alive[None, :] & (x[None, :] >= (best - depths())[:, None])
            weight = tl.exp(x - best)
            if k > 0:
                weight = tl.full((BLOCK,), 1.0, tl.float32)
            e = tl.arange(0, DEPTHS)
            tl.store(pointers + (2 + e) * B, tl.sum(tl.where(near, weight[None, :], 0.0), 1))


@triton.jit(do_not_specialize=["V", "B"])
def collect_kernel(
    scratch,
    slots,
    settings,
    V,
    B,
    B_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
    C: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    wait(PDL)
    p = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1)
    slot = tl.load(slots + p).to(tl.int64)
    k = tl.load(settings.top_k + slot)
    top_p = setting(settings, slot, TOP_P)
    typical = setting(settings, slot, TYPICAL_P)
    best, mass, _ = row_best(scratch.blocks, p, 2, B, B_POW2)
    limits_tokens = (k > 0) | ((top_p < 1.0) & (typical >= 1.0))
    if (
        limits_tokens
        & (setting(settings, slot, INVERSE_TEMPERATURE) > 0.0)
        & (best > float("-inf"))
    ):
        c = tl.arange(0, B_POW2)[None, :]
        e = tl.arange(0, DEPTHS)[:, None]
        within = tl.sum(
            tl.load(scratch.blocks + (p * BLOCK_ROWS + 6 + e) * B + c, mask=c < B, other=0.0), 1
        )
        needed = top_p * mass * 1.0001
        if k > 0:
            needed = k.to(tl.float32)
        depth = tl.min(tl.where(within >= needed, depths(), DEEPEST), 0)
        if k == 0:
            # tokens that cannot win are left out: the lowest of a prefix, so the others' sums stay the same
            depth = tl.minimum(
                depth,
                tl.minimum(setting(settings, slot, REACH_COLUMN), -setting(settings, slot, DROP)),
            )
        threshold = best - depth
        if tl.load(scratch.blocks + (p * BLOCK_ROWS + 2) * B + b) >= threshold:
            i = b * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(scratch.z + p * V + i, mask=i < V, other=float("-inf"))
            kept = (x >= threshold) & (x > float("-inf"))
            rank = tl.cumsum(kept.to(tl.int32), 0)
            targets = tl.atomic_add(scratch.counts + p, tl.sum(kept.to(tl.int32), 0)) + rank - 1
            kept = kept & (targets < C)
            tl.store(scratch.candidates + p * C + targets, x, mask=kept)
            tl.store(scratch.ids + p * C + targets, i, mask=kept)


@triton.jit
def greedy(z, tops, V, BLOCK: tl.constexpr, B_POW2: tl.constexpr):
    """Find the lowest id of the largest value: in the first block that has it."""
    b = tl.arange(0, B_POW2)
    best = tl.max(tops, 0)
    block = tl.min(tl.where(tops == best, b, B_POW2), 0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(z + i, mask=i < V, other=float("-inf"))
    return tl.min(tl.where(x == best, i, V), 0)


@triton.jit
def race(blocks, p, B, B_POW2: tl.constexpr):
    """Find the winner among the blocks' winners."""
    b = tl.arange(0, B_POW2)
    pointers = blocks + (p * BLOCK_ROWS + 4) * B + b
    score = tl.load(pointers, mask=b < B, other=float("-inf"))
    winner = tl.load(pointers + B, mask=b < B, other=8388607.0)
    return tl.min(tl.where(score == tl.max(score, 0), winner, 8388607.0), 0).to(tl.int32)
