"""The CUDA backend as doors find it: what stands in its way is said, and nothing heavy is imported."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch

from localchat.backend_api.interface import Backend, LoadRequest
from localchat.backend_api.registry import find_backends, require_for_file
from localchat.errors import DoesNotFit, LocalchatError, ModelMissing
from localchat.fit.hardware import Gpu, Machine
from localchat.fit.load_options import LoadOptions
from localchat.model_files.checkpoint import read_checkpoint
from localchat_cuda.backend import CudaBackend, ReferenceBackend
from localchat_cuda.checkpoint_model import CheckpointModel
from localchat_cuda.config.reader import read_config
from localchat_cuda.environment import check_gpu, torch_cuda
from localchat_cuda.plan.preflight import expected_rate, plan_for
from localchat_cuda.weights.source import read_headers
from tests.support import tiny_models
from tests.support.speaking_checkpoint import write_speaking

ROOT = Path(__file__).parents[2]
HOPPER = Gpu(0, "NVIDIA H200", 141 << 30, 140 << 30, (9, 0), "580.159.03")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaking(tmp_path_factory.mktemp("speaking"))


def test_it_is_found_by_its_entry_point_and_takes_checkpoint_folders(folder: Path) -> None:
    found: Backend = find_backends()["cuda"]
    assert found.accepts(folder)
    assert not found.accepts(folder / "model.gguf")


def test_looking_imports_neither_torch_nor_triton(folder: Path) -> None:
    script = (
        "import sys, pathlib; from localchat_cuda import CudaBackend; b = CudaBackend();"
        f"b.available(); b.accepts(pathlib.Path({str(folder)!r})); b.build_info(); b.remedies();"
        "print(sorted({'torch', 'triton', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("gpu", "toolkit", "said"),
    [
        (HOPPER, "", "without CUDA"),
        (Gpu(0, "GTX 1080", 8 << 30, 8 << 30, (6, 1), "580.1"), "13.0", "compute capability 6.1"),
        (Gpu(0, "A100", 8 << 30, 8 << 30, (8, 0), "470.57"), "12.8", "driver 470.57 is too old"),
    ],
)
def test_obstacles_are_named_with_a_remedy(gpu: Gpu, toolkit: str, said: str) -> None:
    found = check_gpu(gpu, toolkit)
    assert not found.ok and said in found.reason and found.hint


def test_a_gpu_that_can_compute_is_named() -> None:
    found = check_gpu(HOPPER, "13.0")
    assert found.ok and "NVIDIA H200" in found.reason
    assert dict(found.versions).keys() == {"torch", "triton", "cuda"}


def test_of_several_cards_one_that_can_compute_is_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Gpu(0, "Tesla P40", 24 << 30, 24 << 30, (6, 1), "580.1")
    new = Gpu(1, "RTX 3060", 12 << 30, 11 << 30, (8, 6), "580.1")
    other = Gpu(2, "RTX 3070", 8 << 30, 7 << 30, (8, 6), "580.1")
    cards = (old, new, other)
    monkeypatch.setattr("localchat_cuda.environment.read_gpus", lambda: (cards, ""))
    monkeypatch.setattr("localchat_cuda.environment.find_spec", lambda name: object())
    monkeypatch.setattr("localchat_cuda.environment.torch_cuda", lambda: "13.0")
    assert "RTX 3060" in CudaBackend().available().reason
    monkeypatch.setattr("localchat_cuda.checkpoint_model.read_gpus", lambda: (cards, ""))
    model = CudaBackend().open(folder, lambda note: None)
    assert isinstance(model, CheckpointModel)
    assert model._target_gpus(LoadOptions()) == [new, other]
    assert model._ordinals == [1, 2]
    machine = Machine("cpu", frozenset(), 1, 1 << 34, 1 << 33, gpus=cards)
    plan = CudaBackend().plan(read_checkpoint(folder), LoadOptions(max_slots=2), machine)
    assert any("RTX 3060, number 1" in note for note in plan.notes)


def test_without_a_gpu_the_error_names_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localchat_cuda.environment.read_gpus", lambda: ((), ""))
    monkeypatch.setattr("localchat_cuda.environment.find_spec", lambda name: object())
    with pytest.raises(LocalchatError, match=r"cuda cannot run here: .*GPU") as caught:
        require_for_file(folder, "cuda")
    assert "GGUF" in caught.value.hint
    with pytest.raises(LocalchatError, match="no backend can run"):
        require_for_file(folder, None)


def test_the_cuda_version_of_the_installed_torch_is_read_from_its_file() -> None:
    torch = pytest.importorskip("torch")
    assert torch_cuda() == (torch.version.cuda or "")


def test_a_plan_before_a_load_is_the_one_of_the_load(folder: Path) -> None:
    machine = Machine("cpu", frozenset(), 1, 1 << 34, 1 << 33, gpus=(HOPPER,))
    model = read_checkpoint(folder)
    backend = CudaBackend()
    assert backend.objection(model) == ""
    found = backend.plan(model, LoadOptions(max_slots=2), machine)
    assert found.fits and found.context_tokens == 2048
    bare = Machine("cpu", frozenset(), 1, 1 << 34, 1 << 33)
    assert not backend.plan(model, LoadOptions(max_slots=2), bare).fits


def test_a_checkpoint_in_fp32_is_planned_as_the_load_makes_it(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    source = write_speaking(folder)
    machine = Machine("cpu", frozenset(), 1, 1 << 34, 1 << 33, gpus=(HOPPER,))
    settings = json.loads((source / "config.json").read_text())
    found = {}
    for kind in ("float32", "bfloat16"):
        for key in ("dtype", "torch_dtype"):
            settings.pop(key, None)
        (source / "config.json").write_text(json.dumps({**settings, "dtype": kind}))
        found[kind] = CudaBackend().plan(read_checkpoint(source), LoadOptions(max_slots=2), machine)
    wide, narrow = found["float32"], found["bfloat16"]
    assert (wide.kv_type, wide.kv_types) == ("bf16", ("bf16", "fp8"))
    assert wide.weights_bytes == narrow.weights_bytes
    assert wide.kv_bytes == narrow.kv_bytes
    assert any("loaded as bf16" in note for note in wide.notes) and not narrow.notes


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32"])
def test_a_config_without_a_type_has_that_of_the_weights(kind: str, tmp_path: Path) -> None:
    model = tiny_models.reference("qwen3").to(getattr(torch, kind))
    write_speaking(tmp_path)
    for path in tmp_path.glob("model*"):
        path.unlink()
    tiny_models.save(model, tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert read_config(tmp_path).dtype == kind
    machine = Machine("cpu", frozenset(), 1, 1 << 34, 1 << 33, gpus=(HOPPER,))
    found = CudaBackend().plan(read_checkpoint(tmp_path), LoadOptions(max_slots=2), machine)
    assert found.kv_type == {"float16": "f16"}.get(kind, "bf16")


def test_a_gpu_of_a_kind_that_nothing_was_measured_on_is_untried(tmp_path: Path) -> None:
    model = read_checkpoint(write_speaking(tmp_path))
    for capability, untried in (((9, 0), False), ((8, 9), True), ((12, 0), True)):
        card = replace(HOPPER, bytes_per_s=10**12, compute_capability=capability)
        machine = Machine("cpu", frozenset(), 1, 1 << 34, 1 << 33, gpus=(card,))
        plan = plan_for(model, LoadOptions(max_slots=2), machine)
        found = expected_rate(model, plan, machine)
        assert found is not None
        assert found.untried == untried


def test_weights_that_lie_there_in_a_second_form_are_left_alone(tmp_path: Path) -> None:
    folder = write_speaking(tmp_path)
    alone = ReferenceBackend().open(folder, print).plan(LoadOptions(max_slots=1))
    shutil.copy(next(folder.glob("model-*")), folder / "consolidated.safetensors")
    assert ReferenceBackend().open(folder, print).plan(LoadOptions(max_slots=1)) == replace(
        alone, free_bytes=ANY, gpu_free_bytes=ANY
    )
    assert all(path.name != "consolidated.safetensors" for path in read_headers(folder))


def test_the_users_limit_on_the_cache_is_kept(folder: Path) -> None:
    model = ReferenceBackend().open(folder, print)
    free = model.plan(LoadOptions(max_slots=4))
    bound = model.plan(LoadOptions(max_slots=4, kv_limit_bytes=free.kv_bytes // 2))
    assert bound.kv_bytes <= free.kv_bytes // 2
    with pytest.raises(DoesNotFit):
        model.plan(LoadOptions(context_tokens=2048, gpu_limit_bytes=1000))


def test_random_weights_need_no_weights_on_disk(tmp_path: Path) -> None:
    source = write_speaking(tmp_path)
    for path in source.glob("*.safetensors"):
        path.unlink()
    said: list[str] = []
    model = ReferenceBackend().open(source, said.append)
    with pytest.raises(ModelMissing, match="no safetensors"):
        model.plan(LoadOptions())
    plan = model.plan(LoadOptions(max_slots=1, dummy_weights=True))
    assert plan.weights_bytes > 0
    options = LoadRequest(plan, LoadOptions(max_slots=1, dummy_weights=True))
    runner = model.load(options, lambda done, total: True, said.append)
    assert runner.capabilities.context_tokens == 2048
    runner.close()
    assert any("random" in sentence for sentence in said)


def test_an_architecture_that_it_lacks_is_an_objection(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.reference("qwen3"), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": ["MambaForCausalLM"]}))
    assert "MambaForCausalLM" in CudaBackend().objection(read_checkpoint(tmp_path))


def test_a_crash_is_remembered_for_this_card_driver_and_libraries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def key(gpu: Gpu | None, triton: str = "3.6.0") -> str:
        cards = () if gpu is None else (gpu,)
        monkeypatch.setattr("localchat_cuda.environment.read_gpus", lambda: (cards, ""))
        monkeypatch.setattr(
            "localchat_cuda.environment.installed_version",
            lambda name: {"triton": triton}.get(name, "2.11.0"),
        )
        return CudaBackend().build_key()

    first = key(HOPPER)
    assert first.startswith("cuda-") and key(replace(HOPPER, free_bytes=1 << 30)) == first
    others = {
        key(replace(HOPPER, name="NVIDIA B200", compute_capability=(10, 0))),
        key(replace(HOPPER, driver="590.1")),
        key(HOPPER, "3.9.0"),
    }
    assert len(others) == 3 and first not in others
    assert key(None) == "" == ReferenceBackend().build_key()
