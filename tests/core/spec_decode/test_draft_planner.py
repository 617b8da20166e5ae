"""How long the drafts of a step are, from the chances of their tokens, the costs of steps and the budgets."""

from typing import Any

import pytest

from localchat.backend_api.interface import Capabilities
from localchat.core.spec_decode.draft_planner import DraftPlanner, _DraftStep
from localchat.core.spec_decode.step_cost import CostModel
from tests.support.draft_replay import planned_sequence

MOST = 15


def costs(**seconds: float) -> CostModel:
    """Costs by the number of rows: r8=1.0."""
    model = CostModel()
    for rows, each in seconds.items():
        model.observe(int(rows[1:]), each)
    return model


FLAT = costs(r1=1.0, r64=1.1)


def plain_step(rows: int, limit: int, budget: float = 0.0) -> _DraftStep:
    """A step in which each row is a sequence with so much of a budget."""
    sequences = [planned_sequence(number) for number in range(rows)]
    for sequence in sequences:
        sequence.draft_budget = budget
    return _DraftStep(sequences, [], rows, limit)


def lengths(
    chances: list[list[float]],
    rows: int,
    cost: CostModel,
    limit: int,
    *,
    budget: float = 0.0,
    **capabilities: Any,
) -> list[int]:
    """The length of each sequence's draft, of which the tokens have these chances."""
    planner = DraftPlanner(Capabilities(4096, 4096, 64, 64, 512, **capabilities), cost)
    numbered = {number: draft for number, draft in enumerate(chances) if draft}
    plan = planner._best_lengths(plain_step(rows, limit, budget), numbered)
    return [plan.lengths.get(number, 0) for number in range(len(chances))]


def could_pay(rows: int, cost: CostModel, limit: int) -> bool:
    planner = DraftPlanner(Capabilities(4096, 4096, 64, 64, 512), cost)
    return planner._could_pay(plain_step(rows, limit))


def test_the_likeliest_tokens_go_first_whosever_they_are() -> None:
    assert lengths([[0.9, 0.8, 0.1], [0.2, 0.1], [0.95, 0.9, 0.85]], 3, FLAT, 5) == [2, 0, 3]


def test_a_draft_is_as_long_as_the_step_gets_faster() -> None:
    dear = costs(r1=1.0, r2=1.3, r3=1.6, r4=1.9, r8=3.1)
    assert lengths([[0.9, 0.8, 0.3, 0.2]], 1, dear, 8) == [2]


def test_one_that_gains_much_slows_seven_others_only_as_far_as_their_budgets_allow() -> None:
    """The sum of all tokens would rise from 8 to 18 in 1.5 times the time."""
    wide = costs(r8=1.0, r9=1.5, r32=1.5)
    chances = [[0.99**place for place in range(1, 11)]]
    assert lengths(chances, 8, wide, 16, depth=2) == [0]
    assert lengths(chances, 8, wide, 16, depth=2, budget=0.4) == [0]
    assert lengths(chances, 8, wide, 16, depth=2, budget=0.6) == [10]
    assert lengths(chances * 8, 8, wide, 16, depth=2) == [2] * 8
    alone = costs(r1=1.0, r2=1.5, r32=1.5)
    assert lengths(chances, 1, alone, 16, depth=2) == [10]


def test_where_rows_cost_alike_the_others_have_no_say() -> None:
    wide = costs(r8=1.0, r9=1.5, r32=1.5)
    assert lengths([[0.99**place for place in range(1, 11)]], 8, wide, 16) == [10]


def test_one_whose_drafts_are_unlikely_is_not_slowed_by_the_drafts_of_another() -> None:
    wide = costs(r2=1.0, r3=1.3, r32=1.3)
    chances = [[0.9] * 9, [0.01]]
    assert lengths(chances, 2, wide, 16, depth=2) == [0, 0]
    assert lengths(chances, 2, wide, 16, depth=2, budget=0.5) == [9, 1]


@pytest.mark.parametrize(("wait_s", "length"), [(0.2, 1), (0.6, 0)])
def test_the_wait_for_the_step_before_counts(wait_s: float, length: int) -> None:
    cost = costs(r1=1.0, r64=1.1)
    cost.observe_wait(wait_s)
    assert lengths([[0.5]], 1, cost, 4, depth=2) == [length]


def test_what_is_computed_again_after_a_rejection_counts() -> None:
    dear = costs(r1=1.0, r5=2.0)
    chances = [[0.8, 0.6, 0.45, 0.35]]
    (rewound,) = lengths(chances, 1, dear, 4)
    (recomputed,) = lengths(chances, 1, dear, 4, rewind="checkpoint")
    assert rewound > recomputed


def test_nothing_is_drafted_without_chances_or_room() -> None:
    assert lengths([[], [0.9]], 2, FLAT, 0) == [0, 0]
    assert lengths([[], []], 2, FLAT, 8) == [0, 0]


def test_drafts_could_pay_only_where_wide_steps_are_cheaper_by_the_row() -> None:
    assert could_pay(8, costs(r8=1.0, r16=1.6, r128=12.0), 64)
    assert not could_pay(8, costs(r8=1.0, r16=2.1, r128=18.0), 64)
    assert not could_pay(1, FLAT, 0)
    slow = costs(r1=1.0, r64=1.1)
    slow.observe_wait(1.0)
    assert not could_pay(1, slow, 1)


def test_a_width_first_measured_in_a_bad_moment_costs_little_more_than_a_wider_one() -> None:
    model = costs(r8=1.0, r16=1.6)
    model.observe(1, 6.0)
    assert model.seconds(1) < 1.2
    model.observe(32, 6.0)
    assert model.seconds(32) == pytest.approx(6.0)


def test_rows_beyond_the_widest_step_cost_what_the_runner_says() -> None:
    model = CostModel(row_cost=0.5)
    assert model.seconds(5) == pytest.approx(3.0)
    model.observe(1, 0.01)
    assert model.seconds(9) == pytest.approx(0.05)
    model.observe(9, 0.06)
    assert model.seconds(19) == pytest.approx(0.12)


def learned(wide_s: float, *, plain: int) -> CostModel:
    """A model that saw plain steps of 10 ms, one of eight rows, and `plain` more."""
    cost = CostModel()
    for _ in range(20):
        cost.observe(1, 0.01)
    cost.observe(8, wide_s)
    for _ in range(plain):
        cost.observe(1, 0.01)
    return cost


def test_one_step_that_was_slow_by_chance_does_not_end_drafts() -> None:
    assert not could_pay(1, learned(0.3, plain=0), 7)
    cost = learned(0.3, plain=300)
    assert could_pay(1, cost, MOST)
    cost.observe(8, 0.02)
    assert cost.seconds(8) == pytest.approx(0.03)
    assert could_pay(1, cost, MOST)


def test_the_mean_of_the_first_two_steps_of_a_width_counts() -> None:
    for first, second in ((0.06, 0.04), (0.04, 0.06)):
        cost = learned(first, plain=3)
        cost.observe(8, second)
        assert cost.seconds(8) == pytest.approx(0.05)


def test_a_width_that_was_slow_twice_stays_so() -> None:
    cost = learned(0.1, plain=300)
    cost.observe(8, 0.12)
    assert cost.seconds(8) == pytest.approx(0.11)
    for _ in range(500):
        cost.observe(1, 0.01)
    assert cost.seconds(8) == pytest.approx(0.11)
    assert not could_pay(1, cost, 7)


def test_what_one_quick_step_told_is_not_forgotten() -> None:
    assert learned(0.012, plain=500).seconds(8) == pytest.approx(0.012)
