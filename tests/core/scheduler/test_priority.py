"""Order of admission, and the share that a long prompt leaves to others."""

from typing import Any

import pytest

from localchat.backend_api.interface import Widths
from tests.support.engine_core_bench import Bench, capabilities, check_received, copying, request
from tests.support.scripted_backend import hashed

AHEAD: dict[str, Any] = {"block_tokens": 4, "depth": 2}
URGENT = 1


def first_step(bench: Bench, id_: int) -> int:
    """The number of the first step that computed for a request."""
    number = bench.requests[id_].sequences[0].number
    return next(
        plan.number for plan in bench.runner.steps if any(row.seq == number for row in plan.rows)
    )


def widths(bench: Bench, id_: int) -> list[int]:
    """Tokens that each step computed for a request."""
    number = bench.requests[id_].sequences[0].number
    return [row.width for plan in bench.runner.steps for row in plan.rows if row.seq == number]


@pytest.mark.parametrize("kind", [{}, AHEAD])
def test_urgent_request_overtakes_the_queue(kind: dict[str, Any]) -> None:
    bench = Bench(capabilities(max_rows=1, max_slots=2, **kind), hashed)
    running = bench.ask(request("r" * 20, max_tokens=5, salt="r", priority=URGENT))
    chats = [bench.ask(request(letter * 20, salt=letter)) for letter in "ab"]
    fill = bench.ask(request("f" * 20, salt="f", priority=URGENT))
    bench.run_until_idle()
    assert first_step(bench, running) < first_step(bench, fill) < first_step(bench, chats[0])
    for id_ in (running, *chats, fill):
        check_received(bench, id_, hashed)


@pytest.mark.parametrize("kind", [{}, AHEAD])
def test_urgent_request_preempts_another_whose_text_stays_the_same(
    kind: dict[str, Any],
) -> None:
    bench = Bench(capabilities(max_rows=2, max_slots=3, **kind), hashed)
    chats = [
        bench.ask(request(letter * 20, max_tokens=60, salt=letter, ignore_eos=True))
        for letter in "ab"
    ]
    bench.step(8)
    fill = bench.ask(request("f" * 10, max_tokens=4, salt="f", priority=URGENT, ignore_eos=True))
    bench.step(12)
    assert bench.received[fill].events[-1] == bench.received[fill].done
    assert bench.core.stats().preemptions == 1
    bench.run_until_idle()
    for id_ in (*chats, fill):
        check_received(bench, id_, hashed)


def test_equal_priority_preempts_nobody() -> None:
    bench = Bench(capabilities(max_rows=2, max_slots=3), hashed)
    for letter in "abcd":
        bench.ask(request(letter * 20, max_tokens=30, salt=letter, priority=URGENT))
    bench.run_until_idle()
    assert bench.core.stats().preemptions == 0


@pytest.mark.parametrize("logits", [hashed, copying])
def test_long_prompt_leaves_a_part_of_each_step_to_who_comes_after(logits: Any) -> None:
    bench = Bench(
        capabilities(max_step_tokens=64, kv_tokens=4096, context_tokens=2048, max_rows=4), logits
    )
    long = bench.ask(request("l" * 1500, max_tokens=2, salt="l"))
    bench.step(3)
    short = bench.ask(request("s" * 40, max_tokens=2, salt="s"))
    bench.step(5)
    assert bench.received[short].done.usage.completion_tokens == 2
    assert len(widths(bench, long)) > 5
    bench.run_until_idle()
    # Alone it has the whole step, and beside another half of it.
    assert max(widths(bench, long)) == 64
    assert min(widths(bench, long)[:8]) == 32
    for id_ in (long, short):
        check_received(bench, id_, logits)


def test_urgent_prompt_is_computed_before_a_long_one_continues() -> None:
    bench = Bench(
        capabilities(max_step_tokens=64, kv_tokens=4096, context_tokens=2048, max_rows=4), hashed
    )
    long = bench.ask(request("l" * 1500, max_tokens=2, salt="l"))
    bench.step(3)
    before = len(widths(bench, long))
    fill = bench.ask(request("f" * 120, max_tokens=2, salt="f", priority=URGENT))
    bench.step(2)
    assert widths(bench, fill)[0] == 64
    assert len(widths(bench, long)) <= before + 1
    bench.run_until_idle()
    for id_ in (long, fill):
        check_received(bench, id_, hashed)


def test_many_long_prompts_share_the_steps_evenly() -> None:
    bench = Bench(
        capabilities(max_step_tokens=128, kv_tokens=8192, context_tokens=2048, max_rows=4), hashed
    )
    ids = [bench.ask(request(letter * 900, max_tokens=2, salt=letter)) for letter in "abcd"]
    bench.step(12)
    done = [sum(widths(bench, id_)) for id_ in ids]
    assert min(done) * 2 >= max(done)
    bench.run_until_idle()
    for id_ in ids:
        check_received(bench, id_, hashed)


def test_with_all_rows_taken_equals_are_served_in_order_of_arrival() -> None:
    bench = Bench(capabilities(max_rows=4, max_slots=5, kv_tokens=4096), hashed)
    ids = [
        bench.ask(request(f"{number:03}" * 5, max_tokens=16, salt=str(number), ignore_eos=True))
        for number in range(24)
    ]
    bench.run_until_idle()
    order = sorted(ids, key=lambda id_: first_step(bench, id_))
    assert order == ids


def test_a_step_wider_than_all_widths_of_the_runner_takes_all_that_the_budget_allows() -> None:
    """The runner pads no such step: cut at its widest, a long prompt would take two."""
    bench = Bench(
        capabilities(
            max_step_tokens=1000, kv_tokens=4096, context_tokens=2048, step_target_s=1e9,
            widths=Widths((16, 32, 48), (0, 4), (16, 32, 48)),
        ),
        hashed,
    )  # fmt: skip
    first = bench.ask(request("f" * 40, max_tokens=2, salt="f"))
    bench.run_until_idle()
    long = bench.ask(request("l" * 900, max_tokens=2, salt="l"))
    bench.run_until_idle()
    number = bench.requests[long].sequences[0].number
    rows = [row for plan in bench.runner.steps for row in plan.rows if row.seq == number]
    assert rows[0].width >= 900
    for id_ in (first, long):
        check_received(bench, id_, hashed)


def test_steps_with_prompts_come_out_at_the_widths_of_the_runner() -> None:
    """One that pads 60 rows to 64 computes four for nothing, and another shape for every count."""
    received = Widths((16, 32, 48), (0, 4), (16, 32, 48))
    bench = Bench(
        capabilities(
            max_step_tokens=50, kv_tokens=4096, context_tokens=2048, max_rows=6, widths=received
        ),
        hashed,
    )
    writers = [bench.ask(request(letter, max_tokens=60, salt=letter)) for letter in "ab"]
    bench.step(6)
    long = bench.ask(request("l" * 900, max_tokens=2, salt="l"))
    bench.step(10)
    sizes = {
        4 + row.width if len(plan.rows) > 1 else row.width
        for plan in bench.runner.steps
        for row in plan.rows
        if row.seq == bench.requests[long].sequences[0].number
    }
    assert sizes == {48}
    bench.run_until_idle()
    for id_ in (*writers, long):
        check_received(bench, id_, hashed)
