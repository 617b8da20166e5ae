"""Pages saved in host memory: they come back bit for bit, and texts that continue them are the same."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from localchat.backend_api.interface import LoadBlock, SaveBlock, StepPlan
from localchat.engine.events import Prefill
from localchat.kv_store.checksum import CHUNK_BYTES, payload_sums
from localchat.kv_store.store import KVStore
from localchat_cuda.runner.host_pages import HostMemory, HostPages
from localchat_cuda.runner.kv_pages import Pages
from scripts.bench.cuda.stress import stress
from tests.support import tiny_models
from tests.support.tiny_engine_core import DEVICE, ON_GPU, TinyLoop, request, tiny_runner
from tests.support.tiny_models import tokens_of

KINDS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
    "fp8": {"fp8_kv": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    tiny_models.save(tiny_models.reference("qwen2"), found)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_comes_back_bit_for_bit(folder: Path, kind: str) -> None:
    runner = tiny_runner(folder, blocks=4, host_blocks=3, **KINDS[kind])
    assert runner._model is not None
    pages = runner._model.pages
    pool = pages.pools[0].view(torch.int16)
    pool.copy_(torch.randint(-9999, 9999, pool.shape, dtype=torch.int16, device=DEVICE))
    for exponents in pages.exponents:
        shape = exponents.shape
        exponents.copy_(torch.randint(0, 255, shape, dtype=torch.uint8, device=DEVICE))
    before = pool[:, 1].clone(), [each[:, 1].clone() for each in pages.exponents]
    if ON_GPU:  # the runner has a stream of its own
        torch.cuda.synchronize()
    # Within one plan, and over a block that was saved.
    runner.launch(
        StepPlan(1, memory=(SaveBlock(0, 2), SaveBlock(1, 2), LoadBlock(2, 3), LoadBlock(2, 0)))
    )
    runner.collect()
    # No step reads the pages, so none has waited for the copies.
    runner.finish_block_copies()
    for block in (3, 0):
        assert torch.equal(pool[:, block], before[0])
        for exponents, held in zip(pages.exponents, before[1], strict=True):
            assert torch.equal(exponents[:, block], held)
    content = runner.host_block(2)
    assert content is not None and len(content) == pages.page_bytes
    runner.host_block(1)[:] = content  # type: ignore[index]
    runner.launch(StepPlan(2, memory=(LoadBlock(1, 2),)))
    runner.collect()
    runner.finish_block_copies()
    assert torch.equal(pool[:, 2], before[0])
    runner.close()


@pytest.mark.parametrize("size", [8_000, 40_000, 3_670_016, 2 * CHUNK_BYTES + 70_003])
def test_the_device_sums_blocks_as_the_store_does(size: int) -> None:
    memory = HostMemory(DEVICE, size, 6)
    memory.wait()
    memory.rows.random_(0, 256)
    pages = HostPages(cast(Pages, SimpleNamespace(device=DEVICE, page_bytes=size)), memory)
    for numbers in ([], [2], [0, 1, 2, 3, 4, 5], [5, 4, 1, 0, 2]):
        assert pages.sums_of(numbers) == [payload_sums(memory.view(each)) for each in numbers]
    pages.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}])
def test_a_text_that_left_the_device_goes_on_the_same(
    folder: Path, kind: str, sampling: dict[str, Any]
) -> None:
    # Chunks of 64: what is computed behind a prefix of whole pages is computed in the same steps.
    loop = TinyLoop(tiny_runner(folder, blocks=6, host_blocks=40, **KINDS[kind]))
    prompt = tokens_of(11, 193)
    cold = loop.say(request(prompt, salt="a", **sampling))
    for number in range(3):
        loop.say(request(tokens_of(number, 200), salt="b", speculation=False))
    assert loop.kv_cache.usage().swapped >= 3 * 64
    warm = loop.say(request(prompt, salt="a", **sampling))
    [prefill, *_] = [event for event in warm.events if isinstance(event, Prefill)]
    assert prefill.cached == 192
    assert warm.tokens() == cold.tokens()
    loop.runner.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}])
def test_a_text_goes_on_the_same_after_a_restart(
    folder: Path, tmp_path: Path, kind: str, sampling: dict[str, Any]
) -> None:
    prompt, found = tokens_of(11, 193), []
    for cached in (0, 192):
        runner = tiny_runner(folder, blocks=6, host_blocks=40, **KINDS[kind])
        loop = TinyLoop(runner, disk=KVStore(tmp_path, 1 << 30))
        told = loop.say(request(prompt, salt="a", owner="1", **sampling))
        [prefill, *_] = [event for event in told.events if isinstance(event, Prefill)]
        assert prefill.cached == prefill.read_back == cached
        found.append(told.tokens())
        assert loop.disk_tier is not None
        loop.disk_tier.finish(time.monotonic() + 5)
        runner.close()
    assert found[0] == found[1]


def test_a_preempted_sequence_is_copied_back(folder: Path) -> None:
    asked = request(tokens_of(11, 150), max_tokens=30, salt="a")
    loop = TinyLoop(tiny_runner(folder, blocks=5, host_blocks=20))
    loop.ask(request(tokens_of(12, 100), max_tokens=100))
    id_ = loop.ask(asked)
    loop.run_until_idle()
    assert loop.core.stats().preemptions
    plain = TinyLoop(tiny_runner(folder)).say(asked)
    assert ON_GPU or loop.received[id_].tokens() == plain.tokens()


def test_random_requests_over_host_blocks_leave_no_state(folder: Path) -> None:
    runner = tiny_runner(folder, blocks=9, slots=6, context=256, step=48, host_blocks=12)
    told = stress(runner, 60, seed=2)
    assert told["answered"] + told["cancelled"] + told["refused"] == 60
