"""Figures of a point: the formulas of other load generators on the same recorded timestamps."""

import random
import statistics
from typing import Any

import numpy as np
import pytest

from localchat.measure.client import RequestSample
from localchat.measure.statistics import (
    LatencyTarget,
    LoadResult,
    difference,
    figures,
    percentiles,
)
from tests.support.bench_samples import sample


def recorded(count: int = 64) -> list[RequestSample]:
    draw = random.Random(5)
    return [
        sample(
            draw.uniform(0, 0.5),
            draw.uniform(0.05, 0.9),
            [draw.uniform(0.005, 0.06) for _ in range(draw.randrange(20, 200))],
        )
        for _ in range(count)
    ]


def burst_figures(samples: list[RequestSample], duration_s: float) -> dict[str, float]:
    """As a plain load generator computes them: nearest ranks, all tokens over all time."""
    ttft = sorted((one.arrivals_s[0] - one.began_s) * 1e3 for one in samples)
    gaps = sorted(
        b - a for one in samples for a, b in zip(one.arrivals_s, one.arrivals_s[1:], strict=False)
    )
    return {
        "tok_s": sum(one.completion_tokens for one in samples) / duration_s,
        "ttft_p50": ttft[len(ttft) // 2],
        "gap_p50": gaps[len(gaps) // 2] * 1e3,
        "gap_p99": gaps[int(len(gaps) * 0.99)] * 1e3,
    }


def vllm_figures(samples: list[RequestSample], duration_s: float) -> dict[str, Any]:
    """By the formulas of vLLM's serving benchmark."""
    ttfts = [one.arrivals_s[0] - one.began_s for one in samples]
    latencies = [one.arrivals_s[-1] - one.began_s for one in samples]
    tpots = [
        (latency - ttft) / (one.completion_tokens - 1)
        for one, latency, ttft in zip(samples, latencies, ttfts, strict=True)
    ]
    itls = [gap for one in samples for gap in np.diff(one.arrivals_s)]
    return {
        "output": sum(one.completion_tokens for one in samples) / duration_s,
        "total": sum(one.completion_tokens + one.prompt_tokens for one in samples) / duration_s,
        "ttft": [np.percentile(ttfts, q) * 1e3 for q in (50, 90, 99)],
        "tpot": [np.percentile(tpots, q) * 1e3 for q in (50, 90, 99)],
        "itl": [np.percentile(itls, q) * 1e3 for q in (50, 90, 99)],
        "e2el": [np.percentile(latencies, q) * 1e3 for q in (50, 90, 99)],
        "goodput": sum(
            ttft <= 0.5 and tpot <= 0.0325 for ttft, tpot in zip(ttfts, tpots, strict=True)
        )
        / duration_s,
    }


def test_a_point_agrees_with_a_plain_load_generator_on_recorded_timestamps() -> None:
    samples = recorded()
    duration_s = max(one.arrivals_s[-1] for one in samples)
    found = figures(LoadResult(samples, 0, duration_s), LatencyTarget())
    plain = burst_figures(samples, duration_s)
    assert found.gap_ms is not None
    assert found.tokens_per_s == pytest.approx(plain["tok_s"], rel=0.03)
    assert found.ttft_ms.p50 == pytest.approx(plain["ttft_p50"], rel=0.03)
    assert found.gap_ms.p50 == pytest.approx(plain["gap_p50"], rel=0.03)
    assert found.gap_ms.p99 == pytest.approx(plain["gap_p99"], rel=0.03)


def test_a_point_agrees_with_the_formulas_of_vllm() -> None:
    samples = recorded()
    target = LatencyTarget(ttft_ms=500, tpot_ms=32.5)
    found = figures(LoadResult(samples, 0, 9.5), target)
    expected = vllm_figures(samples, 9.5)
    assert found.tpot_ms is not None and found.gap_ms is not None and found.e2el_ms is not None
    assert found.tokens_per_s == pytest.approx(expected["output"])
    assert found.total_tokens_per_s == pytest.approx(expected["total"])
    for ours, theirs in (
        (found.ttft_ms, "ttft"),
        (found.tpot_ms, "tpot"),
        (found.gap_ms, "itl"),
        (found.e2el_ms, "e2el"),
    ):
        assert [ours.p50, ours.p90, ours.p99] == pytest.approx(expected[theirs])
    assert 0 < expected["goodput"] < len(samples) / 9.5
    assert found.good_requests_per_s == pytest.approx(expected["goodput"])


def test_several_tokens_of_one_arrival_count_in_the_time_per_token() -> None:
    one = sample(0.0, 1.0, [1.0], completion_tokens=5)
    found = figures(LoadResult([one], 0, 2.0), LatencyTarget())
    assert found.tpot_ms is not None and found.tpot_ms.p50 == pytest.approx(250)
    assert found.gap_ms is not None and found.gap_ms.p50 == pytest.approx(1000)
    assert found.tokens_per_s == pytest.approx(2.5)


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    found = figures(LoadResult([sample(0.0, 1.0, [])], 0, 1.0), LatencyTarget(tpot_ms=1.0))
    assert found.tpot_ms is None and found.gap_ms is None
    assert found.good_share == 1.0


def test_failed_requests_are_no_good_ones() -> None:
    found = figures(LoadResult([sample(0.0, 0.1, [0.1])], 3, 1.0), LatencyTarget(ttft_ms=500))
    assert (found.failed, found.good_share) == (3, 0.25)


def test_what_the_server_tells_is_summed_up() -> None:
    told = {"cached_tokens": 50, "drafted": 10, "accepted": 4, "kv_total_tokens": 1000}
    samples = [
        sample(0.0, 0.1, [0.1], kv_used_tokens=200, **told),
        sample(0.0, 0.1, [0.1], kv_used_tokens=300, **told),
    ]
    found = figures(LoadResult(samples, 0, 1.0), LatencyTarget())
    assert (found.prefix_hits, found.acceptance, found.kv_used_share) == (0.5, 0.4, 0.3)
    silent = figures(LoadResult([sample(0.0, 0.1, [0.1])], 0, 1.0), LatencyTarget())
    assert (silent.drafted, silent.acceptance, silent.kv_used_share) == (None, None, None)


def test_percentiles_interpolate_linearly() -> None:
    values = [0.001, 0.002, 0.004, 0.010]
    expected = [np.percentile(values, q) * 1e3 for q in (50, 90, 99)]
    found = percentiles(values)
    assert [found.p50, found.p90, found.p99] == pytest.approx(expected)
    assert found.mean == pytest.approx(statistics.fmean(values) * 1e3)
    assert percentiles([0.5]).p99 == 500


def test_a_steady_difference_is_more_than_noise_and_a_wavering_one_is_not() -> None:
    steady = difference([110, 121, 99.5], [100, 110, 90])
    assert steady.share == pytest.approx(0.1, abs=0.01)
    assert steady.beyond_noise
    wavering = difference([110, 90, 130], [100, 100, 100])
    assert not wavering.beyond_noise
    assert wavering.margin is not None and wavering.margin > 0.1


def test_slow_changes_of_the_machine_cancel_out_in_pairs() -> None:
    base = [100.0, 50.0, 25.0]
    found = difference([value * 1.05 for value in base], base)
    assert found.share == pytest.approx(0.05)
    assert found.beyond_noise


def test_one_round_shows_no_noise() -> None:
    found = difference([200], [100])
    assert found.margin is None and not found.beyond_noise
