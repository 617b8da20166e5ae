"""What drafts cost and save through the engine core, on a clock of its own."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from localchat.core.spec_decode.ngram_proposer import NgramProposer
from tests.support.timed_core import CPU, GPU, Machine, TimedCore

LETTERS = range(33, 127)
PROMPT, ANSWER = 200, 96
Text = Callable[[random.Random], tuple[list[int], list[int]]]
"""Makes a prompt and its answer."""


def fresh(dice: random.Random) -> tuple[list[int], list[int]]:
    """An answer that nothing led to expect."""
    return dice.choices(LETTERS, k=PROMPT), dice.choices(LETTERS, k=ANSWER)


def misleading(dice: random.Random) -> tuple[list[int], list[int]]:
    """The same few words again and again, each time followed by something else."""
    words = [dice.choices(LETTERS, k=3) for _ in range(5)]
    text: list[int] = []
    while len(text) < PROMPT + ANSWER:
        text += [*dice.choice(words), dice.choice(LETTERS)]
    return text[:PROMPT], text[PROMPT : PROMPT + ANSWER]


def copied(dice: random.Random) -> tuple[list[int], list[int]]:
    prompt = dice.choices(LETTERS, k=PROMPT)
    return prompt, prompt[20 : 20 + ANSWER]


def looping(dice: random.Random) -> tuple[list[int], list[int]]:
    period = dice.choices(LETTERS, k=dice.randrange(4, 16))
    return dice.choices(LETTERS, k=PROMPT), (period * ANSWER)[:ANSWER]


def partly(share: float) -> Text:
    """A copy of which so many tokens are right."""

    def text(dice: random.Random) -> tuple[list[int], list[int]]:
        prompt, answer = copied(dice)
        return prompt, [each if dice.random() < share else dice.choice(LETTERS) for each in answer]

    return text


def phrases(dice: random.Random) -> tuple[list[int], list[int]]:
    """Random words and phrases that occurred before. About half of the guesses after three tokens are right."""
    text = dice.choices(LETTERS, k=20)
    while len(text) < PROMPT + ANSWER:
        if dice.random() < 0.6:
            start = dice.randrange(len(text) - 12)
            text += text[start : start + dice.randrange(3, 9)]
        text += dice.choices(LETTERS, k=3)
    return text[:PROMPT], text[PROMPT : PROMPT + ANSWER]


def with_rows(cost: float, *, assumed: float) -> Machine:
    """A CPU on which each further row costs this part of the first, and another part is assumed."""
    milliseconds = {rows: 30 * (1 + cost * (rows - 1)) for rows in CPU.decode_ms}
    return CPU._replace(
        decode_ms=milliseconds, capabilities=replace(CPU.capabilities, row_cost=assumed)
    )


def ratio(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, text: Text, streams: int
) -> tuple[float, TimedCore]:
    """Time of a few bursts without drafts over that with them; the first burst's, for learning, is left out."""
    spent_s = []
    for speculation in (False, True):
        core = TimedCore(monkeypatch, machine, speculation=speculation)
        outcomes = [
            core.answer([text(random.Random(1000 * burst + each)) for each in range(streams)])
            for burst in range(max(3, 7 - streams))
        ]
        spent_s.append(sum(1 / each.tokens_per_s for each in outcomes[1:]))
    return spent_s[0] / spent_s[1], core


@pytest.mark.parametrize("machine", [GPU, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize("streams", [1, 2, 8])
@pytest.mark.parametrize("text", [fresh, misleading, copied, looping, partly(0.3), partly(0.7)])
def test_drafts_never_cost_and_pay_where_texts_repeat(
    monkeypatch: pytest.MonkeyPatch, text: Text, streams: int, machine: Machine
) -> None:
    found, _ = ratio(monkeypatch, machine, text, streams)
    assert found > 0.98
    assert text is not copied or streams > (8 if machine is GPU else 1) or found > 1.2


@pytest.mark.parametrize(("streams", "share"), [(1, 0.06), (4, 0.02), (8, 0.01)])
def test_few_drafts_of_the_first_answers_after_a_load_are_rejected(
    monkeypatch: pytest.MonkeyPatch, streams: int, share: float
) -> None:
    """If 0.15 were assumed, 8, 6 and 4 % of the tokens would be computed in vain."""
    generated = 0
    rejected = 0
    for load in range(10):
        core = TimedCore(monkeypatch, with_rows(0.65, assumed=0.5))
        core.answer([phrases(random.Random(100 * load + stream)) for stream in range(streams)])
        generated += streams * ANSWER
        computed = sum(row.width for plan in core.runner.plans for row in plan.rows)
        # The last token of an answer is never computed.
        rejected += computed - streams * (PROMPT + ANSWER - 1)
    assert rejected < share * generated


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_cheap_rows_are_measured_whatever_cost_is_assumed(
    monkeypatch: pytest.MonkeyPatch, streams: int
) -> None:
    steps = []
    for assumed in (0.1, 0.5):
        core = TimedCore(monkeypatch, with_rows(0.1, assumed=assumed))
        for burst in range(3):
            core.answer([copied(random.Random(100 * burst + each)) for each in range(streams)])
        steps.append(len(core.runner.plans))
    assert steps[1] < 1.2 * steps[0]
    assert steps[1] < 3 * ANSWER / 2


@pytest.mark.parametrize("text", [fresh, copied])
def test_drafts_cost_nothing_with_many_streams(monkeypatch: pytest.MonkeyPatch, text: Text) -> None:
    found, core = ratio(monkeypatch, GPU, text, 64)
    assert found > 0.98
    assert len(core.runner.plans) > 3


@pytest.mark.parametrize("streams", [1, 8])
def test_no_step_with_drafts_is_launched_before_it_is_prepared(
    monkeypatch: pytest.MonkeyPatch, streams: int
) -> None:
    core = TimedCore(monkeypatch)
    core.runner.prepares = False
    dice = [random.Random(stream) for stream in range(streams)]
    alone = core.answer([copied(each) for each in dice])
    assert not any(row.drafts for plan in core.runner.plans for row in plan.rows)
    dice = [random.Random(stream) for stream in range(streams)]
    off = TimedCore(monkeypatch, speculation=False).answer([copied(each) for each in dice])
    assert alone.tokens_per_s > 0.98 * off.tokens_per_s
    core.runner.prepares = True
    for burst in range(1, 3):
        core.answer([copied(random.Random(100 * burst + stream)) for stream in range(streams)])
    assert any(row.drafts for plan in core.runner.plans for row in plan.rows)


@pytest.mark.parametrize("machine", [GPU, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize("copying", [1, 2, 4, 7])
def test_streams_that_gain_do_not_slow_the_others(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, copying: int
) -> None:
    """The burst takes as long as its slowest stream."""
    rates = []
    for speculation in (False, True):
        core = TimedCore(monkeypatch, machine, speculation=speculation)
        for burst in range(4):
            dice = [random.Random(100 * burst + stream) for stream in range(8)]
            texts = [copied(each) for each in dice[:copying]] + [
                fresh(each) for each in dice[copying:]
            ]
            outcome = core.answer(texts)
        rates.append(outcome.tokens_per_s)
    assert rates[1] > 0.98 * rates[0]


def test_no_step_of_several_streams_looks_further_than_the_first_without_a_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = TimedCore(monkeypatch)
    core.answer([copied(random.Random(stream)) for stream in range(8)])
    asked: list[int] = []
    chances = NgramProposer.chances

    def count(proposer: NgramProposer, limit: int) -> list[float]:
        asked.append(limit)
        return chances(proposer, limit)

    monkeypatch.setattr(NgramProposer, "chances", count)
    core.runner.plans.clear()
    core.answer([fresh(random.Random(100 + stream)) for stream in range(8)])
    assert len(asked) <= 2 * len(core.runner.plans)


def test_no_row_leaves_out_a_step_of_a_prompt_because_of_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts arrive while copies are written: their steps are long, and waiting for one is enough."""
    core = TimedCore(monkeypatch)
    core.answer([copied(random.Random(1))])
    core.answer([copied(random.Random(stream)) for stream in range(2, 14)], apart_s=0.01)
    rows = [{row.seq: row for row in plan.rows} for plan in core.runner.plans]
    drafted = [plan for plan in rows if any(row.drafts for row in plan.values())]
    assert drafted
    assert all(row.width - len(row.drafts) == 1 for plan in drafted for row in plan.values())
    for before, mixed, after in zip(rows, rows[1:], rows[2:], strict=False):
        if any(row.width >= PROMPT // 2 for row in mixed.values()):
            assert not (before.keys() & after.keys()) - mixed.keys()


def test_a_step_with_drafts_holds_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the rows would take as long as all of them."""
    core = TimedCore(monkeypatch)
    for burst in range(2):
        core.answer([copied(random.Random(10 * burst + stream)) for stream in range(6)])
    plans = [plan for plan in core.runner.plans if any(row.drafts for row in plan.rows)]
    assert plans
    assert all(len(plan.rows) == 6 for plan in plans[:-6])
