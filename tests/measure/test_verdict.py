"""Thresholds of `quality --gate`, and verdicts that follow the table."""

from typing import Any

import pytest

from localchat.measure.records import (
    DivergenceFigures,
    GreedyText,
    TaskOutcome,
    VariantQuality,
)
from localchat.measure.variants import BenchVariant
from localchat.measure.verdict import failures, verdict


def measured(name: str, **figures: Any) -> VariantQuality:
    return VariantQuality(variant=BenchVariant(name, name, {}, None), model=name, **figures)


def tasks(passed: int, of: int) -> tuple[TaskOutcome, ...]:
    return tuple(TaskOutcome(str(number), number < passed) for number in range(of))


def greedy(equal: int, of: int) -> tuple[GreedyText, ...]:
    return tuple(GreedyText("p", ("a",), None if number < equal else 3) for number in range(of))


FAR = DivergenceFigures(0.0052, 0.03, 0.4, 0.94, complete=True)
BASE = measured("f16", questions=tasks(2, 3), greedy=greedy(6, 6))
OTHER = measured("q8", questions=tasks(0, 3), greedy=greedy(1, 6), divergence=FAR)


def test_a_verdict_tells_lost_tasks_and_changed_texts() -> None:
    text = verdict(BASE, OTHER)
    assert "same greedy text 1 of 6" in text
    assert "questions 0 of 3 (first: 2)" in text
    assert "most answers stay the same" not in text
    assert "too few tasks to tell (ask 6 or more)" in text


def test_greedy_texts_alone_are_a_comparison() -> None:
    text = verdict(measured("a", greedy=greedy(6, 6)), measured("b", greedy=greedy(0, 6)))
    assert "nothing could be compared" not in text and "0 of 6" in text


@pytest.mark.parametrize(("gate", "missed"), [("weaker", False), ("safe", True)])
def test_a_gate_fails_below_its_grade(gate: str, missed: bool) -> None:
    assert bool(list(failures((BASE, OTHER), gate))) is missed


def test_a_gate_fails_if_nothing_was_compared() -> None:
    (sentence,) = failures((measured("a"), measured("b")), "weaker")
    assert sentence.endswith("nothing could be compared, so it has no grade")
