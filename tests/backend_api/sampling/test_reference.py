"""The sampler contract against a slow reference in float64 that follows its text step by step."""

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from localchat.backend_api.interface import SamplingParams
from localchat.backend_api.sampling.gumbel import (
    HIGHEST,
    LOWEST,
    M1,
    M2,
    MASK,
    G,
    chance,
    clear_winner,
    draw_key,
    winner,
)
from localchat.backend_api.sampling.reference import NOTHING, Draw, Sampler
from localchat.backend_api.sampling.repetition import breaker_bits, repetition_penalties
from localchat.backend_api.sampling.token_counts import TokenCounts
from tests.support.gumbel_noise import gumbel

Row = NDArray[np.float32]
PLAIN = SamplingParams(temperature=1.0, top_p=1.0, min_p=0.0)


def candidates(
    sampler: Sampler,
    row: Row,
    params: SamplingParams,
    counts: TokenCounts | None = None,
    mask: bytes | None = None,
) -> tuple[NDArray[np.int64], Row]:
    """Return the tokens that the filters keep: ascending ids (n,) and processed logits (n,)."""
    with np.errstate(over="ignore", invalid="ignore"):
        z = sampler._process(row, params, counts, mask)
        z = np.nan_to_num(z, nan=-np.inf, posinf=float(np.finfo(np.float32).max), neginf=-np.inf)
        best = float(z.max())
        if best == -math.inf:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        return sampler._filter(z, best, params, -math.inf)


class Border(Exception):
    """A sum so near to its threshold that rounding may decide."""


def shortest(order: list[int], p: dict[int, float], needed: float) -> list[int]:
    total = 0.0
    for count, token in enumerate(order):
        total += p[token]
        if abs(total - needed) < 1e-6:
            raise Border
        if total >= needed:
            return order[: count + 1]
    return order


def softmax(z: dict[int, float]) -> dict[int, float]:
    best = max(z.values())
    terms = {t: math.exp(v - best) for t, v in z.items()}
    whole = sum(terms.values())
    return {t: v / whole for t, v in terms.items()}


def processed(
    row: Row, params: SamplingParams, tokens: list[int], prompt: int, mask: bytes | None
) -> Row:
    z = row.astype(np.float32).copy()
    for token, value in params.logit_bias:
        if 0 <= token < len(z):
            z[token] += np.float32(value)
    if mask is not None:
        for token in range(len(z)):
            if token // 8 >= len(mask) or not mask[token // 8] >> (token % 8) & 1:
                z[token] = -np.inf
    for token in set(tokens):
        rep = np.float32(params.repetition_penalty)
        z[token] = z[token] / rep if z[token] > 0 else z[token] * rep
    for token, count in Counter(tokens[prompt:]).items():
        z[token] -= np.float32(
            np.float32(count) * np.float32(params.frequency_penalty)
            + np.float32(params.presence_penalty)
        )
    for token, length in (repeats(tokens, params) if params.dry_multiplier else {}).items():
        # Settings are float32 on every backend.
        growth = math.log(float(np.float32(params.dry_base)))
        growth = math.exp((length - params.dry_allowed_length) * growth)
        if token < len(z):
            z[token] -= np.float32(float(np.float32(params.dry_multiplier)) * growth)
    return z


def repeats(tokens: list[int], params: SamplingParams) -> dict[int, int]:
    """DRY as p-e-w describes it: how long a repetition each token would continue, compared one by one."""
    text = tokens if params.dry_penalty_last_n < 0 else tokens[-params.dry_penalty_last_n :]
    if params.dry_penalty_last_n == 0 or len(text) <= params.dry_allowed_length:
        return {}
    breakers = {
        t
        for t in set(text)
        if t // 8 < len(params.dry_breakers) and params.dry_breakers[t // 8] >> t % 8 & 1
    }
    longest: dict[int, int] = {}
    for index in range(1, len(text)):
        length = 0
        while (
            length < index
            and text[index - 1 - length] == text[-1 - length]
            and text[-1 - length] not in breakers
        ):
            length += 1
        token = text[index]
        if length >= params.dry_allowed_length and token not in breakers:
            longest[token] = max(length, longest.get(token, 0))
    return longest


def excluded(falling: list[int], p: dict[int, float], threshold: float) -> list[int]:
    """XTC as p-e-w describes it: of the tokens above the threshold, keep only the least likely."""
    if any(abs(p[t] - threshold) < 1e-6 for t in falling):
        raise Border
    above = sum(p[t] >= threshold for t in falling)
    return falling[max(0, above - 1) :]


def warmth(p: dict[int, float], params: SamplingParams) -> float:
    """Dynamic temperature as llama.cpp computes it."""
    if params.dynatemp_range == 0 or len(p) < 2:
        return params.temperature
    entropy = -sum(v * math.log(v) for v in p.values() if v > 0) / math.log(len(p))
    low = max(0.0, params.temperature - params.dynatemp_range)
    high = params.temperature + params.dynatemp_range
    share: float = max(0.0, entropy) ** params.dynatemp_exponent
    return max(1e-5, low + (high - low) * share)


def reference(z: Row, params: SamplingParams) -> list[int]:
    """Ids that the filters before XTC leave, rising. Raises Border."""
    kept = {t: float(v) for t, v in enumerate(z) if v > -math.inf}
    if params.top_n_sigma > 0:
        floor = max(kept.values()) - params.top_n_sigma * float(np.std(list(kept.values())))
        if any(0 < abs(v - floor) < 1e-5 for v in kept.values()):
            raise Border
        kept = {t: v for t, v in kept.items() if v >= floor}
    falling = sorted(kept, key=lambda t: (-kept[t], t))
    if params.top_k:
        falling = falling[: params.top_k]
    if params.typical_p < 1:
        p = softmax({t: kept[t] for t in falling})
        entropy = -sum(v * math.log(v) for v in p.values() if v > 0)
        strange = {t: abs(-math.log(p[t]) - entropy) if p[t] > 0 else math.inf for t in falling}
        order = sorted(falling, key=lambda t: (round(strange[t], 9), t))
        chosen = shortest(order, p, params.typical_p)
        if len(chosen) < len(order):
            gap = strange[order[len(chosen)]] - strange[chosen[-1]]
            equal = kept[order[len(chosen)]] == kept[chosen[-1]]
            if gap < 1e-5 and not equal:
                raise Border
        falling = sorted(chosen, key=lambda t: (-kept[t], t))
    if params.top_p < 1:
        falling = shortest(falling, softmax({t: kept[t] for t in falling}), params.top_p)
    if params.min_p > 0:
        floor = kept[falling[0]] + math.log(params.min_p)
        if any(abs(kept[t] - floor) < 1e-5 for t in falling if params.min_p < 1):
            raise Border
        falling = [t for t in falling if kept[t] >= floor]
    return sorted(falling)


values = st.one_of(
    st.floats(-12, 12, width=32),
    st.sampled_from([0.0, 1.0, 2.0, 3.0, -math.inf]),
)
rows = st.lists(values, min_size=1, max_size=40).map(lambda v: np.array(v, np.float32))
parameters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 3, 10, 100]),
    typical_p=st.sampled_from([1.0, 0.9, 0.5, 0.1]),
    top_p=st.sampled_from([1.0, 0.97, 0.8, 0.4, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.5]),
    presence_penalty=st.sampled_from([0.0, 0.25]),
    logit_bias=st.lists(
        st.tuples(st.integers(0, 50), st.sampled_from([-100.0, -1.5, 2.0])),
        max_size=3,
        unique_by=lambda b: b[0],
    ).map(tuple),
    seed=st.integers(0, 2**64 - 1),
    dry_multiplier=st.sampled_from([0.0, 0.8, 3.0]),
    dry_base=st.sampled_from([1.0, 1.75, 4.0]),
    dry_allowed_length=st.integers(0, 3),
    dry_penalty_last_n=st.sampled_from([-1, 0, 3, 8]),
    dry_breakers=st.sampled_from([b"", b"\x02"]),
    top_n_sigma=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    xtc_probability=st.sampled_from([0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.05, 0.1, 0.3, 0.6]),
    dynatemp_range=st.sampled_from([0.0, 0.5, 2.0]),
    dynatemp_exponent=st.sampled_from([1.0, 0.5]),
)


@settings(max_examples=400, deadline=None)
@given(data=st.data(), row=rows, params=parameters)
def test_filters_keep_what_the_reference_keeps(
    data: st.DataObject, row: Row, params: SamplingParams
) -> None:
    # Few different tokens, so that sequences repeat.
    tokens = data.draw(st.lists(st.integers(0, min(2, len(row) - 1)), max_size=24))
    prompt = data.draw(st.integers(0, len(tokens)))
    mask = data.draw(st.none() | st.binary(min_size=0, max_size=8))
    z = processed(row, params, tokens, prompt, mask)
    before = row.copy()
    sampler = Sampler(len(row))
    ids, kept = candidates(sampler, row, params, TokenCounts(tokens, prompt), mask)
    assert np.array_equal(row, before), "the row is only read"
    token = sampler.draw(row, params, 7, TokenCounts(tokens, prompt), mask).token
    if z.max() == -np.inf:
        assert ids.size == 0
        assert token == NOTHING
        return
    assert kept.tolist() == z[ids].tolist()
    try:
        expected = reference(z, params)
    except Border:
        assume(False)
    assert ids.tolist() == expected
    if params.temperature == 0:
        assert token == int(np.flatnonzero(z == z.max())[0])
    else:
        key = draw_key(params.seed, params.choice, 7)
        logits = dict(zip(ids.tolist(), kept.astype(np.float64).tolist(), strict=True))
        falling = sorted(expected, key=lambda t: (-logits[t], t))
        if params.xtc_threshold <= 0.5 and chance(key) < params.xtc_probability:
            try:
                falling = excluded(falling, softmax(logits), params.xtc_threshold)
            except Border:
                assume(False)
        left = np.array(sorted(falling), np.int64)
        logits = {t: logits[t] for t in left.tolist()}
        temperature = warmth(softmax(logits), params)
        noise = gumbel(key, left).astype(np.float64)
        score = (np.array(list(logits.values())) - max(logits.values())) / temperature + noise
        assert token in logits
        assert score[left.tolist().index(token)] >= score.max() - 1e-3


@pytest.mark.parametrize("spread", [0.05, 0.66, 3.0])
@pytest.mark.parametrize(
    "change",
    [
        {"top_k": 40},
        {"top_k": 1},
        {"top_k": 3000},
        {"top_p": 0.86},
        {"top_p": 0.86, "min_p": 0.05},
        {"min_p": 0.01},
        {"typical_p": 0.8},
        {"typical_p": 0.8, "top_k": 50, "top_p": 0.7},
    ],
)
def test_shortcuts_for_wide_rows_change_nothing(change: dict[str, float], spread: float) -> None:
    """Wide enough for the group maxima, the heads and the halving to be used; rounded, so that ties
    occur."""
    wide = np.random.default_rng(3).standard_normal(9001) * spread
    row = (np.round(wide * 64) / 64).astype(np.float32)
    params = replace(PLAIN, **change)  # type: ignore[arg-type]
    ids, _ = candidates(Sampler(len(row)), row, params)
    assert ids.tolist() == reference(row, params)


def test_typical_tokens_near_the_entropy_are_those_of_the_whole_row() -> None:
    random = np.random.default_rng(9)
    sampler = Sampler(9001)
    for _ in range(60):
        row = (random.standard_normal(9001) * random.choice([0.1, 1.0, 3.0, 6.0])).astype(
            np.float32
        )
        row[random.random(9001) < 0.3] = -np.inf
        share = float(random.choice([0.01, 0.2, 0.5, 0.9, 0.99, 0.99999]))
        found, _ = candidates(sampler, row, replace(PLAIN, typical_p=share))
        p = np.exp(row.astype(np.float64) - row.max())
        p /= p.sum()
        with np.errstate(divide="ignore"):
            surprise = -np.log(p)
        entropy = float(p[p > 0] @ surprise[p > 0])
        order = np.argsort(np.abs(surprise - entropy), kind="stable")
        kept = order[: int(np.searchsorted(np.cumsum(p[order]), share)) + 1]
        # Rounding may decide about one token at the border.
        assert len(np.setxor1d(found, kept[np.isfinite(row[kept])])) <= 1


def test_what_the_noise_cannot_reach_is_skipped_without_effect() -> None:
    row = np.random.default_rng(5).standard_normal(5000).astype(np.float32) * 12
    sampler = Sampler(len(row))
    for position in range(40):
        params = replace(PLAIN, temperature=0.5, seed=position)
        noise = gumbel(draw_key(position, 0, position), np.arange(len(row)))
        assert sampler.draw(row, params, position).token == int((row / 0.5 + noise).argmax())


@pytest.mark.parametrize("step", [0, 64, 2, 1], ids=["continuous", "ties", "halves", "integers"])
@pytest.mark.parametrize(
    "change",
    [
        {"top_k": 40, "top_p": 0.95},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.05},
        {"top_k": 64},
        {"top_p": 0.95, "min_p": 0.05},
        {"min_p": 0.3},
        {"top_k": 40, "top_p": 0.95, "temperature": 1e-5},
    ],
)
def test_drawing_from_the_head_changes_no_draw(change: dict[str, float], step: int) -> None:
    """Compare with the float32 draw among all candidates, bit by bit."""
    random = np.random.default_rng(11)
    sampler = Sampler(3000)
    for position in range(60):
        row = (random.standard_normal(3000) * random.choice([0.5, 2.0, 6.0])).astype(np.float32)
        if step:
            row = (np.round(row * step) / step).astype(np.float32)
        params = replace(PLAIN, seed=position, **change)  # type: ignore[arg-type]
        ids, kept = candidates(sampler, row, params)
        scores = (kept - kept.max()) * np.float32(1 / params.temperature)
        expected = winner(draw_key(position, 0, position), [(ids, scores)])
        assert sampler.draw(row, params, position).token == expected


def test_few_tokens_have_no_clear_winner_within_rounding() -> None:
    key = draw_key(1, 2, 3)
    noise = gumbel(key, np.array([4, 5], np.int64)).tolist()
    assert clear_winner(key, [4, 5], [0.0, noise[0] - noise[1] - 0.1]) == 4
    assert clear_winner(key, [4, 5], [0.0, noise[0] - noise[1]]) is None


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (PLAIN, [0.5, 0.25, 0.125, 0.125]),
        (replace(PLAIN, temperature=0.5), [0.25, 0.0625, 1 / 64, 1 / 64]),
        (replace(PLAIN, top_k=2), [2, 1, 0, 0]),
        (replace(PLAIN, top_p=0.8), [4, 2, 1, 0]),
        (replace(PLAIN, min_p=0.4), [2, 1, 0, 0]),
        (replace(PLAIN, xtc_probability=1.0, xtc_threshold=0.2), [0, 2, 1, 1]),
        # Half of the draws lose the first token, which the other half draw from as usual.
        (replace(PLAIN, xtc_probability=0.5, xtc_threshold=0.2), [0.25, 0.375, 0.1875, 0.1875]),
        (replace(PLAIN, xtc_probability=1.0, xtc_threshold=0.3), [4, 2, 1, 1]),
        (replace(PLAIN, top_k=2, xtc_probability=1.0, xtc_threshold=0.3), [0, 1, 0, 0]),
        (replace(PLAIN, top_n_sigma=1.5), [2, 1, 0, 0]),
        # The entropy is 1.75 bits of 2.
        (replace(PLAIN, dynatemp_range=0.5), [2 ** (-n / 1.375) for n in (1, 2, 3, 3)]),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams, expected: list[float]) -> None:
    row = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    sampler, draws = Sampler(4), 4000
    seen = Counter(sampler.draw(row, params, position).token for position in range(draws))
    whole = sum(expected)
    assert all(seen[t] == 0 for t, weight in enumerate(expected) if weight == 0)
    chi = sum(
        (seen[t] - draws * w / whole) ** 2 / (draws * w / whole)
        for t, w in enumerate(expected)
        if w > 0
    )
    assert chi < 16.3, "p < 0.001 with three degrees of freedom"


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_xtc_excludes_top_tokens_in_its_share_of_the_draws(probability: float) -> None:
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    params = replace(PLAIN, xtc_probability=probability, xtc_threshold=0.15)
    sampler, draws = Sampler(4), 20_000
    with_top = sum(sampler.draw(row, params, position).token < 2 for position in range(draws))
    # The first two of three tokens above the threshold appear only where nothing is excluded.
    expected = 0.7 * (1 - probability)
    deviation = math.sqrt(expected * (1 - expected) / draws)
    assert abs(with_top / draws - expected) < 4 * deviation


@pytest.mark.parametrize("seed", range(8))
def test_draws_with_dry_and_xtc_follow_the_published_rules(seed: int) -> None:
    """Random texts and settings: 8,000 draws against the probabilities that both rules give."""
    random = np.random.default_rng(seed)
    vocabulary = 6
    row = random.normal(0, 0.6, vocabulary).astype(np.float32)
    text = [*random.integers(0, 4, 40).tolist(), *[3, 0, 1, 2] * 2]
    params = replace(
        PLAIN,
        dry_multiplier=float(random.choice([0.4, 0.8])),
        dry_base=float(random.choice([1.2, 1.75])),
        dry_allowed_length=int(random.integers(1, 3)),
        dry_penalty_last_n=int(random.choice([-1, 20])),
        dry_breakers=bytes([int(random.choice([0, 1]))]),
        xtc_probability=float(random.uniform(0.2, 0.8)),
        xtc_threshold=float(random.uniform(0.08, 0.14)),
        seed=seed,
    )
    expected = published_chances(row, text, params)
    penalized = published_chances(row, text, replace(params, xtc_probability=0.0))
    plain = softmax(dict(enumerate(row.tolist())))
    assert any(abs(penalized[t] - plain[t]) > 0.02 for t in plain), "DRY changes too little"
    assert any(abs(expected[t] - penalized[t]) > 0.02 for t in plain), "XTC changes too little"
    sampler = Sampler(vocabulary)
    draws = 8000
    counts = TokenCounts(text, 20)
    seen = Counter(sampler.draw(row, params, position, counts).token for position in range(draws))
    common = [t for t, share in expected.items() if share * draws >= 5]
    rare = draws - sum(seen[t] for t in common)
    assert rare <= 5 * vocabulary
    chi = sum((seen[t] - draws * expected[t]) ** 2 / (draws * expected[t]) for t in common)
    assert chi < 20.5, "p < 0.001 with five degrees of freedom"


def published_chances(row: Row, text: list[int], params: SamplingParams) -> dict[int, float]:
    """Chance of each token by p-e-w's rules: DRY on the logits, then XTC in its share of the draws."""
    z = row.astype(np.float64)
    for token, length in repeats(text, params).items():
        z[token] -= params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
    logits = dict(enumerate(z.tolist()))
    falling = sorted(logits, key=lambda t: -logits[t])
    p = softmax(logits)
    kept = softmax({t: logits[t] for t in excluded(falling, p, params.xtc_threshold)})
    share = params.xtc_probability
    return {t: (1 - share) * p[t] + share * kept.get(t, 0.0) for t in p}


def test_the_chance_of_a_draw_is_uniform_and_independent_of_the_noise() -> None:
    keys = [draw_key(1, 0, position) for position in range(20_000)]
    chances = np.array([chance(key) for key in keys])
    assert np.all((chances > 0) & (chances < 1))
    counts, _ = np.histogram(chances, 20, (0, 1))
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 43.8, "p < 0.001"
    for token in (0, 1, 7):
        noise = [float(gumbel(key, np.array([token]))[0]) for key in keys]
        assert abs(np.corrcoef(chances, noise)[0, 1]) < 0.03


def test_dry_time_is_bounded_for_a_text_of_one_token() -> None:
    tokens = np.full(5000, 7, np.int64)
    params = replace(PLAIN, dry_multiplier=1.0, dry_base=1.0)
    ids, penalties = repetition_penalties(tokens, params, 10)
    assert (ids.tolist(), penalties.tolist()) == ([7], [1.0])
    largest = repetition_penalties(tokens, replace(params, dry_base=1.75), 10)[1]
    assert 1e37 < float(largest[0]) < math.inf


def test_breakers_are_the_tokens_that_contain_a_text_or_end_it() -> None:
    pieces = [b"a", b"\n", b" b\n", b'"', b"x:", b"y"]
    bits = breaker_bits(["\n", ":", "ay"], pieces, [1, 4, 5])
    assert [bits[0] >> t & 1 for t in range(6)] == [0, 1, 1, 0, 1, 1]


@pytest.mark.parametrize("varied", ["seed", "choice", "position"])
def test_each_part_of_the_key_gives_independent_draws(varied: str) -> None:
    row, sampler = np.zeros(16, np.float32), Sampler(16)

    def token(n: int) -> int:
        key = {"seed": 0, "choice": 0, "position": 0, varied: n}
        params = replace(PLAIN, seed=key["seed"], choice=key["choice"])
        return sampler.draw(row, params, key["position"]).token

    drawn = [token(n) for n in range(2048)]
    assert drawn == [token(n) for n in range(2048)], "the same key, the same token"
    pairs = Counter((a // 4, b // 4) for a, b in pairwise(drawn))
    singles = Counter(drawn)
    assert sum((singles[t] - 128) ** 2 / 128 for t in range(16)) < 37.7
    assert (
        sum((pairs[a, b] - 2047 / 16) ** 2 / (2047 / 16) for a in range(4) for b in range(4)) < 37.7
    )


@given(
    key=st.integers(0, MASK), tokens=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20)
)
def test_noise_follows_its_definition_in_any_order(key: int, tokens: list[int]) -> None:
    def exact(token: int) -> float:
        x = (key + (token + 1) * G) & MASK
        x = ((x ^ x >> 30) * M1) & MASK
        x = ((x ^ x >> 27) * M2) & MASK
        v = min((float(np.float32(x >> 32)) + 0.5) * 2.0**-32, 1 - 2.0**-24)
        return -math.log(-math.log1p(-v))

    noise = gumbel(key, np.array(tokens, np.int64))
    assert noise.dtype == np.float32
    assert np.all((noise > LOWEST) & (noise < HIGHEST))
    assert noise.tolist() == pytest.approx([exact(t) for t in tokens], rel=2e-6, abs=2e-6)
    assert noise.tolist() == gumbel(key, np.array(tokens[::-1], np.int64))[::-1].tolist()


def test_noise_is_finite_at_both_ends_of_its_range() -> None:
    assert -math.log(-math.log1p(-(0.5 * 2.0**-32))) < HIGHEST
    assert -math.log(-math.log1p(-(1 - 2.0**-24))) > LOWEST
    many = gumbel(draw_key(1, 2, 3), np.arange(100_000))
    assert np.all(np.isfinite(many))
    assert float(many.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(many.std()) == pytest.approx(math.pi / math.sqrt(6), abs=0.02)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_never_drawn(temperature: float) -> None:
    params = replace(PLAIN, temperature=temperature, top_logprobs=2)
    nan, inf = math.nan, math.inf
    sampler = Sampler(3)

    def draw(*row: float) -> Draw:
        return sampler.draw(np.array(row, np.float32), params, 0)

    assert draw(nan, 1, -inf) == Draw(1, 0.0, ((1, 0.0), (0, -inf)))
    assert draw(nan, 1, inf).token == 2
    assert draw(nan, nan, -inf) == Draw(NOTHING, -inf)
    assert sampler.draw(np.ones(3, np.float32), params, 0, mask=b"").token == NOTHING


def test_infinite_bias_forbids_and_forces() -> None:
    sampler, row = Sampler(4), np.array([9, 1, 2, 3], np.float32)
    forced = replace(PLAIN, logit_bias=((1, math.inf),))
    banned = replace(PLAIN, logit_bias=((0, -math.inf), (2, -math.inf), (3, -math.inf)))
    assert {sampler.draw(row, p, n).token for p in (forced, banned) for n in range(20)} == {1}


@given(row=st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=30), top=st.integers(0, 40))
def test_logprobs_are_of_the_raw_logits(row: list[float], top: int) -> None:
    logits = np.array(row, np.float32)
    params = replace(PLAIN, temperature=0.2, top_k=1, logit_bias=((0, 50.0),), top_logprobs=top)
    draw = Sampler(len(row)).draw(logits, params, 0)
    whole = math.log(sum(math.exp(v - max(row)) for v in row)) + max(row)
    falling = sorted(range(len(row)), key=lambda t: (-logits[t], t))[:top]
    assert draw.token == 0
    assert draw.logprob == pytest.approx(row[0] - whole, abs=1e-4)
    assert [t for t, _ in draw.top] == falling
    assert [v for _, v in draw.top] == pytest.approx([row[t] - whole for t in falling], abs=1e-4)


def test_logprobs_are_left_out_where_nobody_asks() -> None:
    assert Sampler(2).draw(np.zeros(2, np.float32), PLAIN, 0).logprob is None


def test_a_given_token_is_judged_without_a_draw() -> None:
    row = np.array([0, math.log(3), 0], np.float32)
    drawn = Sampler(3).logprobs(row, 0, 1)
    assert drawn.token == 0
    assert drawn.logprob == pytest.approx(math.log(0.2))
    assert [t for t, _ in drawn.top] == [1]
    assert drawn.top[0][1] == pytest.approx(math.log(0.6))


writes = st.lists(
    st.tuples(st.integers(0, 10**6), st.lists(st.integers(0, 5), max_size=6)), max_size=12
)


@given(first=st.lists(st.integers(0, 5), max_size=8), prompt=st.integers(0, 8), writes=writes)
def test_counts_follow_the_tokens_through_every_rewrite(
    first: list[int], prompt: int, writes: list[tuple[int, list[int]]]
) -> None:
    tally, tokens = TokenCounts(first, prompt), list(first)
    for where, new in writes:
        start = where % (len(tokens) + 1)
        tally.write(start, new)
        tokens[start:] = new
        assert len(tally) == len(tokens)
        assert tally.sequence.tolist() == tokens
        assert sorted(tally.ids.tolist()) == sorted(set(tokens))
        output = Counter(tokens[prompt:])
        assert tally.output.tolist() == [output[t] for t in tally.ids.tolist()]


def test_counts_grow_beyond_their_first_room_and_refuse_gaps() -> None:
    tally = TokenCounts(range(500), 400)
    assert tally.ids.tolist() == list(range(500))
    assert int(tally.output.sum()) == 100
    with pytest.raises(IndexError, match="502 cannot follow 500"):
        tally.write(502, [1])


@pytest.mark.parametrize("deviation", [0.1, 1.0, 8.0])
@pytest.mark.parametrize("pieces", [1, 7])
def test_the_winner_of_pieces_is_that_of_all_scores_with_all_noise(
    deviation: float, pieces: int
) -> None:
    random = np.random.default_rng(3)
    for key in range(40):
        scores = random.normal(0, deviation, 5000).astype(np.float32)
        tokens = np.arange(5000) * 3
        parts = zip(np.array_split(tokens, pieces), np.array_split(scores, pieces), strict=True)
        expected = tokens[(scores + gumbel(key, tokens)).argmax()]
        assert winner(key, parts) == expected


def test_a_wide_draw_without_filters_is_the_largest_of_logits_and_noise() -> None:
    row = np.random.default_rng(4).normal(0, 1, 30_000).astype(np.float32)
    row[::7] = -np.inf
    sampler = Sampler(len(row))
    params = SamplingParams(temperature=0.5, top_p=1.0, min_p=0.0)
    for position in range(20):
        noise = gumbel(draw_key(0, 0, position), np.arange(len(row)))
        scores = (row - row.max()) * np.float32(2) + noise
        assert sampler.draw(row, params, position).token == scores.argmax()
