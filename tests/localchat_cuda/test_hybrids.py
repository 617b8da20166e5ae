"""Hybrid models under the real loop: one text however its states were made, saved, copied and lost."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from localchat.backend_api.interface import Alias, Save, StepPlan
from localchat.engine.events import Done
from localchat.model_files.safetensors import read_safetensors
from localchat_cuda.config.reader import read_config
from localchat_cuda.plan import weight_sizes
from localchat_cuda.runner.step_executor import StepExecutor
from tests.support import tiny_models
from tests.support.tiny_engine_core import (
    NEAR,
    Received,
    TinyLoop,
    assert_same,
    request,
    tiny_runner,
)
from tests.support.tiny_models import Tiny, tokens_of

KINDS = ("qwen3-next", "qwen3.5", "lfm2", "nemotron-h", "granite4-h-moe")
PROMPT = tokens_of(11, 50) * 3
ASKED = request(PROMPT, max_tokens=30, salt="a")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for kind in KINDS:
        found[kind] = tmp_path_factory.mktemp(kind)
        tiny_models.save(tiny_models.reference(kind), found[kind])
    return found


@pytest.fixture
def folder(folders: dict[str, Path]) -> Path:
    return folders["qwen3.5"]


@cache
def in_one_step(folder: Path) -> Received:
    """Return the text to compare with. It is the same for every way."""
    return TinyLoop(tiny_runner(folder, step=200)).say(ASKED)


def cached(told: Received) -> int:
    (done,) = (event for event in told.events if isinstance(event, Done))
    return done.usage.cached_tokens


def in_chunks(folder: Path, tokens: int, **how: Any) -> Received:
    return TinyLoop(tiny_runner(folder, step=tokens, **how)).say(ASKED)


def beside_others(folder: Path) -> Received:
    loop = TinyLoop(tiny_runner(folder, step=40))
    for seed in (13, 14):
        loop.ask(request(tokens_of(seed, 60), max_tokens=40, temperature=1.0))
    loop.step(4)
    id_ = loop.ask(ASKED)
    loop.run_until_idle()
    return loop.received[id_]


def preempted(folder: Path) -> Received:
    loop = TinyLoop(tiny_runner(folder, blocks=5))
    loop.ask(request(tokens_of(12, 100), max_tokens=80))
    id_ = loop.ask(ASKED)
    loop.run_until_idle()
    assert loop.core.stats().preemptions
    return loop.received[id_]


WAYS: dict[str, Callable[[Path], Received]] = {
    "chunks of 1": lambda folder: in_chunks(folder, 1),
    "chunks of 7": lambda folder: in_chunks(folder, 7),
    "chunks of 64": lambda folder: in_chunks(folder, 64),
    "chunks up to saved states": lambda folder: in_chunks(folder, 64, state_interval=50),
    "no saved states": lambda folder: in_chunks(folder, 40, saved_states=0),
    "beside others": beside_others,
    "preempted": preempted,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_the_same_however_it_is_made(
    folders: dict[str, Path], kind: str, way: str
) -> None:
    plain = in_one_step(folders[kind])
    assert len(plain.tokens()) == 30
    assert_same(plain, WAYS[way](folders[kind]))


def test_an_identical_prompt_is_a_hit_and_has_the_same_text(folder: Path) -> None:
    loop = TinyLoop(tiny_runner(folder))
    first = loop.say(ASKED)
    again = loop.say(ASKED)
    assert (cached(first), cached(again)) == (0, len(PROMPT) - 4)
    assert_same(first, again)


def test_the_next_turn_of_a_conversation_goes_on_after_the_answer(folder: Path) -> None:
    loop = TinyLoop(tiny_runner(folder))
    first = loop.say(request(PROMPT, max_tokens=70, salt="a"))
    turn = request((*PROMPT, *first.tokens(), *tokens_of(15, 20)), max_tokens=10, salt="a")
    second = loop.say(turn)
    # The last token of an answer that its limit ended was never computed.
    assert cached(second) == len(PROMPT) + 69
    assert_same(TinyLoop(tiny_runner(folder)).say(turn), second)


def test_another_end_of_a_long_prompt_begins_at_the_last_state_before_it(folder: Path) -> None:
    loop = TinyLoop(tiny_runner(folder, state_interval=60))
    loop.say(ASKED)
    other = request((*PROMPT[:140], *tokens_of(16, 30)), max_tokens=20, salt="a")
    told = loop.say(other)
    assert cached(told) == 120
    assert_same(TinyLoop(tiny_runner(folder)).say(other), told)


def logits_of(model: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_four_bits_are_transformers(kind: str, tmp_path: Path) -> None:
    model, tokens = tiny_models.reference(kind), tokens_of(18, 40)
    tiny_models.save_awq(model, tmp_path)
    found, wanted = Tiny(tmp_path, torch.float32).prompt(tokens, 17), logits_of(model, tokens)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-4


def test_a_checkpoint_that_sees_predicts_and_stacks_its_experts_is_loaded(tmp_path: Path) -> None:
    """As the hub has Qwen3.5-MoE: the text part under a prefix, all experts of a layer in one tensor."""
    model, tokens = tiny_models.reference("qwen3.5-moe"), tokens_of(19, 40)
    held = {
        name.replace("model.", "model.language_model.", 1): tensor.clone()
        for name, tensor in model.state_dict().items()
    }
    held["model.visual.patch_embed.weight"] = torch.zeros(100, 100)
    held["mtp.layers.0.mlp.gate.weight"] = torch.zeros(100, 100)
    safetensors.torch.save_file(held, tmp_path / "model.safetensors")
    text = {**model.config.to_dict(), "architectures": None, "dtype": "float32"}
    raw = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(raw, default=str))
    header = read_safetensors(tmp_path / "model.safetensors")
    own = sum(tensor.numel() for tensor in model.parameters())
    assert weight_sizes.weights_bytes(read_config(tmp_path), [header]) == 4 * own
    found = Tiny(tmp_path, torch.float32).prompt(tokens, 40)
    assert torch.allclose(found, logits_of(model, tokens), atol=2e-3, rtol=1e-4)


def test_states_of_another_salt_are_not_found(folder: Path) -> None:
    loop = TinyLoop(tiny_runner(folder))
    loop.say(ASKED)
    assert cached(loop.say(request(PROMPT, max_tokens=5, salt="b"))) == 0


def test_choices_go_on_from_a_copy_of_the_state_at_the_prompts_end(folder: Path) -> None:
    several = request(PROMPT, max_tokens=20, n=3, temperature=1.0, seed=4)
    loop = TinyLoop(tiny_runner(folder))
    told = loop.say(several)
    plain = Tiny(folder, torch.float32)
    for choice in range(3):
        text = told.logprobs(choice)
        whole = (*PROMPT, *(entry.token for entry in text))
        logits = plain.prompt(whole, 64, choice)[len(PROMPT) - 1 : -1].log_softmax(1)
        found = torch.tensor([entry.logprob for entry in text])
        wanted = logits.gather(1, torch.tensor(whole[len(PROMPT) :])[:, None])[:, 0]
        assert torch.allclose(found, wanted, atol=NEAR * 10)


def test_a_state_is_saved_and_copied_only_while_no_step_changes_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = tiny_runner(folder)
    launch, collect = runner.launch, runner.collect
    in_flight: list[StepPlan] = []
    seen: list[int] = []

    def watched(plan: StepPlan) -> None:
        sources = {op.slot for op in plan.memory if isinstance(op, Save)}
        sources |= {op.src for op in plan.memory if isinstance(op, Alias)}
        seen.extend(sources)
        assert not sources & {row.slot for other in in_flight for row in other.rows}
        launch(plan)
        in_flight.append(plan)

    def collected() -> Any:
        in_flight.pop(0)
        return collect()

    monkeypatch.setattr(runner, "launch", watched)
    monkeypatch.setattr(runner, "collect", collected)
    loop = TinyLoop(runner)
    for seed in range(3):
        loop.ask(request(tokens_of(seed, 90), max_tokens=12, n=2, temperature=1.0))
        loop.step(3)
    loop.run_until_idle()
    assert (
        len(seen) == 6
    )  # of each request the state near its prompt's end, and that of its other choice


def test_a_step_without_memory_that_changed_states_is_computed_again_from_a_whole_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = tiny_runner(folder)
    plain = TinyLoop(tiny_runner(folder)).say(ASKED)
    compute = StepExecutor.compute
    steps = 0

    def sometimes_full(self: Any, *args: Any) -> None:
        nonlocal steps
        steps += 1
        compute(self, *args)
        if steps in (2, 9):
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(StepExecutor, "compute", sometimes_full)
    assert_same(plain, TinyLoop(runner).say(ASKED))


def test_a_step_that_never_has_memory_fails_its_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(StepExecutor, "compute", full)
    loop = TinyLoop(tiny_runner(folder))
    id_ = loop.ask(ASKED)
    loop.run_until_idle()
    assert "out of memory" in str(loop.received[id_].error)


def test_a_cancelled_answer_leaves_a_usable_state(folder: Path) -> None:
    loop = TinyLoop(tiny_runner(folder))
    asked = request(PROMPT, max_tokens=100, salt="a")
    id_ = loop.ask(asked)
    loop.step(90)  # more tokens than a state is saved for, and steps are in flight
    loop.core.cancel(id_)
    loop.run_until_idle()
    known = loop.received[id_].tokens()
    assert len(known) > 64
    # What it had computed is found, as far as it is certain of which tokens.
    on = request((*PROMPT, *known, *tokens_of(17, 6)), max_tokens=20, salt="a")
    assert_same(TinyLoop(tiny_runner(folder)).say(on), loop.say(on))
