"""The runner under the real loop, on a CPU over the kernels' references: right, and the same however it is
cut, cached, set back, guessed ahead or mixed."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from localchat.backend_api.interface import (
    LAST,
    Copy,
    Enter,
    LogitsPosition,
    Mask,
    SamplingParams,
    StepPlan,
    StepRow,
)
from localchat.backend_api.sampling.reference import Sampler
from localchat.backend_api.sampling.token_counts import TokenCounts
from localchat.engine.events import Done
from localchat.engine.request import GenerateRequest
from localchat.errors import DeviceFault
from localchat_cuda.compile_ahead.job import FEW_ROWS, Phase
from localchat_cuda.compile_ahead.workers import CompileAhead
from localchat_cuda.kernels.int4.pack import E4M3Copy
from localchat_cuda.runner.common_steps import common_steps
from localchat_cuda.runner.runner import CudaRunner
from localchat_cuda.runner.step_output import PendingStep
from localchat_cuda.weights.model_weights import with_unpacked
from tests.support import tiny_models
from tests.support.tiny_engine_core import ON_GPU, Received, TinyLoop, request, tiny_runner
from tests.support.tiny_models import KINDS, VOCABULARY, tokens_of

GREEDY = SamplingParams(temperature=0.0)
NEAR = 0.1 if ON_GPU else 1e-3
"""Where texts may part: the two best candidates so close. On a GPU numbers are fp16."""
CLOSE = 0.3 if ON_GPU else 2e-3
MIXTURES = (
    *("mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss"),
    *("deepseek-v2", "deepseek-v2-q", "glm4-moe-lite"),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """A checkpoint of every architecture, beside its model in transformers."""
    found = {}
    for kind in sorted(KINDS):
        folder = tmp_path_factory.mktemp(kind)
        model = tiny_models.reference(kind)
        tiny_models.save(model, folder)
        found[kind] = (model, folder)
    return found


@pytest.fixture
def folder(models: dict[str, tuple[Any, Path]]) -> Path:
    return models["qwen3"][1]


def apart(one: Received, other: Received) -> float:
    """How far the two best candidates were apart where two texts first differ; 0 where they are equal."""
    for mine, theirs in zip(one.logprobs(), other.logprobs(), strict=True):
        if mine.token != theirs.token:
            return mine.top[0][2] - mine.top[1][2]
    return 0.0


# ---------------------------------------------------------------------------- against transformers


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_prompt_logprobs_and_greedy_text_are_transformers(
    models: dict[str, tuple[Any, Path]], kind: str
) -> None:
    model, folder = models[kind]
    prompt = tokens_of(2, 90)
    # The text ends in the third page.
    told = TinyLoop(tiny_runner(folder)).say(
        request(prompt, max_tokens=42, prompt_logprobs=3, logprobs=0)
    )
    # Each token is the best one after those before it: all are computed at once.
    whole = torch.tensor([[*prompt, *told.tokens()]])
    assert whole.shape[1] == 90 + 42
    with torch.no_grad():
        logs = model(whole).logits[0].log_softmax(-1)
    assert told.tokens() == logs[89:-1].argmax(1).tolist() or ON_GPU
    own = [float(logs[i, token]) for i, token in enumerate(whole[0, 1:].tolist())]
    found = [entry.logprob for entry in told.prompt_logprobs]
    # In fp16 a mixture may choose another expert where two are nearly as likely.
    apart = np.abs(np.subtract(found, own[:89]))
    assert np.quantile(apart, 0.9 if ON_GPU and kind in MIXTURES else 1) < CLOSE
    if not ON_GPU:
        assert np.allclose([one.logprob for one in told.logprobs()], own[89:], atol=CLOSE)
        best = logs[:89].topk(3, 1)
        assert [[t for t, *_ in e.top] for e in told.prompt_logprobs] == best.indices.tolist()


# ---------------------------------------------------------------------------- the same text


def variants(folder: Path) -> dict[str, Received]:
    """One greedy text, made in every way that should not matter."""
    prompt = tokens_of(11, 50) * 3
    asked = request(prompt, max_tokens=30, salt="a")
    found = {f"chunks of {n}": TinyLoop(tiny_runner(folder, step=n)).say(asked) for n in (1, 7, 64)}
    warm = TinyLoop(tiny_runner(folder))
    warm.say(asked)
    found["warm"] = warm.say(asked)
    found["drafts"] = TinyLoop(tiny_runner(folder)).say(
        request(prompt, max_tokens=30, speculation=True)
    )
    found["preempted"] = _preempted(folder, asked)
    found["mixed"] = _mixed(folder, asked)
    return found


def _preempted(folder: Path, asked: GenerateRequest) -> Received:
    # 150 and 30 tokens take three pages; five are there, so the younger of two cannot stay.
    loop = TinyLoop(tiny_runner(folder, blocks=5))
    loop.ask(request(tokens_of(12, 100), max_tokens=80))
    id_ = loop.ask(asked)
    loop.run_until_idle()
    assert loop.core.stats().preemptions
    return loop.received[id_]


def _mixed(folder: Path, asked: GenerateRequest) -> Received:
    loop = TinyLoop(tiny_runner(folder, step=40))
    for seed in (13, 14):
        loop.ask(request(tokens_of(seed, 60), max_tokens=40, temperature=1.0))
    loop.step(4)
    id_ = loop.ask(asked)
    loop.run_until_idle()
    return loop.received[id_]


@pytest.mark.parametrize("kind", ["qwen3", "gemma4-small", "glm4-moe-lite"])
def test_greedy_text_is_the_same_however_it_is_made(
    models: dict[str, tuple[Any, Path]], kind: str
) -> None:
    folder = models[kind][1]
    plain = TinyLoop(tiny_runner(folder)).say(
        request(tokens_of(11, 50) * 3, max_tokens=30, salt="a")
    )
    for way, told in variants(folder).items():
        assert apart(plain, told) < NEAR, way


def test_a_step_of_packed_weights_is_the_same_alone_and_among_others(tmp_path: Path) -> None:
    tiny_models.save_awq(tiny_models.reference("qwen3"), tmp_path)
    asked = request(tokens_of(21, 40), max_tokens=20)
    alone = TinyLoop(tiny_runner(tmp_path)).say(asked)
    # activations are rounded to 16 bits a group up to 8 rows and to fp16 beyond
    assert apart(alone, _mixed(tmp_path, asked)) < 0.1


# ---------------------------------------------------------------------------- points


def step(runner: CudaRunner, number: int, *rows: StepRow, **fields: Any) -> dict[int, Any]:
    runner.launch(StepPlan(number, rows, **fields))
    result = runner.collect()
    assert result.status == "ok"
    return {sample.index: sample for sample in result.samples}


def compute_logits(folder: Path, tokens: tuple[int, ...]) -> np.ndarray:
    return tiny_models.Tiny(folder, torch.float32).prompt(tokens, 64)[-1].numpy()


def test_logits_positions_sample_by_their_own_settings_from_a_shared_row(folder: Path) -> None:
    tokens = tokens_of(31, 20)
    many = [
        SamplingParams(seed=5, choice=i, temperature=1.3, top_p=1.0, min_p=0.0, top_logprobs=2)
        for i in range(3)
    ]
    allowed = bytes([0b10101010] * 20)
    enter = (
        Enter(1, 0, tokens, 20, many[0]), Enter(2, -1, tokens, 20, many[1]),
        Enter(3, -1, tokens, 20, many[2]),
    )  # fmt: skip
    positions = tuple(LogitsPosition(0, 19, seq) for seq in (1, 2, 3))
    found = step(
        tiny_runner(folder), 1, StepRow(1, 0, 0, tokens, (), (0,)), positions=positions, enter=enter,
        masks=(Mask(2, allowed),),
    )  # fmt: skip
    row, sampler = compute_logits(folder, tokens), Sampler(VOCABULARY)
    for i, params in enumerate(many):
        mask = allowed if i == 2 else None
        wanted = sampler.draw(row, params, 20, None, mask)
        assert found[i].token == wanted.token
        assert found[i].logprob == pytest.approx(wanted.logprob, abs=CLOSE)
        assert [t for t, _ in found[i].top] == [t for t, _ in wanted.top]


HARSH = SamplingParams(
    temperature=0.0, repetition_penalty=1.3, frequency_penalty=3.0, presence_penalty=1.0
)
DRY = SamplingParams(
    temperature=0.0, dry_multiplier=9.0, dry_allowed_length=1, dry_breakers=b"\x01"
)
SHAPED = SamplingParams(
    temperature=1.5, seed=4, top_n_sigma=3.0, xtc_probability=0.5, xtc_threshold=0.01,
    dynatemp_range=0.5, dry_multiplier=2.0, dry_allowed_length=1,
)  # fmt: skip


@pytest.mark.parametrize("harsh", [HARSH, DRY, SHAPED], ids=["counts", "DRY", "all rare"])
def test_penalties_see_the_cached_prefix_drafts_and_tokens_still_in_flight(
    folder: Path, harsh: SamplingParams
) -> None:
    tokens = (*tokens_of(32, 10), *tokens_of(32, 10))
    runner = tiny_runner(folder)
    enter = (Enter(1, 0, tokens, 20, harsh),)
    runner.launch(
        StepPlan(1, (StepRow(1, 0, 0, tokens, (), (0,)),), (LogitsPosition(0, 19, 1),), enter=enter)
    )
    runner.launch(StepPlan(2, (StepRow(1, 0, 20, LAST),), (LogitsPosition(0, 0, 1),)))
    drawn = [runner.collect().samples[0].token, runner.collect().samples[0].token]
    text, sampler = list(tokens), Sampler(VOCABULARY)
    for token in drawn:
        row = compute_logits(folder, tuple(text))
        # In fp16 a draw at the limit between two tokens may be the other one.
        assert ON_GPU or token == sampler.draw(row, harsh, len(text), TokenCounts(text, 20)).token
        text.append(token)
    # Verified drafts: point i sees the drafts before it; what follows a wrong one is left out.
    right = sampler.draw(
        compute_logits(folder, tuple(text)), harsh, len(text), TokenCounts(text, 20)
    ).token
    other = (right + 1) % VOCABULARY
    positions = tuple(LogitsPosition(0, i, 1) for i in range(4))
    row_plan = StepRow(1, 0, 21, (text[-1],), (right, other, 3))
    found = step(runner, 3, row_plan, positions=positions)
    if ON_GPU:
        return
    assert found[0].token == right
    text.append(right)
    second = sampler.draw(
        compute_logits(folder, tuple(text)), harsh, len(text), TokenCounts(text, 20)
    ).token
    assert found[1].token == second
    assert (2 in found) == (second == other)


def test_a_fork_goes_on_from_a_copied_page(folder: Path) -> None:
    tokens = tokens_of(33, 70)
    runner = tiny_runner(folder)
    enter = (Enter(1, 0, tokens, 70, GREEDY),)
    step(
        runner,
        1,
        StepRow(1, 0, 0, tokens, (), (4, 2)),
        positions=(LogitsPosition(0, 69, 1),),
        enter=enter,
    )
    child = (*tokens, 9)
    found = step(
        runner, 2, StepRow(2, 3, 70, (9,), (), (4, 7)), positions=(LogitsPosition(0, 0, 2),),
        memory=(Copy(2, 7, 6),), enter=(Enter(2, 3, child, 70, GREEDY),),
    )  # fmt: skip
    assert found[0].token == int(compute_logits(folder, child).argmax())


def test_more_forks_than_rows_find_room(folder: Path) -> None:
    tokens = tokens_of(34, 5)
    runner = tiny_runner(folder)
    enter = (Enter(1, 0, tokens, 5, GREEDY), *(
        Enter(n, -1, tokens, 5, SamplingParams(temperature=2.0, seed=1, choice=n, top_p=1.0))
        for n in range(2, 90)
    ))  # fmt: skip
    positions = tuple(LogitsPosition(0, 4, one.seq) for one in enter)
    found = step(runner, 1, StepRow(1, 0, 0, tokens, (), (0,)), positions=positions, enter=enter)
    row, sampler = compute_logits(folder, tokens), Sampler(VOCABULARY)
    wanted = [sampler.draw(row, one.sampling, 5).token for one in enter]
    assert [found[i].token for i in range(89)] == wanted


def test_choices_with_penalties_count_the_tokens_of_their_request(folder: Path) -> None:
    tokens = tokens_of(35, 30)
    runner = tiny_runner(folder)
    words = runner.table.token_table.numel()
    shared = SamplingParams(
        temperature=1.5, seed=3, top_p=1.0, min_p=0.0, repetition_penalty=1.8, frequency_penalty=1.0
    )
    enter = tuple(
        Enter(n, 2 if n == 1 else -1, tokens, 25, replace(shared, choice=n)) for n in range(1, 80)
    )
    positions = tuple(LogitsPosition(0, 29, one.seq) for one in enter)
    found = step(runner, 1, StepRow(1, 2, 0, tokens, (), (0,)), positions=positions, enter=enter)
    row, sampler = compute_logits(folder, tokens), Sampler(VOCABULARY)
    counts = TokenCounts(tokens, 25)
    wanted = [sampler.draw(row, one.sampling, 30, counts).token for one in enter]
    assert [found[i].token for i in range(79)] == wanted
    assert runner.table.token_table.numel() == words, "a choice takes a context of its own"


# ---------------------------------------------------------------------------- steps that come back short


NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory"),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize(
    "part", ["prepare", "store_tokens", "write_settings", "apply_settings", "compute"]
)
def test_out_of_memory_is_a_result_and_the_next_step_computes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, part: str, error: Exception
) -> None:
    runner = tiny_runner(folder)
    tokens = tokens_of(41, 30)
    owner: Any = {
        "prepare": runner._executor,
        "store_tokens": runner.table,
        "write_settings": runner._sampler,
        "apply_settings": runner._sampler,
        "compute": runner._executor,
    }[part]

    def full(*_: Any) -> Any:
        raise error

    harsh = SamplingParams(temperature=0.0, repetition_penalty=1.7)
    enter = (Enter(1, 0, tokens, 30, harsh),)
    with monkeypatch.context() as patch:
        patch.setattr(owner, part, full)
        row = StepRow(1, 0, 0, tokens, (), (0,))
        runner.launch(StepPlan(1, (row,), (LogitsPosition(0, 29, 1),), enter=enter))
    runner.launch(StepPlan(2, (StepRow(1, 0, 30, LAST),), (LogitsPosition(0, 0, 1),)))
    first, second = runner.collect(), runner.collect()
    assert (first.status, first.computed, first.samples) == ("out_of_memory", (0,), ())
    assert first.notes
    assert (second.status, second.computed) == ("aborted", (0,))
    # The table of pages grew all the same, and the settings are the sequence's.
    found = step(runner, 3, StepRow(1, 0, 0, tokens), positions=(LogitsPosition(0, 29, 1),))
    logits = compute_logits(folder, tokens)
    wanted = Sampler(VOCABULARY).draw(logits, harsh, 30, TokenCounts(tokens, 30))
    assert found[0].token == wanted.token != int(logits.argmax())


ILLEGAL = torch.AcceleratorError(
    "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later"
)


def test_an_error_of_the_gpu_names_the_step_that_was_launched_last(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = tiny_runner(folder)

    def wrong(*_: Any) -> Any:
        raise ILLEGAL

    monkeypatch.setattr(runner._executor, "compute", wrong)
    enter = (Enter(1, 0, (1, 2), 2, GREEDY),)
    row = StepRow(1, 0, 0, (1, 2), (), (0,))
    with pytest.raises(
        DeviceFault, match=r"illegal memory access.*step 7, StepShape\(tokens=2"
    ) as caught:
        runner.launch(StepPlan(7, (row,), (LogitsPosition(0, 1, 1),), enter=enter))
    assert torch.__version__ in caught.value.message and "\n" not in caught.value.message


def test_an_error_that_comes_back_late_names_every_step_in_flight(folder: Path) -> None:
    runner = tiny_runner(folder)
    tokens = tokens_of(36, 30)
    enter = (Enter(1, 0, tokens, 30, GREEDY),)
    row = StepRow(1, 0, 0, tokens, (), (0,))
    runner.launch(StepPlan(4, (row,), (LogitsPosition(0, 29, 1),), enter=enter))
    runner.launch(StepPlan(5, (StepRow(1, 0, 30, LAST),), (LogitsPosition(0, 0, 1),)))

    class Event:
        def synchronize(self) -> None:
            raise ILLEGAL

    runner._pending[0].events = (Event(), Event())  # type: ignore[assignment]
    with pytest.raises(DeviceFault, match=r"step 4, .*step 5, "):
        runner.collect()


def test_only_a_step_behind_another_is_waited_for_asleep(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = tiny_runner(folder)
    asleep: list[bool] = []
    monkeypatch.setattr(runner, "_event", lambda *, blocking=False: asleep.append(blocking))
    tokens = tokens_of(37, 30)
    enter = (Enter(1, 0, tokens, 30, GREEDY),)
    row = StepRow(1, 0, 0, tokens, (), (0,))
    runner.launch(StepPlan(1, (row,), (LogitsPosition(0, 29, 1),), enter=enter))
    runner.launch(StepPlan(2, (StepRow(1, 0, 30, LAST),), (LogitsPosition(0, 0, 1),)))
    runner.collect()
    runner.launch(StepPlan(3, (StepRow(1, 0, 31, LAST),), (LogitsPosition(0, 0, 1),)))
    runner.collect()
    runner.collect()
    runner.launch(StepPlan(4, (StepRow(1, 0, 32, LAST),), (LogitsPosition(0, 0, 1),)))
    assert asleep[1::2] == [False, True, True, False]


def test_a_failure_that_is_not_the_gpus_is_not_hidden(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = tiny_runner(folder)

    def wrong(*_: Any) -> Any:
        raise ValueError("shapes differ")

    monkeypatch.setattr(runner._executor, "compute", wrong)
    row = StepRow(1, 0, 0, (1, 2), (), (0,))
    enter = (Enter(1, 0, (1, 2), 2, GREEDY),)
    with pytest.raises(ValueError, match="shapes differ"):
        runner.launch(StepPlan(1, (row,), (LogitsPosition(0, 1, 1),), enter=enter))


def test_requests_outlive_steps_without_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(tokens_of(42, 60), max_tokens=20)
    plain = TinyLoop(tiny_runner(folder)).say(asked)
    loop = TinyLoop(tiny_runner(folder))
    model = loop.runner._model
    assert model is not None
    hidden_states, calls = model.hidden_states, [0]

    def sometimes(inputs: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] % 7 == 3:
            raise torch.OutOfMemoryError
        return hidden_states(inputs)

    monkeypatch.setattr(model, "hidden_states", sometimes)
    others = [loop.ask(request(tokens_of(43 + i, 40), max_tokens=20)) for i in range(3)]
    told = loop.received[loop.ask(asked)]
    loop.run_until_idle()
    assert told.error is None and apart(plain, told) < NEAR
    assert all(loop.received[id_].error is None for id_ in others)
    assert any("memory" in sentence for sentence in loop.sent)


class KernelsInTheMaking(CompileAhead):
    """Stands for compiling processes, and records what is waited for."""

    def __init__(self) -> None:
        self.waits: list[Phase] = []
        self.compiled = Phase.ONE_ROW
        self.calls: list[str] = []
        self.idled = False
        self.stopped = False

    def finished(self) -> bool:
        return self.reached(Phase.ALL)

    def reached(self, phase: Phase) -> bool:
        return phase <= self.compiled

    def hurry(self) -> None:
        self.calls.append("hurry")

    def reach(self, phase: Phase) -> None:
        self.compiled = phase

    def wait(self, phase: Phase = Phase.ALL) -> None:
        self.waits.append(phase)

    def idle(self, seconds: float) -> None:
        self.idled = True

    def stop(self) -> None:
        self.stopped = True


def test_a_step_waits_for_the_kernels_of_its_phase(folder: Path) -> None:
    runner = tiny_runner(folder)
    compiling = KernelsInTheMaking()
    runner.compiling = compiling
    assert runner.warm_up_next()
    assert compiling.idled
    assert not compiling.waits
    loop = TinyLoop(runner)
    loop.say(request(tokens_of(2, 20), max_tokens=3))
    assert set(compiling.waits) == {Phase.ONE_ROW}
    compiling.waits.clear()
    compiling.compiled = Phase.ALL
    loop.say(request(tokens_of(5, 20), max_tokens=3))
    assert not compiling.waits
    assert runner.compiling is None


def test_a_short_prompt_does_not_wait_for_its_own_kernels(folder: Path) -> None:
    asked = request(tokens_of(3, 9), max_tokens=12)
    loop = TinyLoop(tiny_runner(folder))
    plain = loop.received[loop.ask(asked)]
    loop.run_until_idle()
    runner = tiny_runner(folder)
    compiling = KernelsInTheMaking()
    runner.compiling = compiling
    loop = TinyLoop(runner)
    told = loop.received[loop.ask(asked)]
    loop.run_until_idle()
    assert set(compiling.waits) == {Phase.ONE_ROW}
    assert apart(plain, told) < NEAR
    compiling.reach(Phase.SHORT_PROMPT)
    loop.say(request(tokens_of(4, 9), max_tokens=2))
    assert set(compiling.waits) == {Phase.ONE_ROW, Phase.SHORT_PROMPT}


def test_while_kernels_compile_requests_run_one_after_the_other(folder: Path) -> None:
    runner = tiny_runner(folder, slots=12, blocks=80)
    runner.capabilities = replace(runner.capabilities, prepares_steps=True)
    compiling = KernelsInTheMaking()
    runner.compiling = compiling
    loop = TinyLoop(runner)
    running = loop.core._scheduler.running

    def ask_and_step(count: int) -> int:
        """Ask, and return the most sequences that run at once."""
        for seed in range(count):
            loop.ask(request(tokens_of(seed, 20), max_tokens=20))
        most = 0
        for _ in range(8):
            loop.core.process_commands()
            loop.core.step()
            most = max(most, len(running))
        return most

    assert ask_and_step(1) == 1
    assert compiling.calls == []
    assert ask_and_step(10) == 1
    assert "hurry" in compiling.calls
    compiling.reach(Phase.FEW_ROWS)
    assert ask_and_step(0) == FEW_ROWS
    compiling.reach(Phase.ALL)
    assert ask_and_step(0) > FEW_ROWS
    loop.run_until_idle()
    assert set(compiling.waits) <= {Phase.ONE_ROW, Phase.FEW_ROWS}


def test_a_closed_runner_stops_compiling(folder: Path) -> None:
    runner = tiny_runner(folder)
    compiling = KernelsInTheMaking()
    runner.compiling = compiling
    runner.close()
    assert compiling.stopped


def test_a_closed_runner_holds_nothing(folder: Path) -> None:
    runner = tiny_runner(folder)
    assert runner.memory().weights_bytes > 0
    runner.close()
    runner.close()
    assert runner.memory() == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("host_s", "elapsed_s", "graphs", "wanted"),
    [
        (0.001, 0.0015, True, True),  # one row, replayed
        (0.035, 0.034, True, False),  # kernel by kernel: the GPU waited
        (0.84, 0.8415, True, False),  # a kernel was compiled
        (0.041, 0.126, True, True),  # thousands of rows
        (0.035, 0.034, False, True),  # never any other way
    ],
)
def test_a_step_that_waited_for_the_host_is_not_typical(
    host_s: float, elapsed_s: float, graphs: bool, wanted: bool
) -> None:
    runner = SimpleNamespace(graphs=SimpleNamespace(enabled=graphs))
    step_ = PendingStep(StepPlan(1), 0.0, host_s=host_s)
    assert CudaRunner._is_typical(runner, step_, elapsed_s) == wanted  # type: ignore[arg-type]
    step_.typical = False
    assert not CudaRunner._is_typical(runner, step_, elapsed_s)  # type: ignore[arg-type]


def test_common_steps_of_padding_write_where_no_sequence_reads(folder: Path) -> None:
    """They run while prefixes of earlier requests are in the cache."""
    runner = tiny_runner(folder)
    loop = TinyLoop(runner)
    asked = request(tokens_of(31, 60), max_tokens=10)
    first = loop.say(asked)
    model = runner._model
    assert model is not None
    steps = list(common_steps(runner.capabilities, runner.table.scratch))
    for spans in steps:
        with runner.on_stream():
            runner._buffer.begin_step()
            prepared = runner._executor.prepare_padding(spans)
            runner._buffer.send()
            runner._executor.compute(PendingStep(StepPlan(0, ()), 0.0), prepared)
    assert {len(spans) for spans in steps} >= {1, 2, 4, 8}
    again = loop.say(asked)
    assert isinstance(again.events[-1], Done) and again.events[-1].usage.cached_tokens > 0
    assert apart(first, again) < NEAR


def test_prompts_read_unpacked_weights_and_say_the_same(tmp_path: Path) -> None:
    tiny_models.save_awq(tiny_models.reference("qwen3"), tmp_path)
    asked = request(tokens_of(34, 250), max_tokens=1, prompt_logprobs=0)
    found = []
    for unpacked in (False, True):
        runner = tiny_runner(tmp_path, step=256)
        model = runner._model
        assert model is not None
        if unpacked:
            model.weights = with_unpacked(model.weights, model.pages.dtype)
            assert model.weights.copy_type in (torch.Tensor, E4M3Copy)
        told = TinyLoop(runner).say(asked)
        found.append(torch.tensor([entry.logprob for entry in told.prompt_logprobs]))
    assert float((found[0] - found[1]).abs().max()) < 0.1  # activations of packed steps are rounded
