"""Steps in flight: a GPU has its next step before the engine core has looked at the last one."""

from typing import Any

import msgspec
import numpy as np
import pytest

from localchat.backend_api.interface import (
    LAST,
    Drop,
    Enter,
    LogitsPosition,
    SamplingParams,
    StepPlan,
    StepRow,
    Truncate,
)
from localchat_llamacpp.runner import LlamaCppRunner
from localchat_llamacpp.slots import Slots
from tests.support.llamacpp_core import Core, request
from tests.support.llamacpp_driver import GREEDY, Start
from tests.support.llamacpp_models import VOCAB

RANDOM = np.random.default_rng(8)
PROMPT = tuple(int(token) for token in RANDOM.integers(0, VOCAB - 3, 90))
COPY = tuple(int(token) for token in RANDOM.integers(0, VOCAB - 3, 30)) * 3
DRAWN = SamplingParams(temperature=1.0, repetition_penalty=1.2, seed=4)


class _Counted:
    """The library's functions; counts the calls of llama_decode."""

    def __init__(self, api: Any) -> None:
        self._api, self.decoded = api, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def llama_decode(self, *arguments: Any) -> int:
        self.decoded += 1
        status: int = self._api.llama_decode(*arguments)
        return status


class _Full(_Counted):
    """The library's functions, with no room at the first llama_decode."""

    def llama_decode(self, *arguments: Any) -> int:
        return super().llama_decode(*arguments) if self.decoded else self._refuse()

    def _refuse(self) -> int:
        self.decoded += 1
        return 1


def _counted(runner: LlamaCppRunner) -> _Counted:
    counted = runner._api = _Counted(runner._api)
    return counted


def _first(sampling: SamplingParams, number: int = 1, seq: int = 0) -> StepPlan:
    """The plan that computes the prompt and draws a token."""
    return StepPlan(
        number=number,
        rows=(StepRow(seq, seq, 0, PROMPT),),
        positions=(LogitsPosition(0, len(PROMPT) - 1, seq),),
        enter=(Enter(seq, seq, PROMPT, len(PROMPT), sampling),),
    )


def _next(number: int, position: int, **more: Any) -> StepPlan:
    """A plan that goes on one token."""
    row = StepRow(0, 0, position, LAST)
    return StepPlan(number=number, rows=(row,), positions=(LogitsPosition(0, 0, 0),), **more)


def test_a_gpu_begins_a_step_at_its_launch_and_the_next_before_a_result(start: Start) -> None:
    runner = start(step=128, gpu_layers=-1).runner
    assert isinstance(runner, LlamaCppRunner)
    calls, begin = _counted(runner), len(PROMPT)
    runner.launch(_first(GREEDY))
    assert calls.decoded == 1
    runner.launch(_next(2, begin))
    assert calls.decoded == 1
    runner.collect()
    assert calls.decoded == 2
    runner.collect()
    assert calls.decoded == 2


def test_a_cpu_computes_a_step_when_it_is_collected(start: Start) -> None:
    runner = start(step=128).runner
    assert isinstance(runner, LlamaCppRunner)
    calls = _counted(runner)
    runner.launch(_first(GREEDY))
    assert calls.decoded == 0
    runner.collect()
    assert calls.decoded == 1


def test_rows_are_assumed_to_cost_more_on_a_cpu_until_they_are_measured(start: Start) -> None:
    assert start(step=128).runner.capabilities.row_cost == 0.5
    assert start(step=128, gpu_layers=-1).runner.capabilities.row_cost == 0.15


@pytest.mark.parametrize("name", ["mamba", "gemma3"])
def test_what_cannot_be_truncated_anywhere_begins_early_and_has_one_step_in_flight(
    start: Start, name: str
) -> None:
    runner = start(name, gpu_layers=-1, step=128).runner
    assert isinstance(runner, LlamaCppRunner)
    assert runner.capabilities.depth == 1
    calls = _counted(runner)
    runner.launch(_first(GREEDY))
    assert calls.decoded == 1


def test_a_draft_model_has_one_step_in_flight(start: Start) -> None:
    assert start(gpu_layers=-1, draft="llama").runner.capabilities.depth == 1


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
def test_steps_in_flight_draw_the_tokens_of_steps_one_by_one(
    start: Start, sampling: SamplingParams
) -> None:
    alone = start(step=128)
    expected = [alone.prefill(PROMPT, sampling=sampling).samples[0].token]
    expected += alone.go_on(len(PROMPT), 20)
    runner = start(step=128, gpu_layers=-1).runner
    runner.launch(_first(sampling))
    drawn = []
    for number in range(20):
        runner.launch(_next(number + 2, len(PROMPT) + number))
        drawn.append(runner.collect().samples[0].token)
    drawn.append(runner.collect().samples[0].token)
    assert drawn == expected


def test_a_row_behind_the_end_of_its_sequence_is_taken_back(start: Start) -> None:
    driver = start(step=128, gpu_layers=-1)
    expected = driver.prefill(PROMPT).samples[0].token
    driver.step(memory=[Drop(0)], leave=[0])
    runner, end = driver.runner, len(PROMPT)
    runner.launch(_first(GREEDY, 10))
    runner.launch(_next(11, end))
    runner.collect()
    runner.launch(StepPlan(number=12, memory=(Truncate(0, end - 1),), leave=(0,)))
    assert [runner.collect().number, runner.collect().number] == [11, 12]
    again = driver.step(
        StepRow(1, 0, end - 1, PROMPT[-1:]),
        positions=[LogitsPosition(0, 0, 1)],
        enter=[Enter(1, 0, PROMPT, end, GREEDY)],
    )
    assert again.samples[0].token == expected


def test_a_step_behind_one_without_room_computes_nothing(start: Start) -> None:
    driver = start(context=200, step=250, slots=2, gpu_layers=-1)
    driver.prefill(PROMPT * 2, seq=0, slot=0)
    runner, known = driver.runner, PROMPT[:80]
    enter = (Enter(1, 1, known, 80, GREEDY),)
    short = StepRow(1, 1, 0, known)
    behind = StepRow(1, 1, 80, LAST)
    row, at = StepRow(0, 0, 180, LAST), LogitsPosition(0, 0, 0)
    runner.launch(StepPlan(10, (row, short), (at, LogitsPosition(1, 79, 1)), enter=enter))
    runner.launch(StepPlan(11, (behind,), (LogitsPosition(0, 0, 1),), memory=(Drop(0),)))
    first, second = runner.collect(), runner.collect()
    assert (first.status, first.computed, first.samples) == ("out_of_memory", (0, 0), ())
    assert (second.status, second.computed, second.samples) == ("aborted", (0,), ())
    # Its memory operations count.
    again = driver.step(short, positions=[LogitsPosition(0, 79, 1)])
    assert (again.status, len(again.samples)) == ("ok", 1)


def _texts(core: Core, prompts: list[tuple[int, ...]], **how: Any) -> list[list[int]]:
    ids = []
    for place, prompt in enumerate(prompts):
        ids.append(core.ask(request(list(prompt), priority=place, **how)))
        core.step(5)
    core.run_until_idle()
    return [core.received[id_].tokens for id_ in ids]


@pytest.mark.parametrize("speculation", [False, True])
def test_texts_are_those_of_one_step_in_flight_whoever_is_preempted(
    start: Start, *, speculation: bool
) -> None:
    prompts = [PROMPT, COPY, PROMPT[::-1], COPY[::-1], PROMPT[:40]]
    found = []
    for gpu_layers in (0, -1):
        core = Core(start(slots=2, gpu_layers=gpu_layers).runner)
        found.append(_texts(core, prompts, max_tokens=40, speculation=speculation))
        assert core.core.stats().preemptions
        found.append(_texts(core, prompts, max_tokens=40, speculation=speculation))
    assert found[0] == found[1] == found[2] == found[3]


def test_a_truncation_planned_before_a_step_came_back_short_leaves_what_is_there(
    start: Start,
) -> None:
    runner = start(step=128, gpu_layers=-1).runner
    assert isinstance(runner, LlamaCppRunner)
    runner._api = _Full(runner._api)
    begin = len(PROMPT)
    runner.launch(_first(GREEDY))
    runner.launch(_next(2, begin, memory=(Truncate(0, begin),)))
    results = runner.collect(), runner.collect()
    assert [one.status for one in results] == ["out_of_memory", "aborted"]
    assert [one.computed for one in results] == [(0,), (0,)]
    runner.launch(msgspec.structs.replace(_first(GREEDY, number=3), enter=()))
    assert runner.collect().computed == (begin,)


@pytest.mark.parametrize("gpu_layers", [0, -1])
def test_a_text_whose_saved_state_finds_no_room_is_computed_and_the_others_go_on(
    start: Start, gpu_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = PROMPT[:60][::-1]
    asked = [request(other), request((*PROMPT, 5)), request((*PROMPT, 6))]
    expected = [Core(start().runner).say(one).tokens for one in asked]
    core = Core(start(gpu_layers=gpu_layers).runner)
    core.say(request(PROMPT))
    first = core.ask(asked[0])
    core.step(2)
    load, refusals = Slots._load, iter(range(2))
    monkeypatch.setattr(Slots, "_load", lambda *how: next(refusals, None) is None and load(*how))
    ids = [first, *map(core.ask, asked[1:])]
    core.run_until_idle()
    assert next(refusals, None) is None
    assert [core.received[id_].error for id_ in ids] == [None] * 3
    assert [core.received[id_].tokens for id_ in ids] == expected
