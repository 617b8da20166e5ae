"""Windowed layers with pages of their own, under the real loop: one text, whatever pages were given back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from localchat.backend_api.interface import StepPlan
from localchat.core.kv_cache.paged_windows import WindowedKVCacheManager
from localchat.engine.events import Done
from localchat_cuda.runner.runner import CudaRunner
from tests.support import tiny_models
from tests.support.tiny_engine_core import (
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
"""Window blocks: of two windows and the steps in flight, and more than are ever needed."""


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
            with torch.inference_mode():
                runner.table.window_tables[row.slot, :first] = window_blocks + 1

    runner.launch = spoilt  # type: ignore[method-assign]
    return runner


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
    with torch.no_grad():
        whole = model.generate(
            torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT)), max_new_tokens=64,
            min_new_tokens=64, do_sample=False, pad_token_id=0,
        )  # fmt: skip
        logs = model(whole).logits[0].log_softmax(-1)
    if ON_GPU:
        return
    assert told.tokens() == whole[0, len(PROMPT) :].tolist()
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
    assert loop.core.preemptions
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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["gemma3", "gpt-oss", "olmo3", "mistral"])
def test_greedy_text_is_the_same_however_it_is_made(
    models: dict[str, tuple[Any, Path]], kind: str, way: str
) -> None:
    folder = models[kind][1]
    plain = TinyLoop(tiny_runner(folder, step=200, context=512)).say(ASKED)
    assert len(plain.tokens()) == 64
    assert_same(plain, WAYS[way](folder))
