"""Drafts of a model's own prediction head: the same text, the right states, and a head that does not pay."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localchat.backend_api.drafter import NO_DRAFT, Draft, DraftAsk
from localchat.backend_api.interface import Runner, StepPlan
from localchat.fit.hardware import Gpu, Machine
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat.model_files.architecture import ModelShape, model_shape
from localchat.model_files.open_gguf import read_header
from localchat_llamacpp.drafter import LlamaDrafter
from localchat_llamacpp.head_states import HeadStates
from localchat_llamacpp.plan.buffers import STATE_WINDOW
from localchat_llamacpp.plan.memory_plan import plan
from localchat_llamacpp.runner import LlamaCppRunner
from tests.support.greedy import NEARLY_GREEDY
from tests.support.llamacpp_core import Core, request
from tests.support.llamacpp_driver import Driver, Start
from tests.support.llamacpp_hybrids import write_qwen35
from tests.support.llamacpp_models import VOCAB, write_glm4moe

RANDOM = np.random.default_rng(8)
PROMPT = [int(token) for token in RANDOM.integers(0, VOCAB - 3, 90)]
KINDS = ["qwen35-exact", "qwen35-random", "glm4moe-exact", "glm4moe-random"]
MACHINE = Machine("", frozenset(), 2, 8_000_000_000, 8_000_000_000)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    return {
        "qwen35-exact": write_qwen35(folder / "qe.gguf", head="exact", scale=0.02),
        "qwen35-random": write_qwen35(folder / "qr.gguf", head="random"),
        "qwen35": write_qwen35(folder / "q.gguf"),
        "glm4moe-exact": write_glm4moe(folder / "ge.gguf", head="exact"),
        "glm4moe-random": write_glm4moe(folder / "gr.gguf", head="random"),
    }


def _drafter(core: Core) -> LlamaDrafter:
    assert core.core._draft_model is not None
    drafter = core.core._draft_model.drafter
    assert isinstance(drafter, LlamaDrafter)
    return drafter


def _free_drafts(core: Core) -> None:
    """Drafts cost nothing, so that there always are some: a tiny model's own time says nothing."""
    model = core.core._draft_model
    assert model is not None
    model.token_s = model.prompt_token_s = 0.0
    model.observe = lambda *_, **__: 0.0  # type: ignore[method-assign]
    model.settle = lambda saved: None  # type: ignore[method-assign]
    model.pause = lambda: None  # type: ignore[method-assign]
    model._pause_left = 0
    model.cost.seconds = lambda rows: 1.0  # type: ignore[method-assign]


def _other_prompt(number: int) -> list[int]:
    return [*PROMPT[number:], *PROMPT[:number]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [NEARLY_GREEDY, 1.0])
@pytest.mark.parametrize("clients", [1, 4])
def test_text_is_that_without_the_head(
    start: Start, kind: str, temperature: float, clients: int
) -> None:
    core = Core(start(kind, head=True).runner)
    _free_drafts(core)
    prompts = [_other_prompt(number) for number in range(clients)]
    ids = [core.ask(request(prompt, max_tokens=60, temperature=temperature)) for prompt in prompts]
    core.core.process_commands()
    requests = core.core.output_processor.requests
    seeds = [requests[id_].sequences[0].sampling.seed for id_ in ids]
    core.run_until_idle()
    plain = Core(start(kind).runner, speculation=False)
    for id_, prompt, seed in zip(ids, prompts, seeds, strict=True):
        asked = request(prompt, max_tokens=60, temperature=temperature, seed=seed)
        assert core.received[id_].tokens == plain.say(asked).tokens
        assert core.received[id_].done.speculation.drafted > 0


def _cost_model_times(core: Core) -> None:
    """Steps and drafts take what they take a large model on a CPU, whatever this machine does meanwhile."""
    model = core.core._draft_model
    assert model is not None
    model.token_s = 0.1
    model.prompt_token_s = 0.01

    def observe(reading: list[int], drafts: list[Draft], *_: float, **__: bool) -> float:
        return 0.01 * sum(reading) + 0.1 * max(len(draft.tokens) for draft in drafts)

    model.observe = observe  # type: ignore[assignment, method-assign]
    model.cost.seconds = lambda rows: 1 + 0.1 * (rows - 1)  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", ["qwen35-exact", "glm4moe-exact"])
@pytest.mark.parametrize("clients", [1, 4])
def test_a_head_that_agrees_gives_several_tokens_a_step(
    start: Start, kind: str, clients: int
) -> None:
    core = Core(start(kind, head=True).runner)
    _cost_model_times(core)
    for temperature in (NEARLY_GREEDY, 1.0):
        ids = [
            core.ask(request(_other_prompt(n), max_tokens=150, temperature=temperature))
            for n in range(clients)
        ]
        core.run_until_idle()
        for id_ in ids:
            received = core.received[id_]
            drafts = received.done.speculation
            assert drafts.accepted >= 0.9 * drafts.drafted
            steps = len(received.tokens) - drafts.accepted
            assert len(received.tokens) > 2 * steps


@pytest.mark.parametrize("kind", ["qwen35-random", "glm4moe-random"])
def test_a_head_that_does_not_pay_is_switched_off(start: Start, kind: str) -> None:
    core = Core(start(kind, head=True).runner)
    _cost_model_times(core)
    # A drawn token may agree by chance, and so may end the pause. The likeliest one does not.
    core.say(request(PROMPT, max_tokens=400, temperature=NEARLY_GREEDY))
    model = core.core._draft_model
    assert model is not None
    assert 0 < model.drafted < 80
    assert "the model's prediction head cost more" in model.off


@pytest.mark.parametrize("kind", ["qwen35-random", "glm4moe-random"])
def test_a_head_that_does_not_pay_costs_a_percent_and_a_few_steps_at_most(
    start: Start, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in plain steps: a budget of two, what plain steps add to it, and a last draft beyond it."""
    runner = start(kind, head=True).runner
    core = Core(runner)
    _cost_model_times(core)
    model = core.core._draft_model
    assert model is not None
    cost = 0.0
    launch = runner.launch
    observe = model.observe

    def counted_launch(plan: StepPlan) -> None:
        nonlocal cost
        rows = sum(row.width for row in plan.unmoved().rows)
        if plan.positions and rows < len(PROMPT):
            cost += model.cost.seconds(rows)
        launch(plan)

    def counted_observe(*args: Any, **options: Any) -> float:
        nonlocal cost
        seconds = observe(*args, **options)
        cost += seconds
        return seconds

    monkeypatch.setattr(runner, "launch", counted_launch)
    monkeypatch.setattr(model, "observe", counted_observe)
    for tokens in (150, 600):
        cost = 0.0
        core.say(request(PROMPT, max_tokens=tokens, temperature=1.0))
        assert cost < tokens + 8 + 0.01 * tokens
    assert model.drafted


def test_a_paused_head_stores_no_states_and_the_native_context_stays_as_it_is(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Switching the native states on or off makes llama.cpp reserve its graphs again."""
    core = Core(start("glm4moe-random", head=True).runner)
    model = core.core._draft_model
    assert model is not None
    drafter = _drafter(core)
    assert drafter.states is not None
    core.ask(request(PROMPT, max_tokens=200, temperature=1.0))
    core.step(3)
    writes: list[int] = []
    switches: list[bool] = []
    runner = core.core.runner
    assert isinstance(runner, LlamaCppRunner)
    monkeypatch.setattr(drafter.states, "write", lambda seq, start, states: writes.append(start))
    monkeypatch.setattr(runner, "_api", _Switches(runner._api, switches))
    model.pause()
    core.step(40)
    assert model.paused
    assert not writes
    core.step(40)
    assert writes
    assert writes == list(range(writes[0], writes[0] + len(writes)))
    assert not switches


class _Switches:
    """The library, with a record of each switch of the states."""

    def __init__(self, api: Any, switches: list[bool]) -> None:
        self._api = api
        self._switches = switches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def llama_set_embeddings_nextn(self, context: int, value: bool, masked: bool) -> None:
        self._switches.append(value)
        self._api.llama_set_embeddings_nextn(context, value, masked)


@pytest.mark.parametrize("kind", ["qwen35-random", "glm4moe-random"])
def test_greedy_and_seeded_answers_have_the_bits_of_a_load_without_the_head(
    start: Start, kind: str
) -> None:
    cores = [Core(start(kind, head=head).runner) for head in (True, False)]
    for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 7}):
        asked = request(PROMPT, max_tokens=40, **sampling)
        with_head, without = (core.say(asked) for core in cores)
        assert with_head.done.speculation.drafted == 0
        logprobs = [
            [entry.logprob for event in one.events for entry in getattr(event, "logprobs", ())]
            for one in (with_head, without)
        ]
        assert logprobs[0] == logprobs[1]


class _Recorder:
    """Records the drafts of a drafter."""

    def __init__(self, drafter: LlamaDrafter) -> None:
        self.drafts: list[tuple[list[int], DraftAsk, Draft]] = []
        self._draft = drafter.draft
        drafter.draft = self.draft  # type: ignore[method-assign]

    def draft(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        drafts = self._draft(asks)
        self.drafts += [
            ([*ask.tokens], ask, draft)
            for ask, draft in zip(asks, drafts, strict=True)
            if draft is not NO_DRAFT
        ]
        return drafts


def _fresh_draft(runner: Runner, text: Sequence[int], ask: DraftAsk, count: int) -> Draft:
    """Return the draft of a head that reads the model's states of the whole text at once."""
    assert isinstance(runner, LlamaCppRunner)
    Driver(runner).prefill(text[:-1], seq=ask.seq, sampling=ask.sampling)
    ask = ask._replace(tokens=text[ask.start :], limit=count, goes_on=lambda _: True)
    (draft,) = runner.drafter.draft([ask])
    return draft


@pytest.mark.parametrize("kind", ["qwen35-random", "glm4moe-random"])
def test_drafts_are_those_of_a_head_that_reads_all_states_at_once(start: Start, kind: str) -> None:
    """States after rejected drafts, of recomputed tokens, and behind a reused prefix."""
    core = Core(start(kind, head=True).runner)
    _free_drafts(core)
    recorder = _Recorder(_drafter(core))
    first = core.say(request(PROMPT, max_tokens=40))
    longer = [*PROMPT, *first.tokens, *PROMPT[:9]]
    second = core.say(request(longer, max_tokens=40))
    assert second.done.usage.cached_tokens > 0
    texts = ([*PROMPT, *first.tokens], [*longer, *second.tokens])
    compared = 0
    agreed = 0
    for tokens, ask, draft in recorder.drafts[::5]:
        length = ask.start + len(tokens)
        text = next(one[:length] for one in texts if one[ask.start : length] == tokens)
        fresh = _fresh_draft(start(kind, head=True).runner, text, ask, len(draft.tokens))
        compared += len(draft.tokens)
        agreed += sum(a == b for a, b in zip(draft.tokens, fresh.tokens, strict=True))
        assert draft.chances[0] == pytest.approx(fresh.chances[0], abs=0.02)
    assert compared > 20
    # Rounding turns a token now and then.
    assert agreed > 0.9 * compared


def test_drafts_go_on_after_a_preemption_and_a_restore(start: Start) -> None:
    """Four answers in a cache for two: the head reads again what it can."""
    core = Core(start("qwen35-exact", head=True, context=512, slots=4).runner)
    _free_drafts(core)
    ids = [core.ask(request(_other_prompt(n), max_tokens=120)) for n in range(4)]
    core.run_until_idle()
    for id_ in ids:
        assert len(core.received[id_].tokens) == 120
        assert core.received[id_].done.speculation.accepted > 0


def test_a_cancelled_request_leaves_no_text_and_no_states(start: Start) -> None:
    core = Core(start("qwen35-exact", head=True).runner)
    _free_drafts(core)
    id_ = core.ask(request(PROMPT, max_tokens=200))
    core.step(8)
    drafter = _drafter(core)
    assert drafter._texts
    core.core.cancel(id_)
    core.run_until_idle()
    core.say(request(PROMPT[:5], max_tokens=1))
    assert not drafter._texts
    assert drafter.states is not None
    assert not drafter.states._rings


def test_a_long_text_is_read_from_its_last_part(start: Start) -> None:
    """The head's cache is smaller than the model's: a text that outgrows it starts later."""
    core = Core(start("glm4moe-exact", head=True).runner)
    _free_drafts(core)
    drafter = _drafter(core)
    drafter._spec = drafter._spec._replace(context_tokens=128)
    received = core.say(request(PROMPT, max_tokens=300))
    assert received.done.speculation.accepted > 200
    assert max(drafter._slots.lengths) <= 128


# States


def _numbered(start: int, end: int) -> NDArray[np.float32]:
    return np.arange(start, end, dtype=np.float32)[:, None]


def test_states_are_those_before_each_token() -> None:
    states = HeadStates(1)
    assert states.earliest(3) > 1_000_000
    assert states.before(3, 1, 2) is None
    states.write(3, 10, _numbered(10, 20))
    assert states.earliest(3) == 11
    found = states.before(3, 11, 21)
    assert found is not None
    assert found.ravel().tolist() == list(range(10, 20))
    assert states.before(3, 10, 12) is None
    assert states.before(3, 11, 22) is None


def test_a_rewritten_state_ends_the_ring_and_a_gap_begins_it() -> None:
    states = HeadStates(1)
    states.write(0, 0, _numbered(0, 20))
    states.write(0, 12, _numbered(112, 115))
    assert states.before(0, 12, 17) is None
    found = states.before(0, 12, 16)
    assert found is not None
    assert found.ravel().tolist() == [11, 112, 113, 114]
    states.write(0, 30, _numbered(30, 31))
    assert states.earliest(0) == 31


def test_the_ring_keeps_the_last_states() -> None:
    states = HeadStates(1)
    states.write(0, 0, _numbered(0, 3 * STATE_WINDOW))
    states.write(0, 3 * STATE_WINDOW, _numbered(3 * STATE_WINDOW, 3 * STATE_WINDOW + 5))
    end = 3 * STATE_WINDOW + 5
    assert states.earliest(0) == end - STATE_WINDOW + 1
    found = states.before(0, states.earliest(0), end + 1)
    assert found is not None
    assert found.ravel().tolist() == list(range(end - STATE_WINDOW, end))


# Plans


def _shape(path: Path) -> ModelShape:
    return model_shape(read_header(path))


def test_the_plan_counts_the_head(models: dict[str, Path]) -> None:
    shape = _shape(models["glm4moe-exact"])
    plans = [
        plan(
            shape,
            LoadOptions(context_tokens=1024, max_slots=4, speculation=speculation),
            MACHINE,
            can_offload=False,
        )
        for speculation in (True, False)
    ]
    assert plans[0].prediction_head
    head_bytes = sum(weight.size_bytes for weight in shape.head)
    assert plans[0].weights_bytes - plans[1].weights_bytes == head_bytes
    assert plans[0].kv_bytes > plans[1].kv_bytes
    taken = plans[0].total_bytes - plans[1].total_bytes
    assert re.search(r"head drafts, and takes [\d.]+ MB", plans[0].notes[-1])
    assert taken > head_bytes + 4 * 4 * STATE_WINDOW * shape.embedding


def test_the_head_is_left_out_without_speculation(models: dict[str, Path]) -> None:
    shape = _shape(models["qwen35-exact"])
    options = LoadOptions(speculation=False)
    found = plan(shape, options, MACHINE, can_offload=False)
    assert not found.prediction_head


def test_the_head_does_not_shorten_the_context(models: dict[str, Path]) -> None:
    shape = _shape(models["qwen35-exact"])

    def planned(ram_bytes: int) -> MemoryPlan:
        tight = replace(MACHINE, ram_free_bytes=ram_bytes)
        return plan(shape, LoadOptions(), tight, can_offload=False)

    roomy = planned(MACHINE.ram_free_bytes)
    assert roomy.prediction_head
    first = roomy.total_bytes + MACHINE.ram_free_bytes - roomy.free_bytes
    tight = next(
        found
        for ram_bytes in range(first, 0, -500_000)
        if not (found := planned(ram_bytes)).prediction_head
    )
    assert tight.fits
    assert tight.context_tokens == roomy.context_tokens
    assert "the context would be shorter" in tight.notes[-1]


def test_a_graphics_card_runs_the_model_without_its_head(models: dict[str, Path]) -> None:
    card = replace(MACHINE, gpus=(Gpu(0, "RTX 4090", 24 * 10**9, 21 * 10**9),))
    shape = _shape(models["qwen35-exact"])
    for machine, drafts in ((card, False), (replace(MACHINE, unified_memory=True), True)):
        found = plan(shape, LoadOptions(), machine, can_offload=True)
        assert found.gpu_layers > 0
        assert found.prediction_head is drafts


def test_a_model_without_a_head_has_no_note(models: dict[str, Path]) -> None:
    found = plan(
        _shape(models["qwen35"]),
        LoadOptions(),
        MACHINE,
        can_offload=False,
    )
    assert not any("head" in note for note in found.notes)


def test_a_load_after_a_crash_leaves_the_head_out(start: Start) -> None:
    assert start("qwen35-exact", head=True).runner.capabilities.draft_model
    assert not start("qwen35-exact").runner.capabilities.draft_model
