import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from localchat.backend_api.sampling.gumbel import G, chance, draw_key, mix
from localchat.backend_api.sampling.reference import Sampler
from localchat.backend_api.sampling.token_counts import TokenCounts
from localchat.backend_api.step import SamplingParams
from localchat_cuda.kernels.sampling import candidates, sample
from localchat_cuda.kernels.sampling import state as sample_state
from localchat_cuda.kernels.sampling.rare import RareTensors
from localchat_cuda.kernels.sampling.rescore import decides
from tests.support.gumbel_noise import gumbel
from tests.support.tiny_engine_core import DEVICE

V = 3000


def settings_of(params: list[SamplingParams]) -> sample_state.SamplingTensors:
    found = sample_state.SamplingTensors.empty(len(params), 4, DEVICE)
    for i, p in enumerate(params):
        found.floats[i] = torch.tensor([column(p) for column in sample_state.FIELDS.values()])
        found.top_k[i] = p.top_k
        key = mix((mix(p.seed + G) ^ p.choice) + G)
        found.keys[i] = key - 2**64 if key >= 2**63 else key
        found.bias_counts[i] = len(p.logit_bias)
        for n, (token, value) in enumerate(p.logit_bias):
            found.bias_ids[i, n], found.bias_values[i, n] = token, value
    return found


def drawn(
    logits: np.ndarray,
    params: list[SamplingParams],
    positions: list[int],
    known: list[list[int]] | None = None,
    prompts: list[int] | None = None,
    masks: list[bytes | None] | None = None,
    rare: bool = False,
) -> tuple[list[int], list[float]]:
    """Draw once for each row of logits, slots in reverse order so that a mix-up shows."""
    p, vocabulary = logits.shape
    order = torch.arange(p - 1, -1, -1, dtype=torch.int32)
    held = settings_of(list(reversed(params)))
    extras: dict[str, object] = {}
    if known is not None and prompts is not None:
        table = torch.full((p, max(map(len, known)) + 3), 7, dtype=torch.int32)
        for i, row in enumerate(known):
            table[p - 1 - i, : len(row)] = torch.tensor(row, dtype=torch.int32)
        counts = torch.full((p, vocabulary), 99, dtype=torch.int32)
        prompt = torch.tensor(list(reversed(prompts)), dtype=torch.int32)
        extras["known"] = sample_state.PenaltyTokens(table, order, prompt, counts)
    if masks is not None:
        words = -(-vocabulary // 32)
        rows = [m for m in masks if m is not None]
        at = [rows.index(m) if m is not None else -1 for m in masks]
        extras["masking"] = sample_state.Masking(
            torch.tensor(
                np.stack([np.frombuffer(m.ljust(4 * words, b"\0"), np.int32) for m in rows])
            ),
            torch.tensor(at, dtype=torch.int32),
        )
    if rare:
        words = -(-vocabulary // 32)
        breakers = [one.dry_breakers.ljust(4 * words, b"\0") for one in reversed(params)]
        extras["rare"] = RareTensors(
            torch.tensor(np.stack([np.frombuffer(bits, np.int32) for bits in breakers])),
            torch.zeros(p, vocabulary, dtype=torch.int32),
            torch.empty(p, -(-vocabulary // sample_state.BLOCK), 3, dtype=torch.float64),
        )
    tokens = torch.full((p,), -7, dtype=torch.int32)
    logprobs, normalizers = torch.empty(p), torch.empty(p)
    sample.draw(
        torch.tensor(logits),
        sample_state.Draws(
            torch.arange(p, dtype=torch.int32), order, torch.tensor(positions, dtype=torch.int32)
        ),
        held,
        sample_state.Scratch.empty(p, vocabulary, DEVICE),
        tokens,
        logprobs,
        normalizers,
        **extras,  # type: ignore[arg-type]
    )
    return tokens.tolist(), logprobs.tolist()


def rows_of_logits(count: int, seed: int, sharp: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((count, V)) * sharp).astype(np.float32)


BASE = SamplingParams(temperature=0.9, top_p=1.0, min_p=0.0, top_logprobs=0)
FILTERS = [
    replace(BASE, temperature=0.0),
    BASE,
    replace(BASE, temperature=0.2, top_p=0.9),
    replace(BASE, top_p=0.95, min_p=0.05),
    replace(BASE, min_p=0.3),
    replace(BASE, top_k=1),
    replace(BASE, top_k=40, top_p=0.8),
    replace(BASE, top_k=40, typical_p=0.7, top_p=0.9, min_p=0.1),
    replace(BASE, typical_p=0.5),
    replace(BASE, top_p=0.01),
    replace(BASE, top_k=V + 5, top_p=0.5),
]


@pytest.mark.parametrize("sharp", [0.3, 3.0])
def test_draws_match_the_reference_sampler(sharp: float) -> None:
    logits = rows_of_logits(len(FILTERS), 5, sharp)
    params = [replace(p, seed=11 * i + 2**63, choice=i % 3) for i, p in enumerate(FILTERS)]
    positions = [7 * i + 1 for i in range(len(params))]
    tokens, logprobs = drawn(logits, params, positions)
    sampler = Sampler(V)
    for i, p in enumerate(params):
        wanted = sampler.draw(logits[i], p, positions[i])
        assert tokens[i] == wanted.token, (i, p)
        assert wanted.logprob is not None
        assert abs(logprobs[i] - wanted.logprob) < 1e-4


def test_biases_masks_and_penalties_apply_before_the_filters() -> None:
    rng = np.random.default_rng(3)
    logits = rows_of_logits(4, 9)
    best = [int(row.argmax()) for row in logits]
    known = [[best[i], *rng.integers(0, V, 50).tolist(), best[i], 3] for i in range(4)]
    prompts = [1, 20, 53, 0]
    params = [
        replace(BASE, temperature=0.0, repetition_penalty=1.5),
        replace(BASE, frequency_penalty=1.5, presence_penalty=0.5, top_p=0.9, seed=4),
        replace(BASE, logit_bias=((17, 9.0), (V + 3, 5.0), (best[2], -100.0)), top_k=5, seed=5),
        replace(BASE, repetition_penalty=1.2, logit_bias=((best[3], -math.inf),), seed=6),
    ]
    allowed = np.packbits(rng.random(V - 100) < 0.3, bitorder="little").tobytes()
    masks = [None, allowed, None, allowed]
    positions = [len(k) for k in known]
    tokens, _ = drawn(logits, params, positions, known, prompts, masks)
    sampler = Sampler(V)
    for i, p in enumerate(params):
        tally = TokenCounts(known[i], prompts[i])
        assert tokens[i] == sampler.draw(logits[i], p, positions[i], tally, masks[i]).token, i


def random_params(rng: np.random.Generator, seed: int, vocabulary: int) -> SamplingParams:
    """Choose every number of the sampling at random, each often off."""

    def pick(*values: float) -> float:
        return float(rng.choice(values))

    breakers = np.packbits(rng.random(vocabulary) < 0.1, bitorder="little").tobytes()
    return SamplingParams(
        temperature=pick(0.0, 0.3, 0.8, 1.5),
        top_k=int(pick(0, 0, 3, 40)),
        top_p=pick(1.0, 0.95, 0.5),
        min_p=pick(0.0, 0.05, 0.3),
        typical_p=pick(1.0, 1.0, 0.8),
        repetition_penalty=pick(1.0, 1.2),
        frequency_penalty=pick(0.0, 0.4),
        dry_multiplier=pick(0.0, 0.8, 3.0),
        dry_base=pick(1.0, 1.75, 4.0),
        dry_allowed_length=int(pick(0, 1, 2, 5)),
        dry_penalty_last_n=int(pick(-1, 0, 7, 30)),
        top_n_sigma=pick(0.0, 0.7, 1.5, 3.0),
        xtc_probability=pick(0.0, 0.5, 1.0),
        xtc_threshold=pick(0.05, 0.1, 0.3, 0.6),
        dynatemp_range=pick(0.0, 0.5, 2.0),
        dynatemp_exponent=pick(1.0, 0.5, 2.0),
        dry_breakers=breakers if rng.random() < 0.7 else b"",
        seed=seed,
        top_logprobs=0,
    )


def rare_draws(rng: np.random.Generator, count: int, vocabulary: int) -> list[tuple[int, int]]:
    """Draw with random parameters, and return the tokens of the kernels and of the reference."""
    spread = rng.choice([0.3, 1.0, 3.0], (count, 1))
    logits = (rng.standard_normal((count, vocabulary)) * spread).astype(np.float32)
    params = [random_params(rng, int(rng.integers(1 << 62)), vocabulary) for _ in range(count)]
    # Few different tokens, so that sequences repeat; and a picture's, which is no token.
    known = [
        [*rng.integers(0, 4, int(rng.integers(1, 60))).tolist(), -5, *([1, 2, 3] * 3)][:-1]
        for _ in range(count)
    ]
    prompts = [int(rng.integers(0, len(tokens))) for tokens in known]
    logits[:, :4] += 3
    positions = [len(tokens) for tokens in known]
    tokens, _ = drawn(logits, params, positions, known, prompts, rare=True)
    sampler = Sampler(vocabulary)
    wanted = [
        sampler.draw(logits[i], params[i], positions[i], TokenCounts(known[i], prompts[i])).token
        for i in range(count)
    ]
    return list(zip(tokens, wanted, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_rare_samplers_with_random_parameters_draw_as_the_reference(seed: int) -> None:
    pairs = rare_draws(np.random.default_rng(seed), 32, 2100)
    assert [got for got, _ in pairs] == [wanted for _, wanted in pairs]


def test_rare_kernels_leave_other_draws_of_the_step_unchanged() -> None:
    logits = rows_of_logits(len(FILTERS) + 1, 8)
    params = [*(replace(p, seed=i) for i, p in enumerate(FILTERS)), replace(BASE, top_n_sigma=1.0)]
    positions = list(range(len(params)))
    alone, _ = drawn(logits[:-1], params[:-1], positions[:-1])
    together, _ = drawn(logits, params, positions, rare=True)
    assert together[:-1] == alone


def test_rare_samplers_do_not_combine_with_approximate_logits() -> None:
    assert not decides(replace(BASE, top_k=4, top_logprobs=-1, dry_multiplier=0.8))
    assert decides(replace(BASE, top_k=4, top_logprobs=-1))


def test_ties_draw_the_lower_id() -> None:
    logits = np.zeros((3, V), np.float32)
    logits[:, 2000:] = 1.0
    params = [
        replace(BASE, temperature=0.0),
        replace(BASE, top_k=3, seed=1),
        replace(BASE, top_p=1e-4, seed=2),
    ]
    tokens, _ = drawn(logits, params, [5, 6, 7])
    sampler = Sampler(V)
    assert tokens == [
        sampler.draw(row, p, 5 + i).token
        for i, (row, p) in enumerate(zip(logits, params, strict=True))
    ]
    assert tokens[0] == 2000
    assert 2000 <= tokens[1] < 2003
    assert tokens[2] == 2000


def test_rows_with_nan_draw_nothing_or_a_finite_token() -> None:
    logits = rows_of_logits(3, 1)
    logits[0] = -np.inf
    logits[1, ::2] = np.nan
    logits[2, 77] = np.inf
    params = [BASE, replace(BASE, top_p=0.9, seed=3), replace(BASE, temperature=0.0)]
    tokens, _ = drawn(logits, params, [1, 2, 3])
    assert tokens[0] == sample_state.NOTHING
    assert tokens[1] == Sampler(V).draw(logits[1], params[1], 2).token
    assert tokens[2] == 77


def test_draws_differ_by_position_and_choice_and_repeat_by_seed() -> None:
    logits = np.repeat(rows_of_logits(1, 2, 0.5), 4, 0)
    params = [
        replace(BASE, seed=1),
        replace(BASE, seed=1, choice=1),
        replace(BASE, seed=1),
        replace(BASE, seed=1),
    ]
    tokens, _ = drawn(logits, params, [5, 5, 6, 5])
    assert tokens[0] == tokens[3]
    assert len(set(tokens)) == 3


def test_wrong_arguments_raise_with_their_name() -> None:
    held = settings_of([BASE])
    one = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"scratch\.z"):
        sample.draw(
            torch.zeros(1, V),
            sample_state.Draws(one, one, one),
            held,
            sample_state.Scratch.empty(2, V, DEVICE),
            one,
            torch.empty(1),
            torch.empty(1),
        )


@triton.jit
def _chance_kernel(key, position, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    tl.store(out, candidates.chance(candidates.noise(tl.load(key), tl.load(position))))


def test_chances_match_the_reference() -> None:
    for seed in range(50):
        key = mix((mix(seed + G) ^ 0) + G)
        out = torch.empty(1)
        signed = torch.tensor([key - 2**64 if key >= 2**63 else key])
        _chance_kernel[(1,)](signed, torch.tensor([9], dtype=torch.int32), out)
        assert out.item() == chance(draw_key(seed, 0, 9))


@triton.jit  # type: ignore[untyped-decorator]
def _noise_kernel(key, position, out, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    seed = candidates.noise(tl.load(key), tl.load(position))
    i = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(out + i, candidates.gumbel(seed, i))


def test_noise_matches_the_reference_for_small_and_large_values() -> None:
    key = mix((mix(12345 + G) ^ 2) + G)
    held = torch.tensor([key - 2**64 if key >= 2**63 else key])
    out = torch.empty(1 << 16)
    _noise_kernel[(16,)](held, torch.tensor([77], dtype=torch.int32), out, COUNT=1 << 12)
    wanted = torch.tensor(gumbel(draw_key(12345, 2, 77), np.arange(1 << 16)))
    assert torch.allclose(out, wanted, rtol=1e-5, atol=1e-5)
    assert float(wanted.max()) > 9.0
    assert float(wanted.min()) < -2.0
