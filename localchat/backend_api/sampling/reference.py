"""Sampling contract: draws a token from a row of logits. The llama.cpp runner calls this;
the CUDA kernel is tested against it.

Letters: V = tokens of the vocabulary, z = processed logits, float32.

1. z = logits. **Logit bias** is added (ids outside 0..V-1 are ignored).
2. **Grammar mask**: tokens whose bit is clear get -inf; tokens beyond the mask's end too.
3. **Penalties**, on the tokens that occur in the known tokens before the drawn position:
   *repetition*, over prompt and output: z > 0 is divided by it, z <= 0 multiplied. Then *frequency*
   and *presence*, over output alone: z -= count * frequency + presence where count > 0. Then *DRY*,
   over prompt and output (repetition.py).
   Now NaN becomes -inf and +inf the largest float32. Tokens at -inf are never drawn.
4. The filters, in this order, which is that of llama.cpp; each works on p = the softmax of z
   *before temperature* over the tokens that the earlier filters kept, and keeps at least one token:
   **top-n-sigma** (0: off; Tang et al. 2024) keeps z >= max z - n * the standard deviation of the z
   above -inf, which is computed in float64; the bound is a float32.
   **top-k** (0: off) keeps the k largest z.
   **typical-p** (1: off), with H the entropy of p: in the order of |-ln p - H|, the shortest prefix
   whose p sum to typical_p or more.
   **top-p** (1: off): in the order of falling z, the shortest prefix whose p sum to top_p or more.
   **min-p** (0: off): z >= max z + ln(min_p), in float32.
   **XTC** ("exclude top choices", p-e-w: github.com/oobabooga/text-generation-webui/pull/6335), in
   the draws whose chance (gumbel.py) is below xtc_probability: of the tokens with p >= xtc_threshold,
   only the least likely stays, and all less likely tokens. Above 0.5 the threshold is off.
   Every tie goes to the lower token id. Sums may be rounded: two implementations agree except where
   a sum comes within 1e-6 of its threshold.
5. **Dynamic temperature** (range 0: off; kalomaze, as llama.cpp's llama_sampler_temp_ext): with H the
   entropy of p over the n > 1 tokens that are left, the temperature becomes
   low + (high - low) * (H / ln n) ** exponent, at least GREEDY_BELOW, where low and high are the
   temperature -+ the range, and low is not below 0.
6. **Temperature and draw**: the largest (z - max z) * (1 / temperature) + noise, float32, ties to
   the lower id; gumbel.py has the noise of a token. Below GREEDY_BELOW the temperature is 0: the
   largest z, ties to the lower id, and no filter counts.

A row with nothing to draw (all -inf or NaN) gives the token NOTHING. Log probabilities are those of
the raw logits (natural log, softmax over all of V, before step 1), whatever was drawn from.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localchat.backend_api.interface import SamplingParams
from localchat.backend_api.sampling.gumbel import REACH, chance, clear_winner, draw_key, winner
from localchat.backend_api.sampling.repetition import repetition_penalties
from localchat.backend_api.sampling.token_counts import TokenCounts

Row = NDArray[np.float32]
Ids = NDArray[np.int64]

NOTHING = -1
GREEDY_BELOW = 1e-5
_GROUP = 128
_SORTED_AT_ONCE = 4096
_PIECE = 8192
_HEAD_DEPTHS = (8.0, 12.0)
"""Distances below the largest logit that are searched before the whole row.

On real text, 8 decides 97 % of the draws that combine top-p with top-k or min-p, from 30 to 90 tokens."""
_HEAD_TOKENS = 512
"""Above this number of tokens, numpy sorts faster than Python."""
_TYPICAL_DISTANCES = (1.0, 3.0, 9.0, math.inf)
"""Distances from the entropy, in nats, that are searched for typical tokens."""
_WEIGHTLESS = np.float32(-200.0)
"""A logit that far below the largest has no weight in float32."""
_LEAST_HALF = float(np.finfo(np.float16).min)
_LARGEST = float(np.finfo(np.float32).max)


class Draw(NamedTuple):
    """A drawn token."""

    token: int
    logprob: float | None = None
    """Log probability from the raw logits. None if not requested."""
    top: tuple[tuple[int, float], ...] = ()
    """(token, logprob) of the raw logits, best first; empty if not requested."""


class Sampler:
    """Draws from rows of `vocab_size` logits. Not thread-safe.

    Holds scratch memory, because fresh temporaries of 152k floats cost more in page faults than the
    arithmetic on them.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._processed = np.empty(vocab_size, np.float32)
        self._work = np.empty(vocab_size, np.float32)
        self._flags = np.empty(vocab_size, np.bool_)
        bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        self._bars = np.where(bits, np.float32(0), np.float32(-np.inf))

    def draw(
        self,
        row: Row,
        params: SamplingParams,
        position: int,
        counts: TokenCounts | None = None,
        mask: bytes | None = None,
    ) -> Draw:
        """Draw the token at `position` from `row` (V,). Never changes the row, because choices may share it.

        `counts`: the tokens before `position`, required for penalties. `mask`: bit t of the little-endian words
        allows token t.
        """
        z = row
        if params.logit_bias or params.penalised or params.rare or mask is not None:
            with _quiet():
                z = self._process(row, params, counts, mask)
        if params.temperature < GREEDY_BELOW:
            token = _best(z)
        elif (sampled := self._draw_from_head(z, params, position)) is not None:
            token = sampled
        else:
            with _quiet():
                token = self._draw_from_all(z, params, position)
        if params.top_logprobs < 0:
            return Draw(token)
        return self.logprobs(row, token, params.top_logprobs)

    def logprobs(self, row: Row, token: int, top: int) -> Draw:
        """Return the log probability of `token` in `row` (V,), with the `top` best alternatives."""
        with _quiet():
            best = float(row.max())
            if not math.isfinite(best):
                row = _cleaned(row)
                best = float(row.max())
            if token == NOTHING or best == -math.inf:
                return Draw(token, -math.inf)
            log_sum = best + math.log(self._mass(row, best))
            ids = np.empty(0, np.int64)
            if top > 0:
                ids = self._largest(row, min(top, self.vocab_size))
            values = row[ids]
            order = np.lexsort((ids, -values))
            ranked = zip(ids[order].tolist(), values[order].tolist(), strict=True)
            return Draw(
                token, float(row[token]) - log_sum, tuple((t, z - log_sum) for t, z in ranked)
            )

    def all_logprobs(self, row: Row) -> bytes:
        """Return the log probabilities of all tokens of `row` (V,), as little-endian float16."""
        with _quiet():
            row = _cleaned(row)
            best = float(row.max())
            log_sum = 0.0
            if best > -math.inf:
                log_sum = best + math.log(self._mass(row, best))
            values = np.clip(row - np.float32(log_sum), _LEAST_HALF, 0.0).astype("<f2")
            return bytes(values.tobytes())

    def _draw_from_all(self, z: Row, params: SamplingParams, position: int) -> int:
        """Apply steps 4 to 6, without top-n-sigma, to processed logits."""
        z, best = _finite(z)
        if best == -math.inf:
            return NOTHING
        key = draw_key(params.seed, params.choice, position)
        shaped = _reshapes(params, key)
        # Skip tokens that noise cannot lift above the best, unless a filter may drop the best itself.
        reach = -math.inf
        if params.typical_p >= 1 and not shaped:
            reach = best - REACH * params.temperature
        if params.top_p >= 1 and not self._cuts(params) and not shaped:
            pieces = self._pieces(z, max(_least(best, params), reach))
            return _winner(key, pieces, best, params.temperature)
        ids, values = self._filter(z, best, params, reach)
        return _drawn(ids, values, params, key, shaped)

    def _process(
        self, row: Row, params: SamplingParams, counts: TokenCounts | None, mask: bytes | None
    ) -> Row:
        """Bias, mask, penalties and top-n-sigma: the row itself where nothing changes it."""
        z = row
        if params.logit_bias or params.penalised or params.top_n_sigma > 0 or mask is not None:
            z = self._processed
            np.copyto(z, row)
        if params.logit_bias:
            _bias(z, params.logit_bias)
        if mask is not None:
            self._mask(z, mask)
        if params.penalised:
            assert counts is not None, "penalties look at the known tokens"
            _penalise(z, params, counts)
        if params.top_n_sigma > 0:
            self._cut_below_sigma(z, params.top_n_sigma)
        return z

    def _cut_below_sigma(self, z: Row, deviations: float) -> None:
        """Set logits to -inf that are too many standard deviations below the largest."""
        best = float(z.max())
        if not math.isfinite(best):
            z[:] = _cleaned(z)
            best = float(z.max())
        count = 0
        total = 0.0
        squares = 0.0
        # In pieces that stay in a core's cache.
        for begin in range(0, z.size, _PIECE):
            piece = z[begin : begin + _PIECE]
            differences = np.subtract(piece, best, dtype=np.float64)
            if float(piece.min()) == -math.inf:
                differences = differences[piece > -math.inf]
            count += differences.size
            total += float(differences.sum())
            squares += float(differences @ differences)
        if count:
            variance = max(0.0, squares - total * total / count) / count
            floor = np.float32(best - float(np.float32(deviations)) * math.sqrt(variance))
            np.less(z, floor, out=self._flags)
            z[self._flags] = -np.inf

    def _mask(self, z: Row, mask: bytes) -> None:
        # Adding 0 or -inf by a table of bytes costs a fifth of a masked assignment.
        mask_bytes = np.frombuffer(mask, np.uint8, min(len(mask), z.size // 8))
        covered = mask_bytes.size * 8
        np.take(
            self._bars, mask_bytes, axis=0, out=self._work[:covered].reshape(-1, 8), mode="clip"
        )
        z[:covered] += self._work[:covered]
        last_byte = np.frombuffer(
            mask, np.uint8, min(len(mask) - mask_bytes.size, 1), mask_bytes.size
        )
        tail = z[covered : covered + 8]
        if last_byte.size:
            tail += self._bars[last_byte].reshape(-1)[: tail.size]
        else:
            tail += np.float32(-np.inf)
        z[covered + 8 :] = -np.inf

    def _draw_from_head(self, z: Row, params: SamplingParams, position: int) -> int | None:
        """Apply steps 4 to 6, without top-n-sigma, to the largest of the processed logits.

        None if the other logits may matter.
        """
        bounded = params.min_p > 0 or 0 < params.top_k <= _HEAD_TOKENS
        best = float(z[z.argmax()])
        if not bounded or params.typical_p < 1 or not math.isfinite(best):
            return None
        for depth in _HEAD_DEPTHS:
            floor = float(np.float32(best - depth))
            ids = self._above(z, floor)
            if ids.size > _HEAD_TOKENS:
                return None
            values: list[float] = z.take(ids).tolist()
            picked = self._picked_head(values, best, floor, params)
            if picked is not None:
                break
        else:
            return None
        if len(picked) == 1:
            return int(ids[picked[0]])
        key = draw_key(params.seed, params.choice, position)
        if params.rare and _reshapes(params, key):
            kept = ids.take(picked)
            return _drawn(kept, z.take(kept), params, key, shaped=True)
        tokens: list[int] = ids.take(picked).tolist()
        scores = [(values[index] - best) / params.temperature for index in picked]
        return clear_winner(key, tokens, scores)

    def _picked_head(
        self, values: list[float], best: float, floor: float, params: SamplingParams
    ) -> list[int] | None:
        """Return the ascending indices of what top-k, top-p and min-p keep of all logits.

        values: all logits of at least `floor`, of which `best` is the largest. None if the logits below `floor`
        decide. Each of these filters keeps a prefix of the falling order, so that the shortest prefix counts.
        """
        order = sorted(range(len(values)), key=values.__getitem__, reverse=True)
        limit = min(params.top_k or self.vocab_size, self.vocab_size)
        missing = max(0, limit - len(order))
        del order[limit:]
        # Lengths of the prefix if the missing logits weigh nothing, and if each of them equals `floor`.
        shortest = longest = len(order) + missing
        if params.top_p < 1:
            sums = list(accumulate([math.exp(values[index] - best) for index in order]))
            total = sums[-1]
            total_limit = total + missing * math.exp(floor - best)
            shortest = min(shortest, bisect_left(sums, params.top_p * total) + 1)
            longest = min(longest, bisect_left(sums, params.top_p * total_limit) + 1)
            if params.top_p * total_limit > total:
                longest = len(order) + missing
        lowest = _least(best, params)
        if lowest >= floor:
            above = sum([values[index] >= lowest for index in order])
            shortest = min(shortest, above)
            longest = min(longest, above)
        if shortest < longest or shortest > len(order):
            return None
        return sorted(order[:shortest])

    def _filter(self, z: Row, best: float, params: SamplingParams, reach: float) -> tuple[Ids, Row]:
        """Step 4. Tokens below `reach` are left out, after they have counted in every sum."""
        if self._cuts(params):
            if 0 < params.top_k < self.vocab_size:
                ids = self._largest(z, params.top_k)
                values = z.take(ids)
                ids, values = _picked(ids, values, (values > -math.inf).nonzero()[0])
                if params.typical_p < 1:
                    mass, mean = self._mass_and_mean(values, best)
                    picked, _ = _typical(values, best, mass, mean, params.typical_p)
                    ids, values = _picked(ids, values, picked)
            else:
                ids = self._typical_of_all(z, best, params.typical_p)
                values = z.take(ids)
            best = float(values.max())
            if params.top_p < 1:
                weights = _weights(values, best)
                needed = params.top_p * float(weights.sum())
                ids, values = _picked(ids, values, _shortest(-values, weights, needed))
            if params.min_p > 0:
                floor = np.float32(_least(best, params))
                ids, values = _picked(ids, values, (values >= floor).nonzero()[0])
            return ids, values
        # Top-p and min-p both keep a prefix of the falling order, so they may be applied in either order, once
        # top-p knows the whole sum.
        cutoff = max(_least(best, params), reach)
        if params.top_p >= 1:
            ids = self._above(z, cutoff)
            return ids, z.take(ids)
        needed = params.top_p * self._mass(z, best)
        ids = self._head(z, best, cutoff, needed)
        values = z.take(ids)
        return _picked(ids, values, _shortest(-values, _weights(values, best), needed))

    def _cuts(self, params: SamplingParams) -> bool:
        """Whether a filter before top-p applies."""
        return 0 < params.top_k < self.vocab_size or params.typical_p < 1

    def _mass(self, z: Row, best: float) -> float:
        """Sum of exp(z - best)."""
        total = 0.0
        highest = np.float32(best)
        # In pieces that stay in a core's cache: written in full, the terms cost twice the time.
        for begin in range(0, z.size, _PIECE):
            terms = np.subtract(z[begin : begin + _PIECE], highest)
            np.exp(terms, out=terms)
            total += float(terms.sum())
        return total

    def _mass_and_mean(self, z: Row, best: float) -> tuple[float, float]:
        """Return the sum of exp(z - best), and the mean of z - best with these weights."""
        mass = 0.0
        total = 0.0
        for begin in range(0, z.size, _PIECE):
            differences = z[begin : begin + _PIECE] - np.float32(best)
            # The weight of -inf is 0, but 0 * -inf is not.
            np.maximum(differences, _WEIGHTLESS, out=differences)
            weights = np.exp(differences).astype(np.float64)
            mass += float(weights.sum())
            total += float(weights @ differences.astype(np.float64))
        return mass, total / mass

    def _typical_of_all(self, z: Row, best: float, needed: float) -> Ids:
        """Return the ascending ids of the typical tokens of a whole row."""
        mass, mean = self._mass_and_mean(z, best)
        # Sorting all tokens takes ten times as long, so look near the mean first.
        for distance in _TYPICAL_DISTANCES:
            low = np.float32(best + mean - distance)
            high = np.float32(best + mean + distance)
            np.greater_equal(z, max(low, np.float32(-_LARGEST)), out=self._flags)
            self._flags &= z <= high
            ids = self._flags.nonzero()[0]
            picked, farthest = _typical(z.take(ids), best, mass, mean, needed)
            rounding = 4 * float(np.spacing(max(abs(low), abs(high))))
            if farthest < distance - rounding or distance == math.inf:
                break
        return ids if picked is None else ids.take(picked)

    def _head(self, z: Row, best: float, floor: float, needed: float) -> Ids:
        """Return the ascending ids of the largest z, including the top-p prefix.

        Returns all z of at least `floor` if fewer do not suffice.
        """
        for depth in (4.0, 12.0):
            if best - depth <= floor:
                break
            ids = self._above(z, best - depth)
            if float(_weights(z.take(ids), best).sum(dtype=np.float64)) >= needed:
                return ids
        return self._above(z, floor)

    def _above(self, z: Row, floor: float) -> Ids:
        """Return the ascending ids of all finite z of at least `floor`."""
        np.greater_equal(z, np.float32(max(floor, -_LARGEST)), out=self._flags)
        return self._flags.nonzero()[0]

    def _pieces(self, z: Row, floor: float) -> Iterator[tuple[Ids, Row]]:
        """Yield ids and values of all finite z of at least `floor`, in pieces.

        Arrays of a whole vocabulary would need new pages each time, which cost ten times the arithmetic.
        """
        np.greater_equal(z, np.float32(max(floor, -_LARGEST)), out=self._flags)
        size = _PIECE if np.count_nonzero(self._flags) > _PIECE else z.size
        for begin in range(0, z.size, size):
            ids = self._flags[begin : begin + size].nonzero()[0]
            if ids.size:
                ids += begin
                yield ids, z.take(ids)

    def _largest(self, z: Row, count: int) -> Ids:
        """Return the ascending ids of the `count` largest z. The lower id wins a tie."""
        if count >= z.size:
            return np.arange(z.size)
        groups = z.size // _GROUP
        if groups >= 2 * count:
            # `count` of the disjoint groups have a maximum of at least `floor`, so `count` tokens do too.
            highest = z[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
            floor = np.partition(highest, groups - count)[groups - count]
            np.greater_equal(z, floor, out=self._flags)
            ids = self._flags.nonzero()[0]
        else:
            ids = np.arange(z.size)
        if ids.size > count:
            values = z.take(ids)
            border = -np.partition(values, ids.size - count)[-count]
            ids = ids.take(_lowest(-values, border, count))
        return ids


def _reshapes(params: SamplingParams, key: int) -> bool:
    """Return whether XTC acts in this draw, or the temperature is dynamic."""
    if not params.rare:
        return False
    return params.dynatemp_range > 0 or _excludes(params, key)


def _excludes(params: SamplingParams, key: int) -> bool:
    """Return whether XTC acts in this draw."""
    if params.xtc_probability <= 0 or params.xtc_threshold > 0.5:
        return False
    return chance(key) < float(np.float32(params.xtc_probability))


def _drawn(ids: Ids, values: Row, params: SamplingParams, key: int, shaped: bool) -> int:
    """Draw from the tokens that the filters before XTC keep. `shaped`: result of `_reshapes`."""
    temperature = params.temperature
    if shaped:
        if _excludes(params, key):
            ids, values = _picked(ids, values, _without_top(values, params.xtc_threshold))
        temperature = _dynamic_temperature(values, params)
    if ids.size == 1:
        return int(ids[0])
    return _winner(key, [(ids, values)], float(values.max()), temperature)


def _winner(key: int, pieces: Iterable[tuple[Ids, Row]], best: float, temperature: float) -> int:
    """Return the token with the largest score and noise. `best`: largest logit of the pieces."""
    highest = np.float32(best)
    warmth = np.float32(1.0 / temperature)
    return winner(key, ((ids, (values - highest) * warmth) for ids, values in pieces))


def _without_top(values: Row, threshold: float) -> Ids | None:
    """Return the ascending indices of the tokens that XTC leaves. None: all."""
    weights = _weights(values, float(values.max()))
    needed = float(np.float32(threshold)) * float(weights.sum(dtype=np.float64))
    likely = np.flatnonzero(weights >= needed)
    if likely.size < 2:
        return None
    likely_values = values.take(likely)
    # Of equal tokens, the one with the lower id counts as more likely.
    kept = likely[np.flatnonzero(likely_values == likely_values.min())[-1]]
    leaves = np.ones(values.size, np.bool_)
    leaves[likely] = False
    leaves[kept] = True
    return np.flatnonzero(leaves)


def _dynamic_temperature(values: Row, params: SamplingParams) -> float:
    """Return the temperature by the entropy of the tokens that are left."""
    if params.dynatemp_range <= 0 or values.size < 2:
        return params.temperature
    falls = values.max() - values.astype(np.float64)
    weights = np.exp(-falls)
    mass = float(weights.sum())
    entropy = math.log(mass) + float(weights @ falls) / mass
    low = max(0.0, params.temperature - params.dynatemp_range)
    high = params.temperature + params.dynatemp_range
    share = max(0.0, entropy) / math.log(values.size)
    warmed = low + (high - low) * math.pow(share, params.dynatemp_exponent)
    return max(GREEDY_BELOW, warmed)


def _quiet() -> np.errstate:
    """Ignore overflows and NaN, which extreme logits cause."""
    return np.errstate(over="ignore", invalid="ignore")


def _finite(z: Row) -> tuple[Row, float]:
    """Return the logits without NaN and +inf, and their maximum."""
    best = float(z.max())
    if not math.isfinite(best):
        z = _cleaned(z)
        best = float(z.max())
    return z, best


def _picked(ids: Ids, values: Row, picked: Ids | None) -> tuple[Ids, Row]:
    """Return the entries at the indices `picked`. None: all."""
    if picked is None or picked.size == ids.size:
        return ids, values
    return ids.take(picked), values.take(picked)


def _least(best: float, params: SamplingParams) -> float:
    """Return the lowest logit that min-p keeps. -inf: min-p is off."""
    if params.min_p <= 0:
        return -math.inf
    return float(np.float32(best) + np.float32(min(0.0, math.log(params.min_p))))


def _weights(values: Row, best: float) -> Row:
    """Return exp(values - best), which is proportional to the probabilities."""
    weights: Row = np.exp(values - np.float32(best))
    return weights


def _cleaned(z: Row) -> Row:
    return np.nan_to_num(z, nan=-np.inf, posinf=_LARGEST, neginf=-np.inf)


def _best(z: Row) -> int:
    """Return the id of the largest z. The lower id wins a tie.

    One pass takes 30 µs for 152k floats that are not in the cache. Finding the maximum first and then its
    position takes 75 µs.
    """
    # argmax returns the id of a NaN, if there is one.
    token = int(z.argmax())
    if math.isfinite(z[token]):
        return token
    z = _cleaned(z)
    token = int(z.argmax())
    if z[token] == -math.inf:
        return NOTHING
    return token


def _bias(z: Row, bias: tuple[tuple[int, float], ...]) -> None:
    ids = np.array([token for token, _ in bias], np.int64)
    values = np.array([value for _, value in bias], np.float32)
    valid = (ids >= 0) & (ids < z.size)
    z[ids[valid]] += values[valid]


def _penalise(z: Row, params: SamplingParams, counts: TokenCounts) -> None:
    ids = counts.ids
    values = z.take(ids)
    if params.repetition_penalty != 1:
        repetition = np.float32(params.repetition_penalty)
        values = np.where(values > 0, values / repetition, values * repetition)
    if params.frequency_penalty or params.presence_penalty:
        minus = counts.output * np.float32(params.frequency_penalty)
        minus += np.float32(params.presence_penalty)
        values -= np.where(counts.output > 0, minus, np.float32(0))
    z[ids] = values
    if params.dry_multiplier > 0:
        ids, penalties = repetition_penalties(counts.sequence, params, z.size)
        z[ids] -= penalties


def _lowest(keys: NDArray[np.floating], border: float, count: int) -> Ids:
    """Return the ascending indices of the `count` lowest keys. `border`: the highest of them.

    The first wins a tie.
    """
    kept = keys < border
    kept[np.flatnonzero(keys == border)[: count - np.count_nonzero(kept)]] = True
    return np.flatnonzero(kept)


def _shortest(
    keys: NDArray[np.floating], weights: NDArray[np.floating], needed: float
) -> Ids | None:
    """Return the ascending indices of the shortest prefix by ascending keys with enough weight.

    Its weights sum to at least `needed`. None: all weights together do not. Equal keys are ordered by index.
    """
    if float(weights.sum(dtype=np.float64)) < needed:
        return None
    # Sorting 152k floats takes 7 ms, so halve the range of keys until few are left.
    # Selecting by flags instead of indices takes four times as long.
    pool = keys
    its_weights = weights
    before = 0.0
    count = 0
    while pool.size > _SORTED_AT_ONCE:
        lowest = pool.min()
        highest = pool.max()
        lower = pool <= lowest + (highest - lowest) / 2
        picked = np.flatnonzero(lower)
        if picked.size == pool.size:
            break
        inside = its_weights.take(picked)
        mass = float(inside.sum(dtype=np.float64))
        if before + mass >= needed:
            pool = pool.take(picked)
            its_weights = inside
        else:
            before += mass
            count += picked.size
            picked = np.flatnonzero(~lower)
            pool = pool.take(picked)
            its_weights = its_weights.take(picked)
    order = pool.argsort(kind="stable")
    sums = its_weights.take(order).cumsum(dtype=np.float64)
    last = min(int(sums.searchsorted(needed - before)), pool.size - 1)
    if pool is keys:
        return np.sort(order[: last + 1])
    return _lowest(keys, pool[order[last]], count + last + 1)


def _typical(
    values: Row, best: float, mass: float, mean: float, needed: float
) -> tuple[Ids | None, float]:
    """Return the indices of the tokens with a surprise nearest to the entropy, and the largest distance.

    The entropy minus a surprise is z - best minus its mean. `mass`, `mean`: of all tokens that are left. The
    indices are None and the distance infinite if the sum of p is too small. Locally typical sampling, Meister
    et al. 2022.
    """
    differences = (values - np.float32(best)).astype(np.float64)
    distances = np.abs(differences - mean)
    picked = _shortest(distances, np.exp(differences) / mass, needed)
    if picked is None:
        return None, math.inf
    return picked, float(distances.take(picked).max())
