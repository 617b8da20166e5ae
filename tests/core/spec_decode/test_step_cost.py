"""Costs of steps by their width, where some are slow by chance."""

import pytest

from localchat.core.spec_decode.draft_lengths import could_pay
from localchat.core.spec_decode.step_cost import CostModel

MOST = 15


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
    assert cost.seconds(8) == pytest.approx(0.02)


def test_a_width_that_was_slow_twice_stays_so() -> None:
    cost = learned(0.1, plain=300)
    cost.observe(8, 0.12)
    assert cost.seconds(8) == pytest.approx(0.1)
    for _ in range(500):
        cost.observe(1, 0.01)
    assert cost.seconds(8) == pytest.approx(0.1)
    assert not could_pay(1, cost, 7)


def test_what_one_quick_step_told_is_not_forgotten() -> None:
    assert learned(0.012, plain=500).seconds(8) == pytest.approx(0.012)
