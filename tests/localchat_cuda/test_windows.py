"""Windowed layers with pages of their own, under the real loop: one text, whatever pages were given back."""

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from localchat.backend_api.interface import StepPlan
from localchat.core.kv_cache.paged_windows import WindowedKVCacheManager
from localchat.engine.events import Done
from localchat_cuda.runner.runner import CudaRunner
from localchat_cuda.runner.step_executor import StepExecutor
from scripts.bench.cuda.stress import stress
from tests.support import tiny_models
from tests.support.tiny_engine_core import (
    NEAR,
    ON_GPU,
    PAGE,
    Received,
    TinyLoop,
    assert_same,
    attach_draft_model,
    draft_always,
    request,
    tiny_runner,
)
from tests.support.tiny_models import tokens_of

KINDS = ("gemma2", "gemma3", "gemma4", "gemma4-small", "gpt-oss", "olmo3", "mistral")
"""Windows of 24 tokens in some of the layers, of Mistral in all."""
PROMPT = tokens_of(11, 70) * 4
ASKED = request(PROMPT, max_tokens=64, salt="a")
FEW, MANY = 7, 40
"""Window blocks: few more than a window and the steps in flight take, and more than are ever needed."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    found = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        model = tiny_models.reference(kind)
        tiny_models.save(model, folder)
        found[kind] = (model, folder)
    return found


@pytest.fixture
def folder(models: dict[str, tuple[Any, Path]]) -> Path:
    return models["gemma3"][1]


def windowed(folder: Path, window_blocks: int = FEW, **how: Any) -> CudaRunner:
    """A runner whose tables name a page of NaN wherever no window of a row reaches."""
    how = {"context": 512, "blocks": 60, **how}
    runner = tiny_runner(folder, window_blocks=window_blocks, **how)
    launch, window = runner.launch, runner.capabilities.window_tokens

    def spoilt(plan: StepPlan) -> None:
        launch(plan)
        for row in plan.rows:
            following = row.start + 1 if row.drafts else row.start + row.width
            first = max(0, following + 1 - window) // PAGE
            with torch.inference_mode(), runner.on_stream():  # behind the step
                runner.table.window_tables[row.slot, :first] = window_blocks + 1

    runner.launch = spoilt  # type: ignore[method-assign]
    return runner


@cache
def in_one_step(folder: Path) -> Received:
    """Return the text to compare with. It is the same for every way."""
    return TinyLoop(tiny_runner(folder, step=200, context=512)).say(ASKED)


def cached(told: Received) -> int:
    (done,) = (event for event in told.events if isinstance(event, Done))
    return done.usage.cached_tokens


# ---------------------------------------------------------------------------- against transformers


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_logprobs_and_greedy_text_are_transformers(
    models: dict[str, tuple[Any, Path]], kind: str
) -> None:
    model, folder = models[kind]
    runner = windowed(folder)
    loop = TinyLoop(runner)
    assert isinstance(loop.kv_cache, WindowedKVCacheManager)
    told = loop.say(request(PROMPT, max_tokens=64, prompt_logprobs=3, logprobs=0))
    # Each token is the best one after those before it: all are computed at once.
    whole = torch.tensor([[*PROMPT, *told.tokens()]])
    assert whole.shape[1] == len(PROMPT) + 64
    with torch.no_grad():
        logs = model(whole).logits[0].log_softmax(-1)
    if ON_GPU:
        return
    assert told.tokens() == logs[len(PROMPT) - 1 : -1].argmax(1).tolist()
    own = logs[:-1].gather(1, whole[0, 1:, None])[:, 0]
    found = [entry.logprob for entry in (*told.prompt_logprobs, *told.logprobs())]
    assert torch.allclose(torch.tensor(found), own, atol=2e-3)


# ---------------------------------------------------------------------------- the same text


def in_chunks(folder: Path, tokens: int, **how: Any) -> Received:
    return TinyLoop(windowed(folder, step=tokens, **how)).say(ASKED)


def warm(folder: Path) -> Received:
    loop = TinyLoop(windowed(folder, MANY))
    loop.say(ASKED)
    again = loop.say(ASKED)
    assert cached(again) == len(PROMPT) - 1
    return again


def drafted(folder: Path) -> Received:
    return TinyLoop(windowed(folder)).say(
        request(PROMPT, max_tokens=64, salt="a", speculation=True)
    )


def guessed(folder: Path) -> Received:
    runner = windowed(folder)
    attach_draft_model(runner, folder, context=512)
    loop = TinyLoop(runner)
    draft_always(loop)
    told = loop.say(request(PROMPT, max_tokens=64, salt="a", speculation=True))
    (done,) = (event for event in told.events if isinstance(event, Done))
    assert done.usage.completion_tokens == 64
    return told


def beside_others(folder: Path) -> Received:
    loop = TinyLoop(windowed(folder, 14, step=40))
    for seed in (13, 14):
        loop.ask(request(tokens_of(seed, 100), max_tokens=150, temperature=1.0))
    loop.step(4)
    id_ = loop.ask(ASKED)
    loop.run_until_idle()
    return loop.received[id_]


def preempted(folder: Path, **how: Any) -> Received:
    loop = TinyLoop(windowed(folder, **how))
    loop.ask(request(tokens_of(12, 150), max_tokens=200))
    id_ = loop.ask(ASKED)
    loop.run_until_idle()
    assert loop.core.stats().preemptions
    return loop.received[id_]


def branched(folder: Path) -> Received:
    """Beside texts that share parts of its prompt."""
    loop = TinyLoop(windowed(folder, 20))
    for end in (70, 130, 200):
        loop.say(request((*PROMPT[:end], *tokens_of(end, 20)), max_tokens=9, salt="a"))
    return loop.say(ASKED)


WAYS: dict[str, Callable[[Path], Received]] = {
    "chunks of 1": lambda folder: in_chunks(folder, 1),
    "chunks of 7": lambda folder: in_chunks(folder, 7),
    "chunks of 64": lambda folder: in_chunks(folder, 64),
    "chunks of 200": lambda folder: in_chunks(folder, 200, window_blocks=12),
    "warm": warm,
    "drafts": drafted,
    "a draft model": guessed,
    "beside others": beside_others,
    "preempted": lambda folder: preempted(folder, blocks=7, window_blocks=MANY),
    "preempted for windows": lambda folder: preempted(folder, window_blocks=4),
    "branches": branched,
}


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *(("gemma3", way) for way in WAYS),
        *product(
            ("gpt-oss", "olmo3", "mistral"), ("chunks of 64", "warm", "preempted for windows")
        ),
    ],
)
def test_greedy_text_is_the_same_however_it_is_made(
    models: dict[str, tuple[Any, Path]], kind: str, way: str
) -> None:
    folder = models[kind][1]
    plain = in_one_step(folder)
    assert len(plain.tokens()) == 64
    assert_same(plain, WAYS[way](folder))


def test_choices_share_the_window_at_the_prompts_end(
    models: dict[str, tuple[Any, Path]], folder: Path
) -> None:
    several = request(PROMPT, max_tokens=90, n=3, temperature=1.0, seed=4)
    told = TinyLoop(windowed(folder, 16)).say(several)
    model = models["gemma3"][0]
    for choice in range(3):
        found = told.logprobs(choice)
        whole = torch.tensor([(*PROMPT, *(entry.token for entry in found))])
        with torch.no_grad():
            logs = model(whole).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        wanted = logs.gather(1, whole[0, len(PROMPT) :, None])[:, 0]
        assert torch.allclose(torch.tensor([e.logprob for e in found]), wanted, atol=NEAR * 10)


def test_the_next_turn_goes_on_after_the_answer_and_after_the_prompt(folder: Path) -> None:
    loop = TinyLoop(windowed(folder, 12))
    first = loop.say(request(PROMPT, max_tokens=150, salt="a"))
    turns = (
        ((*PROMPT, *first.tokens(), *tokens_of(15, 20)), len(PROMPT) + 149),
        ((*PROMPT, *tokens_of(16, 30)), len(PROMPT)),
    )
    for prompt, hit in turns:
        turn = request(prompt, max_tokens=10, salt="a")
        told = loop.say(turn)
        assert cached(told) == hit
        assert_same(TinyLoop(tiny_runner(folder, context=512)).say(turn), told)


def test_a_step_without_memory_is_computed_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = TinyLoop(tiny_runner(folder, context=512)).say(ASKED)
    compute, steps = StepExecutor.compute, 0

    def sometimes_full(self: Any, *args: Any) -> None:
        nonlocal steps
        steps += 1
        compute(self, *args)
        if steps in (2, 4, 20, 33):
            raise torch.OutOfMemoryError("CUDA out of memory")

    runner = tiny_runner(folder, context=512, window_blocks=FEW)
    monkeypatch.setattr(StepExecutor, "compute", sometimes_full)
    assert_same(plain, TinyLoop(runner).say(ASKED))


def test_a_cache_of_8_bits_gives_pages_back_too(folder: Path) -> None:
    plain = TinyLoop(tiny_runner(folder, context=512, fp8_kv=True)).say(ASKED)
    assert_same(plain, TinyLoop(windowed(folder, fp8_kv=True)).say(ASKED))


def test_random_requests_leave_no_state(folder: Path) -> None:
    runner = windowed(folder, 20, blocks=9, slots=6, context=256, step=48)
    told = stress(runner, 40, seed=1)
    assert told["answered"] + told["cancelled"] + told["refused"] == 40
    assert min(told["answered"], told["cancelled"], told["refused"], told["preemptions"]) > 0


def test_kernels_read_no_page_that_was_given_back(folder: Path) -> None:
    short = request(PROMPT[:140], max_tokens=3)
    plain = TinyLoop(tiny_runner(folder, step=80)).say(short)
    runner = windowed(folder, kernels=True, dtype=torch.float16, step=80, context=256)
    found = TinyLoop(runner).say(short)
    for mine, theirs in zip(plain.logprobs(), found.logprobs(), strict=True):
        assert theirs.logprob == pytest.approx(mine.logprob, abs=0.1)
        if mine.token != theirs.token:
            break
