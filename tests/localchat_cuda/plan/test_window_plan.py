"""Memory of windowed layers with pages of their own: planned, and as a runner has it."""

from dataclasses import replace

import pytest
import torch

from localchat.backend_api.interface import LoadRequest
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat_cuda.config.model import PAGE_TOKENS, ModelConfig
from localchat_cuda.config.reader import parse_config
from localchat_cuda.load import capabilities
from localchat_cuda.plan import window_plan
from localchat_cuda.plan.memory_plan import kv_token_bytes, plan
from localchat_cuda.runner.kv_pages import Pages
from localchat_cuda.runner.step_output import DEPTH
from tests.support.cuda_machines import CONFIG, GB, gpu, header
from tests.support.hub_configs import CONFIGS


def config_of(name: str) -> ModelConfig:
    return parse_config(CONFIGS[name][0], name)


def planned(
    config: ModelConfig, weights_gb: int, free_gb: int, context_tokens: int | None = None
) -> MemoryPlan:
    options = LoadOptions(context_tokens=context_tokens)
    card = gpu(free_gb * GB, 80 * GB)
    return plan(config, [header(weights_gb * GB)], options, card, ram_bytes=64 * GB)


def test_a_token_takes_its_part_of_the_layers_that_see_all_of_them() -> None:
    config = config_of("gemma3:27b")
    assert kv_token_bytes(config) == 62 * 2 * 16 * 128 * 2
    assert kv_token_bytes(config, windowed=False) == 10 * 2 * 16 * 128 * 2
    found = planned(config, 15, 70, context_tokens=131072)
    windows = found.window_pages * PAGE_TOKENS * kv_token_bytes(config, windowed=True)
    others = found.kv_tokens * kv_token_bytes(config, windowed=False)
    assert found.context_tokens == 131072
    assert found.kv_bytes == windows + others
    assert found.total_bytes <= found.free_bytes
    assert found.kv_tokens > 3 * (windows + others) // kv_token_bytes(config)
    (note,) = (note for note in found.notes if "52 of 62 layers" in note)
    assert "1,024 tokens" in note and "neither in RAM nor on the disk" in note
    assert not found.cache_ram_bytes


def test_there_are_pages_for_a_window_of_each_sequence_and_for_the_steps_in_flight() -> None:
    config = config_of("gemma3:27b")
    found = planned(config, 15, 70, context_tokens=131072)
    can = capabilities(config, LoadRequest(found, LoadOptions()))
    assert can.max_rows == can.max_slots == 16
    # A window of 1,024 keys lies on 17 pages at most; one before it is kept, and one is new.
    in_flight = DEPTH * found.max_step_tokens // PAGE_TOKENS
    assert can.window_blocks == found.window_pages == 16 * (17 + 2) + in_flight
    assert can.window_tokens == 1024


def test_a_small_gpu_runs_fewer_sequences_at_once_in_smaller_steps() -> None:
    config = config_of("gemma3:27b")
    found = planned(config, 13, 24)
    can = capabilities(config, LoadRequest(found, LoadOptions()))
    assert 1 < can.max_rows < 16 == can.max_slots
    assert found.max_step_tokens < 2048
    assert found.context_tokens > 20_000
    assert any(f"{can.max_rows} answers run at once" in note for note in found.notes)
    asked = planned(config, 13, 24, context_tokens=26_000)
    assert asked.fits and asked.window_pages < found.window_pages


@pytest.mark.parametrize(
    ("options", "rows"), [(LoadOptions(), 16), (LoadOptions(more_slots=True), 128)]
)
def test_without_windows_as_many_answers_run_at_once_as_there_are_slots(
    options: LoadOptions, rows: int
) -> None:
    found = plan(CONFIG, [header(15 * GB)], options, gpu(140 * GB, 141 * GB))
    can = capabilities(CONFIG, LoadRequest(found, options))
    assert can.max_slots == can.max_rows == rows


@pytest.mark.parametrize("name", ["gemma3:27b", "gpt-oss:20b", "mistral-7b-v0.1"])
@pytest.mark.parametrize("kv_type", [None, "fp8"])
def test_the_pages_of_a_runner_are_those_of_the_plan(name: str, kv_type: str | None) -> None:
    config = config_of(name)
    options = LoadOptions(kv_type=kv_type, max_slots=128)
    found = plan(config, [header(15 * GB)], options, gpu(24 * GB))
    can = capabilities(config, LoadRequest(found, options))
    assert can.window_blocks and can.kv_tokens >= can.context_tokens
    # Without the pages of padding.
    blocks = replace(
        can, kv_tokens=can.kv_tokens - PAGE_TOKENS, window_blocks=can.window_blocks - 1
    )
    pages = Pages(config, blocks, torch.device("meta"), torch.bfloat16)
    assert pages.bytes == found.kv_bytes
    assert pages.page_bytes == PAGE_TOKENS * can.bytes_per_token


def test_where_windows_save_little_the_cache_keeps_its_place_in_ram() -> None:
    config = config_of("gemma-2-9b")  # windows of 4,096 tokens, texts of 8,192
    found = planned(config, 18, 70)
    assert not found.window_pages
    assert found.cache_ram_bytes


@pytest.mark.parametrize(("slots", "apart"), [(16, False), (64, True)])
def test_windows_are_apart_where_answers_at_once_would_be_short_of_room(
    slots: int, apart: bool
) -> None:
    config, options = config_of("gpt-oss:20b"), LoadOptions(max_slots=slots)
    found = plan(config, [header(14 * GB)], options, gpu(24 * GB), ram_bytes=64 * GB)
    assert found.kv_tokens > 100_000
    assert bool(found.window_pages) == apart == (not found.cache_ram_bytes)


def test_a_model_without_windows_has_no_pages_for_them() -> None:
    config = config_of("mistral:7b")
    found = planned(config, 15, 70)
    assert window_plan.window_of(config) == found.window_pages == 0
