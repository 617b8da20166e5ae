"""Steps for a load that does not fit, on scripted machines, by the planners of both backends."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from msgspec import structs

from localchat.config.paths import Paths, find_paths
from localchat.fit.hardware import Gpu, Machine
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat.fit.steps import (
    MemoryStep,
    SlotLimit,
    load_steps,
    needed_bytes,
    step_lines,
)
from localchat.model_files.architecture import ModelShape
from localchat.model_files.checkpoint import read_summary
from localchat.models.assess import Subject
from localchat.models.substitutes import memory_steps
from localchat_cuda.plan.memory_plan import plan as cuda_plan
from localchat_llamacpp.plan.memory_plan import plan as llamacpp_plan
from tests.support.cuda_machines import CONFIG, gpu, header
from tests.support.gguf_files import Q4_0, Size, llama

GB = 10**9
SMALL = Machine("small", frozenset({"avx2"}), 4, 8 * GB, 6 * GB)
CARD = replace(SMALL, gpus=(Gpu(0, "RTX 3050", 4 * GB, int(3.5 * GB)),))
LONG = LoadOptions(context_tokens=32768, kv_type="f16", max_slots=2)


@pytest.fixture
def eight_b(tmp_path: Path) -> Path:
    """An 8B model in Q4_0, of nothing."""
    size = Size(32, 4096, 32, 8, 128, 14336, 1024, 131072, Q4_0)
    return llama(size).sparse(tmp_path / "8b.gguf")


def on(
    machine: Machine, path: Path, options: LoadOptions, slots: SlotLimit | None = None
) -> tuple[dict[str, MemoryStep], MemoryPlan]:
    """The steps of llama.cpp's planner on a machine, by name, and the plan that does not fit."""
    shape = read_summary(path)
    assert isinstance(shape, ModelShape)

    def planned(asked: LoadOptions) -> MemoryPlan:
        return llamacpp_plan(shape, asked, machine, can_offload=bool(machine.gpus))

    found = tuple(load_steps(options, planned, has_gpu=bool(machine.gpus), slots=slots))
    for step in found:
        if step.suffices:
            assert planned(applied(options, step)).fits, f"{step.name} is not enough"
    return {step.name: step for step in found}, planned(options)


def applied(options: LoadOptions, step: MemoryStep) -> LoadOptions:
    """The options with the settings of a step."""
    names = {
        "kv_cache_type": "kv_type",
        "context_length": "context_tokens",
        "n": "max_slots",
        "gpu_layers": "gpu_layers",
    }
    given = {names[key]: int(v) if v.isdigit() else v for key, v in step.settings}
    return structs.replace(options, **given)


def test_each_step_tells_its_bytes_and_whether_the_planner_would_take_it(eight_b: Path) -> None:
    found, plan = on(SMALL, eight_b, LONG)
    assert not plan.fits
    assert not found["kv_type"].suffices
    assert found["kv_type"].flag == "--kv-type q8_0", "q4_0 damages some models"
    assert found["context"].settings == (("context_length", str(plan.max_context_tokens)),)
    saved = needed_bytes(plan) - plan.free_bytes
    assert found["context"].gained_bytes >= saved, "it is said to be enough"
    assert found.keys() == {"kv_type", "context"}


def test_a_step_that_is_not_enough_says_so(eight_b: Path) -> None:
    container = replace(SMALL, ram_total_bytes=2 * GB, ram_free_bytes=GB)
    found, plan = on(container, eight_b, LoadOptions(max_slots=2))
    assert not any(step.suffices for step in found.values())
    assert found["context"].gained_bytes > 0
    assert "not enough by itself" in found["context"].sentence()
    assert plan.total_bytes > plan.free_bytes


def test_a_step_that_frees_next_to_nothing_is_not_worth_listing() -> None:
    step = MemoryStep("slots", "1 at once rather than 2", gained_bytes=502_000, flag="--parallel 1")
    assert step.is_worth(1_000_000)
    assert not step.is_worth(10 * GB)
    assert not MemoryStep("slots", "1 at once rather than 2").is_worth(0)


def test_layers_that_were_asked_for_move_off_a_small_card(eight_b: Path) -> None:
    options = LoadOptions(context_tokens=8192, gpu_layers="all", max_slots=2)
    found, plan = on(CARD, eight_b, options)
    assert not plan.fits
    step = found["gpu_layers"]
    assert step.suffices
    assert 0 < int(dict(step.settings)["gpu_layers"]) < plan.layers
    assert step.gained_bytes >= plan.gpu_bytes - plan.gpu_free_bytes


def test_fewer_slots_free_what_each_takes(eight_b: Path) -> None:
    found, _ = on(
        SMALL, eight_b, structs.replace(LONG, max_slots=64), SlotLimit("--parallel", "", 1)
    )
    assert found["slots"].gained_bytes > 0
    assert found["slots"].flag == "--parallel 1"
    assert not found["slots"].can_be_taken, "a server is started with its flag"


def test_a_card_of_the_cuda_backend_is_asked_in_the_same_way() -> None:
    options = LoadOptions(context_tokens=32768, max_slots=64)
    planned = partial(cuda_plan, CONFIG, [header(15 * GB)], gpu=gpu(18_700_000_000))
    found = {
        step.name: step
        for step in load_steps(options, planned, has_gpu=True, slots=SlotLimit("--parallel", "", 1))
    }
    plan = planned(options)
    assert not plan.fits
    assert found["kv_type"].flag == "--kv-type fp8"
    assert found["kv_type"].gained_bytes > plan.kv_bytes * 0.4
    assert found["context"].suffices
    assert found["slots"].gained_bytes >= 63 * 32768 * 4, "tables of 63 slots"
    assert "gpu_layers" not in found, "this backend keeps all layers on the GPU"


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return find_paths({"HOME": str(tmp_path), "LOCALCHAT_DATA_DIR": str(tmp_path / "data")})


def test_smaller_weights_are_the_last_two_steps(eight_b: Path, paths: Paths) -> None:
    subject = Subject("8b", read_summary(eight_b), eight_b)
    tight = replace(SMALL, ram_total_bytes=6 * GB, ram_free_bytes=5 * GB)
    found = memory_steps(subject, LONG, tight, paths, {"HOME": "/nowhere"})
    quantization, model = found[-2:]
    assert quantization.gained_bytes > GB
    assert model.suffices
    assert model.flag.startswith("localchat pull ")
    assert [line[0] for line in step_lines(found)] == [str(n + 1) for n in range(len(found))]


def test_a_model_that_is_here_goes_before_one_to_download(eight_b: Path, paths: Paths) -> None:
    paths.models_dir.mkdir(parents=True)
    small = Size(16, 2048, 16, 4, 128, 8192, 1024, 32768, Q4_0)
    llama(small).sparse(paths.models_dir / "little.gguf")
    subject = Subject("8b", read_summary(eight_b), eight_b)
    model = memory_steps(subject, LONG, SMALL, paths, {"HOME": "/nowhere"})[-1]
    assert model.model == "little"
    assert model.gained_bytes > GB


def test_a_tiny_model_that_is_here_replaces_none(eight_b: Path, paths: Paths) -> None:
    paths.models_dir.mkdir(parents=True)
    tiny = Size(2, 64, 2, 2, 32, 128, 256, 2048, Q4_0)
    llama(tiny).sparse(paths.models_dir / "toy.gguf")
    subject = Subject("8b", read_summary(eight_b), eight_b)
    model = memory_steps(subject, LONG, SMALL, paths, {"HOME": "/nowhere"})[-1]
    assert model.model != "toy"
