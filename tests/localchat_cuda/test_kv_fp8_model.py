"""A whole model over a cache of 8 bits: kernels as references, cut and copied and shared without a difference,
and near what the same model says over plain numbers."""

from pathlib import Path

import pytest
import torch

from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.errors import UsageError
from localchat.fit.kv_types import FP8
from localchat.fit.load_options import LoadOptions
from localchat_cuda.backend import ReferenceBackend
from localchat_cuda.plan.memory_plan import kv_token_bytes
from tests.support import tiny_models
from tests.support.answers import ask
from tests.support.speaking_checkpoint import write_speaking
from tests.support.tiny_engine_core import ON_GPU, TinyLoop, request, tiny_runner
from tests.support.tiny_models import Stretch, Tiny, relative_error, tokens_of


@pytest.fixture(scope="module", params=["gemma2", "llama", "phi3-long"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp(request.param)
    tiny_models.save(tiny_models.reference(request.param), found)
    return found


def test_logits_are_near_those_over_plain_numbers(folder: Path) -> None:
    tokens = tokens_of(1, 70)
    plain = Tiny(folder, torch.float32).prompt(tokens, 70)
    found = Tiny(folder, torch.float32, fp8_kv=True).prompt(tokens, 70)
    # random weights look hard at one key or another, and do not agree on which
    assert 1e-4 < relative_error(found, plain) < 0.3


@pytest.mark.parametrize("chunk", [1, 17, 64])
def test_the_cut_of_a_prompt_changes_nothing(folder: Path, chunk: int) -> None:
    tokens = tokens_of(1, 70)
    whole = Tiny(folder, torch.float32, fp8_kv=True).prompt(tokens, 70)
    assert (
        relative_error(Tiny(folder, torch.float32, fp8_kv=True).prompt(tokens, chunk), whole) < 2e-2
    )


def test_a_copied_page_continues_like_its_original(folder: Path) -> None:
    ours, text = Tiny(folder, torch.float32, fp8_kv=True), tokens_of(6, 40)
    ours.prompt(text[:30], 30)
    ours.pages.copy(int(ours.table.block_tables[0, 0]), int(ours.table.block_tables[1, 0]), 30)
    copied = ours.step(Stretch(1, 30, text[30:]))
    assert torch.equal(copied, ours.step(Stretch(0, 30, text[30:])))


@pytest.mark.skipif(ON_GPU, reason="for the interpreter")
@pytest.mark.parametrize("folder", ["phi3-long"], indirect=True)
def test_kernels_are_their_references(folder: Path) -> None:
    tokens, found = tokens_of(9, 18), []
    for kernels, dtype in ((True, torch.float16), (False, torch.float32)):
        ours = Tiny(folder, dtype, kernels=kernels, fp8_kv=True)
        ours.step(Stretch(0, 0, tokens[:17]))
        found.append(ours.step(Stretch(0, 17, tokens[17:]), Stretch(1, 0, tokens_of(10, 17))))
    # an activation rounded to fp16 can fall to another code
    assert relative_error(found[0], found[1]) < 3e-2


@pytest.mark.parametrize("folder", ["qwen2"], indirect=True)
def test_texts_are_the_same_cold_cached_and_forked(folder: Path) -> None:
    prompt = tokens_of(3, 100)
    loop = TinyLoop(tiny_runner(folder, fp8_kv=True))
    cold = loop.say(request(prompt, max_tokens=20))
    cached = loop.say(request(prompt, max_tokens=20))
    several = loop.say(request(prompt, max_tokens=20, n=3))
    if not ON_GPU:
        assert cached.tokens() == cold.tokens()
        assert [several.tokens(choice) for choice in range(3)] == [cold.tokens()] * 3
    assert loop.kv_cache.usage().cached > 0


@pytest.mark.parametrize("folder", ["qwen2"], indirect=True)
def test_the_cache_takes_what_is_planned(folder: Path) -> None:
    runner = tiny_runner(folder, blocks=40, fp8_kv=True)
    held = runner._model
    assert held is not None
    tokens = 41 * held.pages.page_tokens
    assert held.pages.bytes == runner.memory().kv_bytes
    assert held.pages.bytes == tokens * kv_token_bytes(held.config, FP8)


def test_an_engine_loads_with_fp8_kv_and_reports_it(tmp_path: Path) -> None:
    folder = write_speaking(tmp_path)
    options = EngineOptions(
        folder,
        LoadOptions(kv_type="fp8_e4m3", context_tokens=512, max_slots=2, threads=1),
        backend="localchat_cuda.backend:ReferenceBackend",
    )
    engine = LocalEngine(options, notify=lambda text: None)
    try:
        answer = ask(engine, request((65, 66, 67), max_tokens=5))
        info = engine.info()
    finally:
        engine.close()
    assert answer.text
    assert (info.kv_type, info.kv_types[1:]) == (FP8, (FP8,))
    assert info.actual is not None and info.predicted is not None
    # one page more than planned holds what pads a step
    assert 0 < info.actual.kv_bytes - info.predicted.kv_bytes < info.predicted.kv_bytes / 8


def test_another_kv_type_is_refused_with_the_possible_ones(tmp_path: Path) -> None:
    model = ReferenceBackend().open(write_speaking(tmp_path), print)
    with pytest.raises(UsageError, match="cannot be q8_0") as caught:
        model.plan(LoadOptions(kv_type="q8_0"))
    assert FP8 in caught.value.hint
