"""Whole engine cores over two ranks, which are threads here: texts are those of one rank."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localchat.backend_api.interface import StepPlan
from localchat.engine.events import Prefill
from localchat.errors import DeviceFault
from localchat.kv_store.store import KVStore
from localchat_cuda.runner.runner import CudaRunner
from localchat_cuda.runner.step_output import PendingStep
from scripts.bench.cuda.stress import stress
from tests.support import tiny_models
from tests.support.thread_ranks import ranked_runner
from tests.support.tiny_engine_core import (
    ON_GPU,
    TinyLoop,
    attach_draft_model,
    draft_always,
    request,
    tiny_runner,
)
from tests.support.tiny_models import tokens_of

pytestmark = pytest.mark.skipif(ON_GPU, reason="the ranks are threads on a CPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("llama")
    tiny_models.save(tiny_models.reference("llama"), found)
    return found


class Ranked:
    """Makes runners over two ranks, and closes them."""

    def __init__(self) -> None:
        self.made: list[CudaRunner] = []

    def __call__(self, folder: Path, **how: Any) -> CudaRunner:
        self.made.append(ranked_runner(folder, **how))
        return self.made[-1]


@pytest.fixture
def ranked() -> Iterator[Ranked]:
    runners = Ranked()
    yield runners
    for runner in runners.made:
        runner.close()


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.8, "seed": 7, "presence_penalty": 1.0, "n": 2},
    ],
)
def test_texts_drawn_on_two_ranks_are_those_of_one(
    folder: Path, ranked: Ranked, sampling: dict[str, Any]
) -> None:
    asked = request(tokens_of(3, 90), max_tokens=40, prompt_logprobs=1, **sampling)
    told = TinyLoop(ranked(folder, step=32)).say(asked)
    wanted = TinyLoop(tiny_runner(folder, step=32)).say(asked)
    for choice in range(sampling.get("n", 1)):
        assert told.tokens(choice) == wanted.tokens(choice)
    apart = [
        abs(one.logprob - other.logprob)
        for one, other in zip(told.prompt_logprobs, wanted.prompt_logprobs, strict=True)
    ]
    assert max(apart) < 1e-3


def test_neighbours_chunks_and_drafts_of_repeated_text_change_no_text(
    folder: Path, ranked: Ranked
) -> None:
    prompts = [tokens_of(20, 9) * 7, tokens_of(21, 50), tokens_of(22, 70)]
    texts = []
    for runner in (ranked(folder, step=24), tiny_runner(folder, step=24)):
        loop = TinyLoop(runner)
        ids = [loop.ask(request(prompt, speculation=True)) for prompt in prompts]
        loop.run_until_idle()
        texts.append([loop.received[id_].tokens() for id_ in ids])
    assert texts[0] == texts[1]


def test_a_draft_model_on_the_first_rank_drafts_for_all(folder: Path, ranked: Ranked) -> None:
    asked = request(tokens_of(4, 60), max_tokens=40, speculation=True)
    runner = ranked(folder)
    attach_draft_model(runner, folder)
    loop = TinyLoop(runner)
    draft_always(loop)
    told = loop.say(asked)
    assert told.tokens() == TinyLoop(tiny_runner(folder)).say(asked).tokens()
    model = loop.core._draft_model
    assert model is not None
    assert model.accepted > 0.9 * model.drafted > 0


def test_a_cached_prefix_is_cached_on_all_ranks(folder: Path, ranked: Ranked) -> None:
    loop = TinyLoop(ranked(folder))
    asked = request(tokens_of(5, 150))
    cold = loop.say(asked)
    warm = loop.say(asked)
    [prefill, *_] = [event for event in warm.events if isinstance(event, Prefill)]
    assert prefill.cached >= 128
    assert warm.tokens() == cold.tokens()


def test_a_cancelled_request_leaves_the_ranks_in_step(folder: Path, ranked: Ranked) -> None:
    loop = TinyLoop(ranked(folder))
    gone = loop.ask(request(tokens_of(6, 100), max_tokens=100))
    stays = loop.ask(request(tokens_of(7, 40), max_tokens=20))
    loop.step(8)
    loop.core.cancel(gone)
    loop.run_until_idle()
    wanted = TinyLoop(tiny_runner(folder)).say(request(tokens_of(7, 40), max_tokens=20))
    assert loop.received[stays].tokens() == wanted.tokens()


@pytest.mark.parametrize("fp8_kv", [False, True])
def test_kv_saved_on_the_disk_has_the_parts_of_all_ranks(
    folder: Path, tmp_path: Path, ranked: Ranked, fp8_kv: bool
) -> None:
    prompt = tokens_of(11, 193)
    found = []
    for cached in (0, 192):
        runner = ranked(folder, blocks=6, host_blocks=40, fp8_kv=fp8_kv)
        loop = TinyLoop(runner, disk=KVStore(tmp_path, 1 << 30))
        told = loop.say(request(prompt, salt="a", owner="1"))
        [prefill, *_] = [event for event in told.events if isinstance(event, Prefill)]
        assert prefill.cached == prefill.read_back == cached
        found.append(told.tokens())
        assert loop.disk_tier is not None
        loop.disk_tier.finish(time.monotonic() + 5)
    assert found[0] == found[1]


def test_a_preempted_sequence_is_copied_back_on_all_ranks(folder: Path, ranked: Ranked) -> None:
    asked = request(tokens_of(11, 150), max_tokens=30, salt="a")
    loop = TinyLoop(ranked(folder, blocks=5, host_blocks=20))
    loop.ask(request(tokens_of(12, 100), max_tokens=100))
    id_ = loop.ask(asked)
    loop.run_until_idle()
    assert loop.core.stats().preemptions
    assert loop.received[id_].tokens() == TinyLoop(tiny_runner(folder)).say(asked).tokens()


def test_random_requests_over_two_ranks_leave_no_state(folder: Path, ranked: Ranked) -> None:
    runner = ranked(folder, blocks=9, slots=6, context=256, step=48, host_blocks=12)
    told = stress(runner, 30, seed=2)
    assert told["answered"] + told["cancelled"] + told["refused"] == 30


def test_a_step_without_memory_ends_the_engine(folder: Path, ranked: Ranked) -> None:
    """The other ranks compute the step, so it cannot be dropped as on one GPU."""
    step = PendingStep(StepPlan(1), 0.0)
    with pytest.raises(DeviceFault, match="Rank 0 of 2 ran out of GPU memory"):
        ranked(folder)._drop(step)
