"""Whether one more model fits beside others: files and folders treated alike, RAM and cards apart."""

import json
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from localchat.backend_api.interface import Availability
from localchat.engine.options import EngineOptions
from localchat.errors import DoesNotFit, ModelInvalid, ModelMissing
from localchat.fit.hardware import Gpu, Machine
from localchat.fit.load_options import LoadOptions
from localchat.pool.admission import AdmissionResult, check_memory, never_fits
from localchat.pool.entry import ModelSpec, PoolEntry
from localchat.pool.pool import EnginePool
from localchat_cuda.backend import CudaBackend
from tests.support.gguf_files import Size, llama
from tests.support.pool_models import FakeMachine
from tests.support.scripted_engine import ScriptedEngine

GB = 10**9
CARD = Gpu(0, "a card", 24 * GB, 22 * GB, (8, 9))
MACHINE = Machine("x", frozenset({"avx2"}), 4, 32 * GB, 28 * GB, gpus=(CARD,))
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
    "max_position_embeddings": 16_384,
    "torch_dtype": "bfloat16",
}
Put = Callable[[Machine], None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Put:
    """Set the machine that is found; the CUDA backend could run on it where it has a card."""

    def put(found: Machine) -> None:
        able = Availability(bool(found.gpus), "torch is installed." if found.gpus else "no GPU.")
        monkeypatch.setattr(CudaBackend, "available", lambda self: able)
        monkeypatch.setattr("localchat.fit.hardware.read_machine", lambda: found)

    put(MACHINE)
    return put


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of 4 GB, its weights a hole."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    size = 4 * GB
    head = json.dumps(
        {"w": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}
    ).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + size)
    return path


def admit(model: Path, *beside: PoolEntry, context: int | None = 8192) -> AdmissionResult:
    options = EngineOptions(
        model, load=LoadOptions(context_tokens=context, max_slots=2), name=model.name
    )
    return check_memory(options, beside)


def loading(model: Path, ram: int, gpu: int) -> PoolEntry:
    """An engine that was planned and has taken nothing yet."""
    needed = ModelSpec(model.name, EngineOptions(model))
    return PoolEntry(needed, ScriptedEngine(), ram + gpu, time.monotonic(), gpu)


def test_a_folder_is_judged_by_its_headers(machine: Put, folder: Path) -> None:
    found = admit(folder)
    assert found.fits
    assert 4 * GB < found.needed_bytes == found.gpu_bytes < 8 * GB
    assert found.free_bytes == found.gpu_free_bytes < 22 * GB


def test_folder_that_does_not_fit_on_the_gpu_is_refused_before_a_load(
    machine: Put, folder: Path
) -> None:
    machine(replace(MACHINE, gpus=(replace(CARD, free_bytes=4 * GB),)))
    found = admit(folder)
    assert not found.fits
    assert found.never_fits(())
    assert found.advice


def test_a_refused_model_names_the_steps_that_would_make_room(machine: Put, folder: Path) -> None:
    machine(replace(MACHINE, gpus=(replace(CARD, free_bytes=4 * GB),)))
    options = EngineOptions(folder, name="it", load=LoadOptions(max_slots=16))
    error = never_fits(ModelSpec("it", options), check_memory(options, ()))
    steps = {step["step"]: step for step in error.steps}
    assert steps["context"]["flag"] == "--ctx 512"
    assert "slots" not in steps, "they take no memory here"
    assert "gpu_layers" not in steps, "this backend keeps all layers on the GPU"


def test_missing_hardware_is_reported_before_a_load(machine: Put, folder: Path) -> None:
    machine(replace(MACHINE, gpus=()))
    with pytest.raises(DoesNotFit, match=r"checkpoint is not loaded: .*needs an NVIDIA GPU"):
        admit(folder)


def test_model_that_no_build_can_run_is_refused_before_a_load(machine: Put, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["Nobody"]}))
    with pytest.raises(ModelInvalid, match="Nobody"):
        admit(folder)
    (folder / "config.json").unlink()
    with pytest.raises((ModelInvalid, ModelMissing)):
        admit(folder)


def test_weights_of_chance_need_no_files(machine: Put, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    options = EngineOptions(
        folder, load=LoadOptions(context_tokens=4096, max_slots=2, dummy_weights=True)
    )
    assert check_memory(options, ()).fits


def test_a_load_under_way_counts_where_it_will_lie(
    machine: Put, folder: Path, tmp_path: Path
) -> None:
    file = llama(Size(context=8192)).sparse(tmp_path / "small.gguf")
    on_card, in_ram = loading(folder, 0, 18 * GB), loading(file, 27 * GB, 0)
    assert not admit(folder, on_card).fits
    assert admit(folder, in_ram).fits
    assert admit(file, on_card).fits
    assert not admit(file, in_ram).fits


def test_model_on_the_gpu_frees_memory_on_the_gpu_only(machine: Put, folder: Path) -> None:
    on_card, in_ram = loading(folder, 0, 18 * GB), loading(folder, 20 * GB, 0)
    needed = AdmissionResult(False, False, 20 * GB, 4 * GB, (), 20 * GB, 4 * GB)
    assert needed.gains_from(on_card) and not needed.gains_from(in_ram)
    assert not needed.never_fits([on_card])
    assert needed.never_fits([in_ram])


def test_users_gpu_limit_holds_even_if_others_unload(machine: Put, folder: Path) -> None:
    other = loading(folder, 0, 9 * GB)
    options = EngineOptions(
        folder, load=LoadOptions(context_tokens=4096, max_slots=2, gpu_limit_bytes=3 * GB)
    )
    found = check_memory(options, [other])
    assert not found.fits and found.never_fits([other])
    wider = structs.replace(options, load=structs.replace(options.load, gpu_limit_bytes=12 * GB))
    assert check_memory(wider, ()).fits
    assert not check_memory(wider, [other, other]).never_fits([other, other])


def test_a_cache_that_the_user_forbids_unloads_nobody(machine: Put, folder: Path) -> None:
    options = EngineOptions(
        folder, load=LoadOptions(context_tokens=16_384, kv_limit_bytes=1_000_000), name="it"
    )
    with pytest.raises(DoesNotFit, match=r"it is not loaded: .*--kv-gb allows 1\.0 MB"):
        check_memory(options, ())


def test_engines_with_other_limits_are_other_engines(folder: Path) -> None:
    plain = EngineOptions(folder)
    others = (
        structs.replace(plain, load=LoadOptions(gpu_limit_bytes=GB)),
        structs.replace(plain, load=LoadOptions(kv_limit_bytes=GB)),
        structs.replace(plain, load=LoadOptions(dummy_weights=True)),
    )
    assert len({ModelSpec("it", one).key for one in (plain, *others)}) == 4


def test_a_remote_takes_nothing(machine: Put) -> None:
    from localchat.config.remotes import find_remote

    options = EngineOptions(Path("x"), remote=find_remote("http://127.0.0.1:9", {}))
    assert check_memory(options, ()) == AdmissionResult(True)


class Cards(FakeMachine):
    """A machine whose models that end in `gpu` lie on a card of 50 bytes."""

    def check_memory(self, options: EngineOptions, loaded: object) -> AdmissionResult:
        others = [one.spec.name for one in loaded]  # type: ignore[attr-defined]
        need = self.sizes[options.model.name]
        if not options.model.name.endswith("gpu"):
            free = self.total_bytes - sum(self.sizes[o] for o in others if not o.endswith("gpu"))
            return AdmissionResult(need <= free, False, need, free)
        free = 50 - sum(self.sizes[name] for name in others if name.endswith("gpu"))
        return AdmissionResult(need <= free, False, need, free, (), need, free)


def test_memory_on_a_gpu_is_not_freed_by_unloading_what_lies_in_ram() -> None:
    machine_ = Cards({"old": 90, "a-gpu": 40, "b-gpu": 40, "huge-gpu": 60})
    pool = EnginePool(
        machine_.resolve, machine_.open, machine_.check_memory, keep_alive_s=-1, patience_s=0.05
    )
    try:
        pool.lease("old").release()
        pool.lease("a-gpu").release()
        pool.lease("b-gpu").release()
        assert machine_.alive() == ["old", "b-gpu"]
        with pytest.raises(DoesNotFit):
            pool.lease("huge-gpu")
        assert machine_.alive() == ["old", "b-gpu"]
    finally:
        pool.close()
