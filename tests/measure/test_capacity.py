"""Capacity and plans: costs from points, queues against known results, copies, memory and money."""

from pathlib import Path

import msgspec
import pytest

from localchat.backend_api.interface import Capabilities
from localchat.config.prices import Prices
from localchat.config.settings_file import read_settings
from localchat.core.scheduler.scheduler import PromptShares
from localchat.errors import UsageError
from localchat.measure.capacity import (
    MIN_CHUNK,
    RequestLengths,
    ServerCosts,
    capacity,
    cost_model,
    highest_rate,
    simulate,
    turn_s,
)
from localchat.measure.service_plan import (
    DEFAULT_SLOTS,
    CostSource,
    ServiceDemand,
    make_plan,
    measured_source,
    parse_price,
)
from localchat.measure.statistics import LatencyTarget, Percentiles, PointFigures
from localchat.measure.sweep import Point, PointKey
from tests.support.bench_samples import record

LENGTHS = RequestLengths(200, 100)
TRUE = ServerCosts(
    prefill_s=0.001, steps_s=((1, 0.01), (2, 0.012), (4, 0.016), (8, 0.032)), slots=8, budget_s=0.1
)


def points(costs: ServerCosts, lengths: RequestLengths = LENGTHS) -> list[Point]:
    """What a closed loop of clients would measure of a server with these costs."""
    return [measured(costs, lengths, clients) for clients, _ in costs.steps_s]


def measured(costs: ServerCosts, lengths: RequestLengths, clients: int) -> Point:
    whole_s = turn_s(costs, lengths, clients) + costs.overhead_s
    step_ms = costs.step_s(clients) * 1e3
    ttft_ms = (costs.overhead_s + lengths.prompt * costs.prefill_s + costs.step_s(1)) * 1e3
    others_ms = (clients - 1) * lengths.prompt * costs.prefill_s / lengths.output * 1e3
    tpot_ms = step_ms + others_ms
    found = PointFigures(
        requests=clients,
        duration_s=whole_s,
        tokens_per_s=clients * lengths.output / whole_s,
        total_tokens_per_s=0.0,
        requests_per_s=clients / whole_s,
        prompt_tokens=lengths.prompt,
        completion_tokens=lengths.output,
        ttft_ms=Percentiles(ttft_ms, ttft_ms, ttft_ms, ttft_ms),
        tpot_ms=Percentiles(tpot_ms, tpot_ms, tpot_ms, tpot_ms),
        step_ms=step_ms,
        kv_total_tokens=3000,
        drafted=100,
        accepted=50,
    )
    return Point(PointKey("m", "chat", 0, clients), 0, found)


def test_a_chunk_is_that_of_the_scheduler() -> None:
    can = Capabilities(context_tokens=64, kv_tokens=64, max_slots=1, max_rows=1, max_step_tokens=64)
    assert PromptShares(can).min_tokens == MIN_CHUNK


@pytest.mark.parametrize("tokens_per_s", [0.5, 5, 50])
def test_a_slow_server_keeps_up_below_its_capacity(tokens_per_s: float) -> None:
    """A step that takes longer than its budget reads prompts, too."""
    step_s = 1 / tokens_per_s
    costs = ServerCosts(
        prefill_s=step_s / 4,
        steps_s=tuple((count, step_s * (1 + 0.5 * (count - 1))) for count in range(1, 8)),
        slots=7,
        budget_s=0.25,
    )
    found = simulate(costs, LENGTHS, 0.8 * capacity(costs, LENGTHS).requests_per_s, requests=500)
    assert found is not None
    assert found.running < 2 * costs.slots


def test_the_costs_of_a_server_are_found_again() -> None:
    found = cost_model(points(TRUE), slots=8, budget_s=0.1)
    assert found.prefill_s == pytest.approx(TRUE.prefill_s, rel=0.01)
    assert [clients for clients, _ in found.steps_s] == [1, 2, 4, 8]
    assert [step for _, step in found.steps_s] == pytest.approx(
        [step for _, step in TRUE.steps_s], rel=0.01
    )


def test_time_that_delays_nobody_is_overhead() -> None:
    delayed = msgspec.structs.replace(TRUE, overhead_s=0.3)
    found = cost_model(points(delayed), slots=8, budget_s=0.1)
    assert found.prefill_s == pytest.approx(TRUE.prefill_s, rel=0.01)
    assert found.overhead_s == pytest.approx(0.3, rel=0.02)


def test_without_pauses_the_time_per_token_is_the_step() -> None:
    line = [
        msgspec.structs.replace(one, figures=msgspec.structs.replace(one.figures, step_ms=None))
        for one in points(TRUE)[:1]
    ]
    found = cost_model(line, slots=8, budget_s=0.1)
    ((clients, step_s),) = found.steps_s
    assert clients == 1
    assert step_s == pytest.approx(0.01)
    assert found.prefill_s == pytest.approx(0.001)
    assert found.overhead_s == pytest.approx(0, abs=1e-9)


def test_requests_beyond_the_last_point_share_its_throughput() -> None:
    assert TRUE.step_s(3) == pytest.approx(0.014)
    assert TRUE.step_s(16) == pytest.approx(0.064)
    assert TRUE.step_s(0) == TRUE.step_s(1)


def test_the_capacity_is_that_of_full_slots() -> None:
    found = capacity(TRUE, LENGTHS)
    assert found.requests_per_s == pytest.approx(8 / (8 * 0.2 + 3.2))
    assert found.running <= 8


def test_a_server_of_one_slot_is_the_queue_of_the_textbook() -> None:
    """M/D/1: requests wait on average load / (2 (1 - load)) services."""
    costs = ServerCosts(prefill_s=1e-9, steps_s=((1, 0.01),), slots=1, budget_s=0.1)
    service_s = 1.01  # a hundred and one steps
    found = simulate(costs, RequestLengths(1, 101), 0.6 / service_s, requests=20_000)
    assert found is not None
    assert found.load == pytest.approx(0.6, rel=0.02)
    assert found.ttft_ms.mean / 1e3 == pytest.approx(0.6 / (2 * 0.4) * service_s + 0.01, rel=0.06)
    assert found.tpot_ms.p50 == pytest.approx(10, rel=0.01)


def test_an_idle_server_answers_as_a_single_request() -> None:
    found = simulate(TRUE, LENGTHS, 0.001, requests=200)
    assert found is not None
    assert found.ttft_ms.p50 == pytest.approx(210, rel=0.01)  # its prompt, and a step
    assert found.tpot_ms.p50 == pytest.approx(10, rel=0.02)


def test_requests_pass_the_overhead_one_after_the_other() -> None:
    costs = msgspec.structs.replace(TRUE, overhead_s=0.5)
    assert capacity(costs, LENGTHS).requests_per_s == pytest.approx(8 / (8 * 0.2 + 3.2))
    slow = msgspec.structs.replace(TRUE, overhead_s=2.0)
    assert capacity(slow, LENGTHS).requests_per_s == pytest.approx(0.5)
    found = simulate(slow, LENGTHS, 0.3, requests=20_000)
    assert found is not None
    # M/D/1: load 0.6 waits 0.75 services, then its own, a prefill and hardly anything else.
    assert found.ttft_ms.mean / 1e3 == pytest.approx(1.5 + 2.0 + 0.21, rel=0.08)


def test_more_requests_than_the_capacity_have_no_queue() -> None:
    most = capacity(TRUE, LENGTHS).requests_per_s
    assert simulate(TRUE, LENGTHS, most * 1.1) is None
    slow, quick = (simulate(TRUE, LENGTHS, most * share) for share in (0.8, 0.3))
    assert slow is not None and quick is not None
    assert slow.ttft_p95_ms > quick.ttft_p95_ms
    assert slow.tpot_p95_ms > quick.tpot_p95_ms


def test_the_highest_rate_just_meets_the_target() -> None:
    target = LatencyTarget(tpot_ms=25.0)
    rate = highest_rate(TRUE, LENGTHS, target, 0.95)
    met, missed = (simulate(TRUE, LENGTHS, rate * share) for share in (0.98, 1.1))
    assert met is not None and met.meets(target)
    assert missed is None or not missed.meets(target)
    assert highest_rate(TRUE, LENGTHS, LatencyTarget(ttft_ms=1.0), 0.95) == 0.0


def source() -> CostSource:
    return measured_source(record(*points(TRUE)))


def test_the_slots_are_those_that_the_server_told() -> None:
    measured = record(*points(TRUE))
    [served] = measured.served
    told = msgspec.structs.replace(served, properties={"total_slots": 32})
    assert measured_source(measured).costs.slots == DEFAULT_SLOTS
    assert measured_source(msgspec.structs.replace(measured, served=(told,))).costs.slots == 32


def demand(**fields: object) -> ServiceDemand:
    return ServiceDemand(**{"prompt_tokens": 200, "output_tokens": 100, **fields})  # type: ignore[arg-type]


def test_copies_carry_what_is_asked_with_headroom() -> None:
    one = capacity(source().costs, LENGTHS).requests_per_s
    found = make_plan(source(), demand(requests_per_s=one * 5), Prices())
    assert "benchmark" in found.basis
    assert found.copies == 7
    assert found.headroom is not None and found.headroom > 0.2
    assert make_plan(source(), demand(requests_per_s=one / 10), Prices()).copies == 1


def test_a_tighter_target_needs_more_copies() -> None:
    one = capacity(source().costs, LENGTHS).requests_per_s
    loose, tight = (
        make_plan(source(), demand(requests_per_s=one * 5, target=target), Prices())
        for target in (LatencyTarget(), LatencyTarget(tpot_ms=20))
    )
    assert tight.copies > loose.copies
    assert tight.queue is not None and tight.queue.tpot_p95_ms <= 20
    none = make_plan(source(), demand(target=LatencyTarget(ttft_ms=1)), Prices())
    assert (none.copies, none.queue) == (0, None)


def test_however_many_copies_are_needed_they_are_all_counted() -> None:
    one = capacity(source().costs, LENGTHS).requests_per_s
    found = make_plan(source(), demand(requests_per_s=one * 1_000_000), Prices())
    assert found.copies > 1_000_000
    assert found.queue is not None and found.queue.load <= 0.81


def test_the_kv_cache_bounds_what_runs_at_once() -> None:
    found = make_plan(source(), demand(), Prices())
    assert (found.conversations, found.costs.slots) == (10, 10)
    short = make_plan(source(), demand(prompt_tokens=20, output_tokens=20), Prices())
    assert (short.conversations, short.costs.slots) == (75, 16)
    longer = make_plan(source(), demand(prompt_tokens=900), Prices())
    assert (longer.conversations, longer.costs.slots) == (3, 3)
    with pytest.raises(UsageError, match="a request of 3,100 tokens is longer than the KV cache"):
        make_plan(source(), demand(prompt_tokens=3000), Prices())


def test_money_is_that_of_a_thousand_answers() -> None:
    prices = Prices(machine_hour=3.6, hosted_in=1.0, hosted_out=2.0)
    found = make_plan(source(), demand(requests_per_s=0.5), prices).price
    assert found.machine_money == pytest.approx(3.6 / (0.5 * 3600) * 1000)
    assert found.hosted_money == pytest.approx((200 * 1.0 + 100 * 2.0) / 1e6 * 1000)


def test_a_cost_without_a_price_is_left_out() -> None:
    found = make_plan(source(), demand(), Prices()).price
    assert (found.machine_money, found.hosted_money) == (None, None)


def test_prices_stand_in_the_settings_file(tmp_path: Path) -> None:
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
    with pytest.raises(UsageError, match="is not a price"):
        parse_price(word, msgspec.structs.asdict(Prices()))
    names = msgspec.structs.asdict(Prices())
    assert parse_price("hosted_in=0.5", names) == ("hosted_in", 0.5)
