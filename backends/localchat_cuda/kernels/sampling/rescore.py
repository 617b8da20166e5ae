"""Exact logits for the tokens that can be drawn. The other logits come from an int8 copy of the head.

The copy is half the bytes of the head, and its logits have bounds (fp8_int8/bounded_head.py). Only tokens that
can win within the bounds are computed again, from the head itself. The sampler then draws what it would have
drawn from the head's logits: no other token is kept by its filters and has the best score.

Letters: P draws, M rows of logits, N tokens of the vocabulary, K features of a last state, S = N / 64 groups of
tokens (whole blocks of 1,024 of them).

Bias, mask and penalties are rising functions of a logit, and a token's noise does not depend on it: so each
token has a lowest and a highest logit, l and h, and a lowest and a highest score. B is the largest l. A token
is computed again for a draw that is

    greedy                         if h >= B
    with top-k and any more        if h is at least the k-th largest of the groups' largest l
    with min-p alone, or nothing   if h >= B, or if h >= B + ln(min_p) and its highest score is at least the
                                   largest lowest score of a token that min-p certainly keeps

and one that is not keeps a logit of at most h. Hence the largest logit is exact, and so are the k best: what
follows top-k sees no others. A token that is not computed again but kept by min-p loses against one that is.
Top-p and typical-p without top-k, log probabilities and rare samplers need all tokens: `decides` is False.

Three kernels, no synchronisation with the CPU, no list that could overflow:
1. `_bound_kernel` (P, N / 1024): h of each token; per group the largest l and h, and the best lowest score.
2. `_floor_kernel` (P,): the floors that a token's h and score must reach.
3. `_rescore_kernel` (N / 128,): the tokens of a program are runs of eight from all over the vocabulary, because
   likely tokens have ids that are neighbours. Four at a time are computed for the rows whose draws want one of
   them, two rows at a time, each by the sums of skinny_gemm's kernel for one row, bit for bit. Where all tokens
   must be, that is the whole head.

Rescoring the candidates of a quantized search is common; bounding the error, so that nothing is lost, is ours.
"""
# mypy: disable-error-code="assignment"
# (Triton unrolls loops over tuples that grow; no type says that)

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from localchat.backend_api.sampling.reference import GREEDY_BELOW
from localchat.backend_api.step import SamplingParams
from localchat_cuda.kernels.launch import (
    KernelLaunch,
    cdiv,
    power_of_two,
    release,
    require,
    traits,
    wait,
)
from localchat_cuda.kernels.sampling.candidates import changed, clean, gumbel, noise
from localchat_cuda.kernels.sampling.state import (
    BLOCK,
    DROP,
    INVERSE_TEMPERATURE,
    LARGEST,
    Draws,
    Masking,
    PenaltyTokens,
    SamplingTensors,
    setting,
)
from localchat_cuda.kernels.skinny_gemm import add_products

MAX_ROWS = 8
"""Maximum rows. More rows have more tokens that can win, and their gemm costs little more than for one."""
MAX_TOP_K = 256
DISCARDED = -1
"""`SamplingTensors.top_k` of a slot whose tokens are unused. Nothing is computed again for it."""
GROUP = 64
_TOKENS = 128
_ROWS = 2
_UNROLL = 4
"""Tokens, rows at a time, and runs of 512 features in flight of a program. More take more registers."""
_FIELDS = 4
_LENGTH_SLACK = tl.constexpr(1.001)
"""Relative error of |x|, a sum of squares in fp32."""
_LEAST_LENGTH = tl.constexpr(1e-17)
"""Absolute error of squares that are too small for fp32."""
_SCORE_SLACK = tl.constexpr(4.76837158203125e-07)
"""2^-21: four roundings of a score, two of each token, relative to the largest number in it."""
_SCORE_SPAN = tl.constexpr(64.0)
"""Range of the noise, from -3 to 23.

A winning score is at most this far below the best logit.
"""


class Rescoring(NamedTuple):
    """Source of exact logits."""

    states: torch.Tensor
    """Last states [M, K]."""
    head: torch.Tensor
    """Floating, [N, K]."""
    bounds: torch.Tensor
    """BoundedHead.bounds: fp32 [N]."""


class RescoreScratch(NamedTuple):
    """Workspace for P draws."""

    peaks: torch.Tensor
    """fp32 [P, 4, S]: of each group the largest l, the largest h, the best lowest score, and l of the
    token that has it."""
    floors: torch.Tensor
    """fp32 [P, 4]: a token is computed again if h is at least the first, or at least the second with a highest
    score of at least the third."""

    @staticmethod
    def empty(draws: int, vocabulary: int, device: torch.device) -> "RescoreScratch":
        groups = -(-vocabulary // BLOCK) * (BLOCK // GROUP)
        return RescoreScratch(
            torch.empty(draws, _FIELDS, groups, device=device),
            torch.empty(draws, _FIELDS, device=device),
        )

    def part(self, draws: int) -> "RescoreScratch":
        """Return the workspace of fewer draws."""
        return RescoreScratch(self.peaks[:draws], self.floors[:draws])


def decides(sampling: SamplingParams) -> bool:
    """Return whether a draw with these settings depends only on the logits of likely tokens."""
    if sampling.top_logprobs >= 0 or sampling.rare:
        return False
    if sampling.temperature < GREEDY_BELOW or 0 < sampling.top_k <= MAX_TOP_K:
        return True
    return sampling.top_k == 0 and sampling.typical_p >= 1 and sampling.top_p >= 1


@triton.jit(do_not_specialize=["V", "words", "width"])
def _bound_kernel(
    logits,
    states,
    bounds,
    draws,
    settings,
    masking,
    counts,
    upper,
    peaks,
    V,
    words,
    width,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
    TALLIED: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    p = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1)
    i = b * BLOCK + tl.arange(0, BLOCK)
    inside = i < V
    bound = tl.load(bounds + i, mask=inside, other=0.0)
    wait(PDL)
    slot = tl.load(draws.slots + p).to(tl.int64)
    row = tl.load(draws.rows + p).to(tl.int64)
    k = tl.arange(0, triton.next_power_of_2(K))
    x = tl.load(states + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    margin = bound * (tl.sqrt(tl.sum(x * x, 0)) * _LENGTH_SLACK + _LEAST_LENGTH)
    z = tl.load(logits + row * V + i, mask=inside, other=float("-inf"))
    low = changed(
        z - margin, i, p, slot, settings, masking, counts, V, words, width, MASKED, TALLIED
    )
    high = changed(
        z + margin, i, p, slot, settings, masking, counts, V, words, width, MASKED, TALLIED
    )
    # An undefined number bounds nothing: clean() makes the lowest possible of it.
    low = tl.where(inside, clean(low), float("-inf"))
    high = tl.where((high != high) | (high > LARGEST), LARGEST, high)
    high = tl.where(inside, high, float("-inf"))
    tl.store(upper + p * V + i, high, mask=inside)
    GROUPS: tl.constexpr = BLOCK // GROUP
    stride = tl.num_programs(1) * GROUPS
    pointers = peaks + p * 4 * stride + b * GROUPS + tl.arange(0, GROUPS)
    lows = tl.reshape(low, (GROUPS, GROUP))
    tl.store(pointers, tl.max(lows, 1))
    tl.store(pointers + stride, tl.max(tl.reshape(high, (GROUPS, GROUP)), 1))
    inverse = setting(settings, slot, INVERSE_TEMPERATURE)
    if (inverse > 0.0) & (tl.load(settings.top_k + slot) == 0):
        seed = noise(tl.load(settings.keys + slot), tl.load(draws.positions + p))
        score = tl.where(low > float("-inf"), low * inverse + gumbel(seed, i), float("-inf"))
        score = tl.reshape(score, (GROUPS, GROUP))
        top = tl.max(score, 1)
        tl.store(pointers + 2 * stride, top)
        tl.store(
            pointers + 3 * stride, tl.max(tl.where(score == top[:, None], lows, float("-inf")), 1)
        )


@triton.jit
def _kth(x, k):
    """Return the k-th largest of x, or a number slightly below it. -inf if there are fewer."""
    bits = x.to(tl.int32, bitcast=True)
    rising = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 0x80000000
    result = tl.full((), 0, tl.int64)
    for step in range(24):
        higher = result | (tl.full((), 1, tl.int64) << (31 - step))
        result = tl.where(tl.sum((rising >= higher).to(tl.int32), 0) >= k, higher, result)
    key = (result - 0x80000000).to(tl.int32)
    value = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(value == value, value, float("-inf"))


@triton.jit(do_not_specialize=["S"])
def _floor_kernel(slots, settings, scratch, S, S_POW2: tl.constexpr, PDL: tl.constexpr):
    release(PDL)
    wait(PDL)
    p = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + p).to(tl.int64)
    inverse = setting(settings, slot, INVERSE_TEMPERATURE)
    k = tl.load(settings.top_k + slot)
    s = tl.arange(0, S_POW2)
    pointers = scratch.peaks + p * 4 * S + s
    lows = tl.load(pointers, mask=s < S, other=float("-inf"))
    best = tl.max(lows, 0)
    keep = tl.full((), float("inf"), tl.float32)
    score = tl.full((), float("-inf"), tl.float32)
    if k < 0:
        best = keep
    elif inverse > 0.0:
        if k > 0:
            keep = _kth(lows, k)
        else:
            drop = setting(settings, slot, DROP)
            keep = best + drop
            upper = tl.max(tl.load(pointers + S, mask=s < S, other=float("-inf")), 0)
            lowest = tl.load(pointers + 2 * S, mask=s < S, other=float("-inf"))
            certain = tl.load(pointers + 3 * S, mask=s < S, other=float("-inf")) >= upper + drop
            score = tl.max(tl.where(certain, lowest, float("-inf")), 0)
            largest = tl.maximum(tl.abs(best), tl.abs(upper)) * inverse + _SCORE_SPAN
            score -= largest * _SCORE_SLACK
            score = tl.where(score == score, score, float("-inf"))
    tl.store(scratch.floors + p * 4, best)
    tl.store(scratch.floors + p * 4 + 1, keep)
    tl.store(scratch.floors + p * 4 + 2, score)


@triton.jit(do_not_specialize=["P", "M"])
def _rescore_kernel(
    logits,
    states,
    weight,
    draws,
    settings,
    upper,
    floors,
    P,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    MP: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    UNROLL: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    wait(PDL)
    i = tl.arange(0, TOKENS)
    token = i // 8 * (8 * tl.num_programs(0)) + tl.program_id(0) * 8 + i % 8
    inside = token < N
    row_bits = tl.zeros((TOKENS,), tl.int32)  # a bit for each row
    for p in range(P):
        high = tl.load(upper + p * N + token, mask=inside, other=float("-inf"))
        best = tl.load(floors + p * 4)
        keep = tl.load(floors + p * 4 + 1)
        kept = high >= keep
        threshold = tl.load(floors + p * 4 + 2)
        if threshold > float("-inf"):
            slot = tl.load(draws.slots + p).to(tl.int64)
            seed = noise(tl.load(settings.keys + slot), tl.load(draws.positions + p))
            score = high * setting(settings, slot, INVERSE_TEMPERATURE) + gumbel(seed, token)
            kept = kept & (score >= threshold)
        kept = (high > float("-inf")) & ((high >= best) | kept)
        row_bits |= kept.to(tl.int32) << tl.load(draws.rows + p)
    rank = tl.cumsum((row_bits > 0).to(tl.int32), 0)
    count = tl.max(rank, 0)
    a = tl.arange(0, BN)
    k = tl.arange(0, BK)
    for begin in range(0, count, BN):
        chosen = (rank[None, :] == begin + 1 + a[:, None]) & (row_bits[None, :] > 0)
        ids = tl.sum(tl.where(chosen, token[None, :], 0), 1)
        wanting = tl.sum(tl.where(chosen, row_bits[None, :], 0), 1)
        row = weight + ids.to(tl.int64)[:, None] * K
        for part in tl.static_range(0, MP, ROWS):
            if tl.max((wanting >> part) & ((1 << ROWS) - 1), 0) > 0:
                first = tl.load(row + k[None, :], mask=(k < K)[None, :], other=0.0)
                sums = ()
                for m in tl.static_range(ROWS):
                    x = tl.load(states + tl.minimum(part + m, M - 1) * K + k, mask=k < K, other=0.0)
                    sums = sums + (add_products(first, x, tl.zeros((BN, BK), tl.float32)),)
                for c in tl.range(BK, K, BK, num_stages=1, loop_unroll_factor=UNROLL):
                    columns = c + k
                    if K % BK == 0:
                        w = tl.load(row + columns[None, :])
                    else:
                        w = tl.load(row + columns[None, :], mask=(columns < K)[None, :], other=0.0)
                    more = ()
                    for m in tl.static_range(ROWS):
                        pointers = states + tl.minimum(part + m, M - 1) * K + columns
                        if K % BK == 0:
                            xs = tl.load(pointers)
                        else:
                            xs = tl.load(pointers, mask=columns < K, other=0.0)
                        more = more + (add_products(w, xs, sums[m]),)
                    sums = more
                for m in tl.static_range(ROWS):
                    valid = tl.where(part + m < M, begin + a < count, False)
                    tl.store(logits + (part + m) * N + ids, tl.sum(sums[m], 1), mask=valid)


def rescore(
    logits: torch.Tensor,
    rescoring: Rescoring,
    draws: Draws,
    settings: SamplingTensors,
    upper: torch.Tensor,
    scratch: RescoreScratch,
    *,
    known: PenaltyTokens | None = None,
    masking: Masking | None = None,
) -> None:
    """Replace the logits fp32 [M, N] of tokens that the draws may choose by those of the floating head.

    Draws and settings as in sample.draw, `known.counts` filled. upper: scratch fp32 [P, N]. Not supported: more
    than 8 rows, a head whose logits are capped, settings that `decides` refuses."""
    m, n = logits.shape
    device = logits.device
    count = draws.rows.shape[0]
    hidden = rescoring.states.shape[1]
    if not 1 <= m <= MAX_ROWS:
        raise ValueError(f"logits: 1 to {MAX_ROWS} rows wanted, {m} given")
    require("logits", logits, (m, n), device, torch.float32)
    require("states", rescoring.states, (m, hidden), device)
    require("head", rescoring.head, (n, hidden), device, rescoring.states.dtype)
    require("bounds", rescoring.bounds, (n,), device, torch.float32)
    require("upper", upper, (count, n), device, torch.float32)
    blocks = cdiv(n, BLOCK)
    groups = blocks * (BLOCK // GROUP)
    require("scratch.peaks", scratch.peaks, (count, _FIELDS, groups), device, torch.float32)
    require("scratch.floors", scratch.floors, (count, _FIELDS), device, torch.float32)
    gpu = traits(device)
    masked = masking is not None
    masking = masking or Masking(draws.rows, draws.rows)
    counts = draws.rows if known is None else known.counts
    grid = (count, blocks)
    KernelLaunch(
        _bound_kernel, grid, gpu._replace(pdl=gpu.pdl and known is None), warps=4, rows=1
    ).run(
        *(logits, rescoring.states, rescoring.bounds, draws, settings, masking, counts, upper),
        *(scratch.peaks, n, masking.masks.shape[-1], settings.bias_ids.shape[1]),
        K=hidden,
        BLOCK=BLOCK,
        GROUP=GROUP,
        MASKED=masked,
        TALLIED=known is not None,
    )
    KernelLaunch(_floor_kernel, (count,), gpu, warps=8, rows=1).run(
        draws.slots, settings, scratch, groups, power_of_two(groups)
    )
    KernelLaunch(_rescore_kernel, (cdiv(n, _TOKENS),), gpu, warps=4, rows=1).run(
        *(logits, rescoring.states, rescoring.head, draws, settings, upper, scratch.floors),
        *(count, m),
        N=n,
        K=hidden,
        MP=power_of_two(m),
        ROWS=min(power_of_two(m), _ROWS),
        TOKENS=_TOKENS,
        BN=4,
        BK=min(512, power_of_two(hidden)),
        UNROLL=_UNROLL,
    )
