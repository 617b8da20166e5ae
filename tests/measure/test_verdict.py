"""Thresholds of `quality --gate`, and verdicts that follow the table."""

from typing import Any

import pytest

from localchat.errors import UsageError
from localchat.measure.records import (
    DivergenceFigures,
    TaskOutcome,
    VariantQuality,
)
from localchat.measure.variants import BenchVariant
from localchat.measure.verdict import failures, parse_gates, verdict


def measured(name: str, **figures: Any) -> VariantQuality:
    return VariantQuality(variant=BenchVariant(name, name, {}, None), model=name, **figures)


def tasks(passed: int, of: int) -> tuple[TaskOutcome, ...]:
    return tuple(TaskOutcome(str(number), number < passed) for number in range(of))


FAR = DivergenceFigures(0.0052, 0.03, 0.4, 0.94, complete=True)
BASE = measured("f16", questions=tasks(2, 3))
OTHER = measured("q8", questions=tasks(0, 3), divergence=FAR)


def test_a_verdict_tells_lost_tasks() -> None:
    text = verdict(BASE, OTHER)
    assert "questions 0 of 3 (first: 2)" in text
    assert text.endswith(
        "weaker: use it only where memory demands it; too few tasks to exclude chance (ask more than 6)"
    )


def test_a_lost_needle_is_never_close() -> None:
    q4 = measured("q4_0", needles=tasks(9, 10), divergence=FAR)
    text = verdict(measured("f16", needles=tasks(10, 10)), q4)
    assert "1 of 10 needles lost" in text and "weaker: " in text and "too few tasks" in text
    many = measured("q4_0", needles=tasks(4, 10), divergence=FAR)
    assert "damaged: do not use it" in verdict(measured("f16", needles=tasks(10, 10)), many)
    # A needle won elsewhere does not make up for it.
    won = (TaskOutcome("0", False), *tasks(11, 11)[1:], TaskOutcome("11", True))
    assert "weaker: " in verdict(measured("f16", needles=tasks(11, 12)), measured("b", needles=won))
    # The first model misses many needles, so that one lost and one won are chance.
    for passed in (4, 7):
        poor = measured("f16", needles=tasks(passed, 10))
        swap = (TaskOutcome("0", False), *tasks(passed, 9)[1:], TaskOutcome("9", True))
        swapped = measured("q8_0", needles=swap, divergence=FAR)
        text = f"q8_0: needles {passed} of 10 (first: {passed}); KL 0.0052; safe"
        assert verdict(poor, swapped) == text
        # One that is only lost may be chance too, so it is said, and passes `--gate`. Six cannot be.
        lower = measured("q4_0", needles=tasks(passed - 1, 10), divergence=FAR)
        text = verdict(poor, lower)
        assert f"needles {passed - 1} of 10 (first: {passed}); " in text and "close: " in text
        assert "too few tasks" in text
        assert not list(failures((poor, lower), parse_gates(["grade=close"])))
        assert list(failures((poor, lower), parse_gates(["needles=0"])))
    most = measured("f16", needles=tasks(17, 20))
    fewer = measured("q4_0", needles=tasks(11, 20), divergence=FAR)
    assert "damaged: " in verdict(most, fewer)
    (missed,) = failures((measured("f16", needles=tasks(10, 10)), q4), parse_gates(["grade=close"]))
    assert missed == "q4_0: grade weaker, allowed close"


@pytest.mark.parametrize(
    ("word", "missed"),
    [
        ("kl=0.01", False),
        ("kl=0.001", True),
        ("top1=0.9", False),
        ("top1=0.95", True),
        ("questions=2", False),
        ("questions=1", True),
        ("needles=0", True),  # it was not measured
        ("grade=weaker", False),
        ("grade=close", True),  # tasks were lost
        ("grade=safe", True),
    ],
)
def test_a_gate_fails_beyond_its_limit(word: str, missed: bool) -> None:
    assert bool(list(failures((BASE, OTHER), parse_gates([word])))) is missed


def test_a_missed_gate_names_the_lost_tasks() -> None:
    q4 = measured("q4_0", needles=tasks(1, 6))
    (missed,) = failures((measured("f16", needles=tasks(6, 6)), q4), parse_gates(["needles=0"]))
    assert missed == "q4_0: needles 5, allowed at most 0: 1, 2, 3, and 2 more"


def test_a_gate_fails_if_the_first_model_passes_no_task() -> None:
    first = measured("f16", needles=tasks(0, 6))
    (missed,) = failures((first, measured("q4_0", needles=tasks(0, 6))), parse_gates(["needles=0"]))
    assert missed == "q4_0: needles cannot be judged, because f16 passes none of them either"


@pytest.mark.parametrize("word", ["kl", "kl=x", "kl=-1", "kl=inf", "speed=3", "grade=fine", "="])
def test_an_unknown_gate_is_a_usage_error(word: str) -> None:
    with pytest.raises(UsageError, match="--gate"):
        parse_gates([word])
