"""How long the drafts of a step are, from the chances of their tokens and the costs of steps."""

import pytest

from localchat.core.spec_decode.draft_lengths import best_lengths, could_pay
from localchat.core.spec_decode.step_cost import CostModel


def costs(**seconds: float) -> CostModel:
    """Costs by the number of rows: r8=1.0."""
    model = CostModel()
    for rows, each in seconds.items():
        model.observe(int(rows[1:]), each)
    return model


FLAT = costs(r1=1.0, r64=1.1)


def test_the_likeliest_tokens_go_first_whosever_they_are() -> None:
    lengths, _ = best_lengths([[0.9, 0.8, 0.1], [0.2, 0.1], [0.95, 0.9, 0.85]], 3, FLAT, 5)
    assert lengths == [2, 0, 3]


def test_a_draft_is_as_long_as_its_sequence_gets_faster() -> None:
    dear = costs(r1=1.0, r2=1.3, r3=1.6, r4=1.9, r8=3.1)
    lengths, rate = best_lengths([[0.9, 0.8, 0.3, 0.2]], 1, dear, 8)
    assert lengths == [2]
    assert rate == pytest.approx(2.7 / 1.6)


def test_one_that_gains_much_may_not_slow_seven_others() -> None:
    """The sum of all tokens would rise from 8 to 18 in 1.5 times the time."""
    wide = costs(r8=1.0, r9=1.5, r32=1.5)
    chances = [[0.99**place for place in range(1, 11)]]
    assert best_lengths(chances, 8, wide, 16)[0] == [0]
    assert best_lengths(chances * 8, 8, wide, 16)[0] == [2] * 8
    assert best_lengths(chances, 8, wide, 16, fair=False)[0] == [10]
    alone = costs(r1=1.0, r2=1.5, r32=1.5)
    assert best_lengths(chances, 1, alone, 16)[0] == [10]


def test_the_wait_for_the_step_before_counts() -> None:
    chances = [[0.5]]
    assert best_lengths(chances, 1, FLAT, 4, wait_s=0.2)[0] == [1]
    assert best_lengths(chances, 1, FLAT, 4, wait_s=0.6)[0] == [0]


def test_what_is_computed_again_after_a_rejection_counts() -> None:
    dear = costs(r1=1.0, r5=2.0)
    chances = [[0.8, 0.6, 0.45, 0.35]]
    (taken,), _ = best_lengths(chances, 1, dear, 4)
    (again,), _ = best_lengths(chances, 1, dear, 4, rewinds=False)
    assert taken > again


def test_nothing_is_drafted_without_chances_or_room() -> None:
    assert best_lengths([[], [0.9]], 2, FLAT, 0)[0] == [0, 0]
    assert best_lengths([[], []], 2, FLAT, 8)[0] == [0, 0]


def test_drafts_could_pay_only_where_wide_steps_are_cheaper_by_the_row() -> None:
    assert could_pay(8, costs(r8=1.0, r16=1.6, r128=12.0), 64)
    assert not could_pay(8, costs(r8=1.0, r16=2.1, r128=18.0), 64)
    assert not could_pay(1, FLAT, 1, wait_s=1.0)
    assert not could_pay(1, FLAT, 0)


def test_a_width_first_measured_in_a_bad_moment_costs_little_more_than_a_wider_one() -> None:
    model = costs(r8=1.0, r16=1.6)
    model.observe(1, 6.0)
    assert model.seconds(1) < 1.2
    model.observe(32, 6.0)
    assert model.seconds(32) == pytest.approx(6.0)
