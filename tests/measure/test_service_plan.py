"""Plan of a service: from measured points to copies and money."""

from pathlib import Path

import msgspec
import pytest

from localchat.config.prices import Prices
from localchat.config.settings_file import read_settings
from localchat.errors import UsageError
from localchat.measure.records import BenchRecord
from localchat.measure.service_plan import (
    ServiceDemand,
    ServicePlan,
    make_plan,
    p95_ms,
    parse_price,
)
from localchat.measure.statistics import LatencyTarget, Percentiles
from localchat.measure.sweep import Point
from tests.support.bench_samples import point, record


def slower(measured: Point, ttft_ms: float) -> Point:
    """The point with this p95 of the time to first token."""
    times = Percentiles(ttft_ms / 2, ttft_ms, ttft_ms, ttft_ms / 2, p95=ttft_ms)
    figures = msgspec.structs.replace(measured.figures, ttft_ms=times, kv_total_tokens=3000)
    return msgspec.structs.replace(measured, figures=figures)


SWEEP = record(slower(point(80, 1), 50), slower(point(150, 2), 200), slower(point(160, 4), 900))
"""0.4, 0.75 and 0.8 requests per second."""


def plan(
    measured: BenchRecord = SWEEP, prices: Prices | None = None, **fields: object
) -> ServicePlan:
    return make_plan(measured, None, ServiceDemand(**fields), prices or Prices())  # type: ignore[arg-type]


def test_copies_carry_the_demand_with_headroom() -> None:
    found = plan(requests_per_s=4.0)
    assert found.copies == 7  # 0.8 of 0.8 requests per second each
    assert found.share == pytest.approx(4.0 / 7 / 0.8)
    assert plan(requests_per_s=0.01).copies == 1
    assert plan().requests_per_s == pytest.approx(0.64)


def test_a_tighter_target_plans_with_a_smaller_load() -> None:
    found = plan(target=LatencyTarget(ttft_ms=300), requests_per_s=4.0)
    assert found.measured is not None
    assert (found.measured.load, found.copies) == ("2 clients", 7)
    tight = plan(target=LatencyTarget(ttft_ms=100), requests_per_s=4.0)
    assert tight.measured is not None
    assert (tight.measured.load, tight.copies) == ("1 client", 13)


def test_a_target_below_all_measured_loads_has_no_copies() -> None:
    found = plan(target=LatencyTarget(ttft_ms=1), requests_per_s=4.0)
    assert (found.copies, found.measured) == (0, None)


def test_records_without_p95_are_planned_by_p90() -> None:
    assert p95_ms(Percentiles(40, 60, 80, 45)) == 60


def test_conversations_are_those_that_the_kv_cache_holds() -> None:
    assert plan().conversations == 7  # 3,000 tokens, 400 each
    assert plan(record(point(80, 1))).conversations is None


def test_costs_are_those_of_a_thousand_answers() -> None:
    prices = Prices(machine_hour=3.6, hosted_in=1.0, hosted_out=2.0)
    found = plan(prices=prices, requests_per_s=0.5).price
    assert found.machine_money == pytest.approx(3.6 / (0.5 * 3600) * 1000)
    assert found.hosted_money == pytest.approx((200 * 1.0 + 200 * 2.0) / 1e6 * 1000)
    assert plan().price.machine_money is None


def test_prices_are_read_from_the_settings_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        "[prices]\nkwh = 0.3\nmachine_hour = 2\n"  # kwh is of an earlier version
    )
    assert read_settings(file).prices == Prices(machine_hour=2.0)
    for text, words in (
        ("kw = 1", "there is no 'kw'"),
        ("machine_hour = -1", "a number from 0 on"),
    ):
        file.write_text(f"[prices]\n{text}\n")
        with pytest.raises(UsageError, match=words):
            read_settings(file)


@pytest.mark.parametrize(
    "word", ["kwh=1", "hosted_in", *(f"hosted_in={value}" for value in ("x", "-1", "nan", "inf"))]
)
def test_a_wrong_price_is_refused(word: str) -> None:
    names = msgspec.structs.asdict(Prices())
    with pytest.raises(UsageError, match="is not a price"):
        parse_price(word, names)
    assert parse_price("hosted_in=0.5", names) == ("hosted_in", 0.5)
