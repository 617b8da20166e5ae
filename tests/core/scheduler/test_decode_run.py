"""Decode runs: steps that repeat the rows of an earlier one give the same texts and the same KV cache."""

from random import Random
from typing import Any

import pytest

from localchat.backend_api.interface import LAST, NewBlocks, StepPlan, StepResult, StepRow
from localchat.core.scheduler.step_builder import ScheduledStep
from tests.support.engine_core_bench import Bench, capabilities, periodic, request

CACHES: list[dict[str, Any]] = [{"block_tokens": 4, "depth": 2}, {"depth": 1}, {"depth": 2}]
"""Blocks, and slots of runners that compute one step or two at once."""


def test_unmoved_rows_start_later_and_have_the_new_blocks() -> None:
    rows = (StepRow(1, 0, 5, (7,), (), (3,)), StepRow(2, 1, 8, LAST))
    plan = StepPlan(4, rows, moved=3, new_blocks=(NewBlocks(1, (9,)),))
    assert plan.unmoved().rows == (StepRow(1, 0, 8, LAST), StepRow(2, 1, 11, LAST, (), (9,)))
    assert plan.unmoved().unmoved() == plan.unmoved()


class MovingBench(Bench):
    """A bench whose requests arrive and are cancelled at random, and counts of its plain rows."""

    def __init__(self, cache: dict[str, Any], *, moves_rows: bool, failures: bool) -> None:
        failing = range(40, 400, 37) if failures else ()
        super().__init__(capabilities(**cache), stumble=failing, coalesce_s=0.015)
        self.core._scheduler._moves_rows = moves_rows
        self.moved = 0
        launch = self.runner.launch

        def counted(plan: StepPlan) -> None:
            self.moved += bool(plan.moved)
            launch(plan)

        self.runner.launch = counted  # type: ignore[method-assign]
        self.plain_beside_prompts = 0
        process = self.core.output_processor.process_result

        def observed(scheduled: ScheduledStep, result: StepResult) -> None:
            plain = any(row.is_plain for row in scheduled.rows)
            self.plain_beside_prompts += plain and not scheduled.is_decode
            process(scheduled, result)

        self.core.output_processor.process_result = observed  # type: ignore[method-assign]

    def texts(self, seed: int) -> list[str]:
        draw = Random(seed)
        cancelled: list[int] = []
        for number in range(14):
            prompt = "".join(draw.choice("abcdef ") for _ in range(draw.randint(1, 30)))
            stop = ("e",) if number % 4 == 1 else ()
            id_ = self.ask(
                request(
                    prompt,
                    max_tokens=draw.randint(9, 60),
                    temperature=0.9,
                    seed=number,
                    stop=stop,
                    min_tokens=9 * (number % 5 == 4),
                )
            )
            self.step(draw.choice((0, 0, 2, 9, 25)))
            if number % 6 == 5:
                self.core.cancel(id_)
                cancelled.append(id_)
        self.run_until_idle()
        return [answer.text() for id_, answer in self.received.items() if id_ not in cancelled]


@pytest.mark.parametrize("failures", [False, True])
@pytest.mark.parametrize("cache", CACHES, ids=["blocks", "slots", "slots ahead"])
@pytest.mark.parametrize("seed", range(4))
def test_moved_rows_give_the_same_texts(seed: int, cache: dict[str, Any], failures: bool) -> None:
    plain = MovingBench(cache, moves_rows=False, failures=failures)
    moving = MovingBench(cache, moves_rows=True, failures=failures)
    assert moving.texts(seed) == plain.texts(seed)
    assert plain.moved == plain.plain_beside_prompts == 0
    assert moving.moved > 10
    assert moving.plain_beside_prompts > 4


@pytest.mark.parametrize(("depth", "moves"), [(1, True), (2, False)])
def test_a_text_without_repetitions_moves_until_drafts_are_possible(
    depth: int, *, moves: bool
) -> None:
    """A runner that is ahead may wait for drafts, so its planner decides before each step."""
    bench = Bench(capabilities(depth=depth), periodic)
    plans: list[StepPlan] = []
    launch = bench.runner.launch

    def recorded(plan: StepPlan) -> None:
        plans.append(plan)
        launch(plan)

    bench.runner.launch = recorded  # type: ignore[method-assign]
    # The alphabet repeats itself after 26 tokens.
    id_ = bench.ask(request("_", max_tokens=90, temperature=0.9))
    bench.run_until_idle()
    drafting = [number for number, plan in enumerate(plans) if any(row.drafts for row in plan.rows)]
    assert len(bench.received[id_].text()) == 90
    assert min(drafting) >= 26
    assert any(plan.moved for plan in plans[:26]) == moves
    assert not any(plan.moved for plan in plans[min(drafting) :])
