"""Steps of padding, which are captured before they are needed; and steps with drafts, which have to be."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localchat.backend_api.interface import (
    LAST,
    Enter,
    LogitsPosition,
    SamplingParams,
    StepPlan,
    StepRow,
)
from localchat.backend_api.prepared_steps import DecodeRow
from localchat.engine.request import Grammar
from localchat_cuda.runner import step_executor
from localchat_cuda.runner.common_steps import DRAFT_ROWS
from localchat_cuda.runner.cuda_graphs import RUNS_BEFORE_CAPTURE, Body, CudaGraphs
from localchat_cuda.runner.input_batch import (
    DRAFT_STEP_TOKENS,
    InputBatch,
    ModelInputs,
    StepShape,
    TokenSpan,
    build_input_batch,
)
from localchat_cuda.runner.runner import CudaRunner
from tests.support import tiny_models
from tests.support.tiny_engine_core import ON_GPU, TinyLoop, request, tiny_runner
from tests.support.tiny_models import tokens_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    tiny_models.save(tiny_models.reference("qwen3"), folder)
    return folder


@pytest.mark.skipif(not ON_GPU, reason="no NVIDIA GPU, or TRITON_INTERPRET is not 0")
def test_common_steps_are_captured_while_nothing_runs(folder: Path) -> None:
    loop = TinyLoop(tiny_runner(folder))
    asked = request(
        tokens_of(32, 60), max_tokens=10, temperature=0.8, frequency_penalty=0.3, seed=3
    )
    told = loop.say(asked)
    while loop.runner.warm_up_next():
        pass
    graphs = loop.runner.graphs
    captured = set(graphs._captured)
    assert len(captured) > 10 and not loop.runner.warm_up_next()
    loop.say(request(tokens_of(33, 40), max_tokens=20))
    assert set(graphs._captured) - captured == set()
    assert loop.say(asked).tokens() == told.tokens()


class RecordedGraphs(CudaGraphs):
    """Captures nothing; says what a run would have been."""

    def __init__(self) -> None:
        super().__init__(enabled=False)
        self.enabled = True
        self.known: set[tuple[str, StepShape]] = set()
        self.eager: list[tuple[str, StepShape]] = []

    def has(self, kind: str, shape: StepShape) -> bool:
        return (kind, shape) in self.known

    replays = has

    def covers(self, kind: str, shape: StepShape) -> list[StepShape]:
        if (kind, shape) in self.known:
            return []
        return sorted(
            other for known, other in self.known if known == kind and other.may_cover(shape)
        )

    def run(self, kind: str, shape: StepShape, body: Body) -> tuple[torch.Tensor, ...]:
        self.steady = (kind, shape) in self.known
        if not self.steady:
            self.eager.append((kind, shape))
        return body()


@pytest.mark.skipif(ON_GPU, reason="graphs are recorded, not captured")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.1},
        {"presence_penalty": 0.01},
        {"grammar": Grammar("regex", "[a-z]*")},
        {"n": 3},
    ],
    ids=["greedy", "sampled", "penalised", "masked", "choices"],
)
def test_a_step_has_drafts_only_where_a_graph_holds_it(
    folder: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every kind; what was missing is prepared in the next pause."""
    runner = tiny_runner(folder)
    runner.capabilities = replace(
        runner.capabilities, prepares_steps=True, draft_rows=DRAFT_ROWS,
        draft_step_tokens=DRAFT_STEP_TOKENS,
    )  # fmt: skip
    graphs = runner.graphs = runner._executor.graphs = RecordedGraphs()
    runner.prepare(iter(()))
    launch, eager = runner.launch, []

    def launch_and_look(plan: StepPlan) -> None:
        graphs.eager.clear()
        launch(plan)
        if any(row.drafts for row in plan.rows):
            eager.extend(graphs.eager)

    monkeypatch.setattr(runner, "launch", launch_and_look)
    loop = TinyLoop(runner)
    asked = request(tokens_of(7, 6) * 12, max_tokens=150, speculation=True, **changes)
    drafted = [0]
    for _ in range(4):  # `choices` takes several pauses
        loop.say(asked)
        drafted.append(loop.core.stats().drafted)
        graphs.eager.clear()
        while runner.warm_up_next():
            graphs.known.update(graphs.eager)
    assert drafted[1] == 0 and drafted[-1] > 0
    assert not eager


@pytest.mark.skipif(ON_GPU, reason="graphs are recorded, not captured")
def test_common_steps_drive_no_graph_out(folder: Path) -> None:
    """The likeliest come first: with little room, the last ones would take theirs."""
    runner = tiny_runner(folder)
    graphs = runner.graphs = runner._executor.graphs = RecordedGraphs()
    assert runner.warm_up_next()
    graphs._max_graphs = 0
    graphs.known.update(graphs.eager)  # the step that was begun
    assert not runner.warm_up_next()


@pytest.mark.skipif(ON_GPU, reason="graphs are recorded, not captured")
def test_a_step_of_padding_runs_once_at_a_time(folder: Path) -> None:
    """A request that comes meanwhile waits for one run, not for all that a capture needs."""
    runner = tiny_runner(folder)
    graphs = runner.graphs = runner._executor.graphs = RecordedGraphs()
    runner.prepare(iter([[TokenSpan(runner.table.scratch, 40, 1)]]))
    runs = []
    while runner.warm_up_next():
        runs.append(len(graphs.eager))
    assert runs == list(range(1, RUNS_BEFORE_CAPTURE + 2))


def test_a_step_of_a_sequence_that_did_not_enter_yet_is_not_prepared(folder: Path) -> None:
    runner = tiny_runner(folder)
    runner.graphs = runner._executor.graphs = RecordedGraphs()
    assert not runner.prepared([DecodeRow(5, 10, 4)], masked=False)
    assert not runner._missing


def test_a_step_without_wanted_logits_keeps_a_row(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel behind the last attention has to work on nothing, as those of experts cannot."""
    runner, kept = tiny_runner(folder), list[int]()
    forward = runner.model.hidden_states

    def counted(inputs: ModelInputs) -> torch.Tensor:
        assert inputs.logits_indices is not None
        kept.append(len(inputs.logits_indices))
        return forward(inputs)

    monkeypatch.setattr(runner.model, "hidden_states", counted)

    def uncaptured(*layout: Any, **options: Any) -> InputBatch:
        return replace(build_input_batch(*layout, **options), captured=False)

    monkeypatch.setattr(step_executor, "build_input_batch", uncaptured)
    row = StepRow(7, 0, 0, tokens_of(1, 40), (), (0,))
    runner.launch(StepPlan(1, (row,), enter=(Enter(7, 0, (), 0, SamplingParams()),)))
    assert runner.collect().status == "ok"
    assert kept == [1]


@pytest.mark.skipif(ON_GPU, reason="graphs are recorded, not captured")
@pytest.mark.parametrize(
    "prompts", [(), (40, 70), (17,) * 9], ids=["decoding", "with prompts", "with many prompts"]
)
def test_a_crowd_runs_in_a_larger_graph_and_writes_the_same(
    folder: Path, prompts: tuple[int, ...]
) -> None:
    """Until its own shape has a graph."""
    texts = []
    for covered in (False, True):
        runner = tiny_runner(folder, slots=12)
        graphs = runner.graphs = runner._executor.graphs = RecordedGraphs()
        if covered:
            scratch = runner.table.scratch
            spans = [TokenSpan(scratch, 20, 1)] * 16
            if prompts:
                spans += [TokenSpan(scratch, 0, 20)] * 8
            prepared = runner._executor.prepare_padding(spans)
            kind = prepared.graph_kind or "last states"
            graphs.known.add((kind, prepared.batch.shape))
        rows: list[StepRow] = []
        for slot, length in enumerate((20, 30, 25)):
            tokens = tokens_of(slot, length)
            first = StepRow(slot, slot, 0, tokens, (), (slot,))
            greedy = SamplingParams(temperature=0.0)
            _run(runner, [first], [Enter(slot, slot, tokens, length + 2, greedy)])
            rows.append(StepRow(slot, slot, length, LAST))
        entering = []
        for slot, width in enumerate(prompts, start=len(rows)):
            tokens = tokens_of(slot, width)
            entering.append(Enter(slot, slot, tokens, width + 1, SamplingParams(temperature=0.0)))
            rows.append(StepRow(slot, slot, 0, tokens, (), (2 * slot, 2 * slot + 1)))
        graphs.eager.clear()
        texts.append(_run(runner, rows, entering))
        assert bool(graphs.eager) is not covered
    assert texts[0] == texts[1]


def _run(runner: CudaRunner, rows: list[StepRow], enter: list[Enter]) -> list[int]:
    """Run a step that samples a token for each row."""
    positions = [LogitsPosition(n, row.width - 1, row.seq) for n, row in enumerate(rows)]
    runner.launch(StepPlan(1, tuple(rows), tuple(positions), enter=tuple(enter)))
    return [sample.token for sample in runner.collect().samples]
