"""A plan promises no more than the best measured point of the same shape."""

import pytest

from localchat.measure.capacity import RequestLengths, ServerCosts, capacity
from localchat.measure.service_plan import _capped
from localchat.measure.statistics import PointFigures, percentiles
from localchat.measure.sweep import Point, PointKey

COSTS = ServerCosts(
    prefill_s=0.001,
    steps_s=tuple((count, 0.01 * (1 + 0.2 * count)) for count in range(1, 5)),
    slots=4,
    budget_s=0.25,
)
LENGTHS = RequestLengths(200, 50)


def measured(requests_per_s: float) -> Point:
    figures = PointFigures(
        requests=30,
        duration_s=10,
        tokens_per_s=requests_per_s * 50,
        total_tokens_per_s=requests_per_s * 250,
        requests_per_s=requests_per_s,
        prompt_tokens=200,
        completion_tokens=50,
        ttft_ms=percentiles([0.1, 0.2]),
    )
    return Point(PointKey("m", "200+50", 0, 4), 0, figures)


@pytest.mark.parametrize("share", [0.5, 0.81, 0.99])
def test_a_promise_beyond_the_measurement_is_lowered_to_it(share: float) -> None:
    promised = capacity(COSTS, LENGTHS).requests_per_s
    line = [measured(promised * share), measured(promised * share / 2)]
    lowered = capacity(_capped(COSTS, line), LENGTHS).requests_per_s
    assert lowered <= promised * share * 1.001
    assert lowered == pytest.approx(promised * share, rel=0.02)


def test_a_promise_below_the_measurement_stays() -> None:
    promised = capacity(COSTS, LENGTHS).requests_per_s
    assert _capped(COSTS, [measured(promised * 1.2)]) == COSTS
