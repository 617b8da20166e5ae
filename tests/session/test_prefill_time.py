"""The time that the rest of a prompt takes."""

import pytest

from localchat.session.prefill_time import PrefillSample, seconds_left


def samples(base_s: float, growth_s: float, cached: int, upto: int) -> list[PrefillSample]:
    """Progress of a prompt whose token n costs `base_s + growth_s * n`."""
    return [
        PrefillSample(n, base_s * (n - cached) + growth_s * (n * n - cached * cached) / 2)
        for n in range(cached, upto + 1, 100)
    ]


@pytest.mark.parametrize("cached", [0, 1000])
@pytest.mark.parametrize("growth_s", [0.0, 1e-5, 1e-4])
def test_the_estimate_follows_the_growing_cost_of_attention(growth_s: float, cached: int) -> None:
    taken = samples(0.01, growth_s, cached, 6000)
    total_s = samples(0.01, growth_s, cached, 6000)[-1].elapsed_s
    for count in range(3, len(taken)):
        left = seconds_left(taken[:count], cached, 6000)
        assert left is not None
        last = taken[count - 1]
        exact_s = total_s - last.elapsed_s
        even_s = last.elapsed_s / (last.tokens - cached) * (6000 - last.tokens)
        if last.tokens - cached >= (6000 - cached) / 4:
            assert left == pytest.approx(exact_s, rel=0.01, abs=1e-6)
        else:
            assert even_s * 0.99 <= left <= exact_s * 1.01


def test_a_few_slow_steps_at_the_start_are_not_projected_onto_a_long_prompt() -> None:
    # As measured beside other programs: 3,522 tokens that took 70 s, of which 160 were cached.
    taken = [
        PrefillSample(192, 0.4),
        PrefillSample(224, 1.0),
        PrefillSample(256, 2.1),
        PrefillSample(320, 4.3),
        PrefillSample(416, 7.3),
    ]
    for count in range(1, len(taken) + 1):
        left = seconds_left(taken[:count], 160, 3522)
        assert left is not None and left < 150


def test_nothing_is_known_before_the_first_tokens() -> None:
    assert seconds_left([], 0, 100) is None
    assert seconds_left([PrefillSample(40, 1.0)], 40, 100) is None


def test_noise_never_makes_the_rest_free() -> None:
    taken = [PrefillSample(100, 10.0), PrefillSample(200, 11.0)]
    assert seconds_left(taken, 0, 400) == pytest.approx(11.0)
    taken = [PrefillSample(100, 0.1), PrefillSample(200, 11.0)]
    left = seconds_left(taken, 0, 400)
    assert left is not None and 11.0 < left < 40.0
