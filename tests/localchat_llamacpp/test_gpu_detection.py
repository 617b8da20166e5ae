"""Graphics cards that only the library knows: AMD, Intel, integrated."""

import ctypes
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localchat.backend_api.interface import Device
from localchat.fit.hardware import Gpu, Machine
from localchat_llamacpp.gpu_detection import add_gpus, detect_gpus
from localchat_llamacpp.native import library
from localchat_llamacpp.native_model import Placement, load_vocabulary, load_weights

GB = 10**9
MACHINE = Machine("x", frozenset(), 8, 32 * GB, 28 * GB)
CPU = Device("CPU", "Ryzen", "cpu", 28 * GB, 32 * GB)
RADEON = Device("Vulkan0", "RX 7900", "gpu", 22 * GB, 24 * GB)
INSIDE = Device("Vulkan1", "Radeon 780M", "igpu", 14 * GB, 16 * GB)


def test_cards_with_memory_of_their_own_are_taken() -> None:
    found = add_gpus(MACHINE, lambda: [CPU, RADEON, INSIDE])
    assert found.gpus == (Gpu(0, "RX 7900", 24 * GB, 22 * GB),)
    assert not found.unified_memory


def test_an_integrated_gpu_alone_shares_the_ram() -> None:
    found = add_gpus(MACHINE, lambda: [CPU, INSIDE])
    assert found.unified_memory and not found.gpus


def test_the_library_is_not_asked_of_cards_that_are_known() -> None:
    def ask() -> list[Device]:
        raise AssertionError("CUDA would take memory of the card")

    known = replace(MACHINE, gpus=(Gpu(0, "H200", 141 * GB, 140 * GB),))
    assert add_gpus(known, ask) is known
    assert add_gpus(MACHINE, lambda: [CPU]) is MACHINE


def test_only_a_build_for_gpus_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def run(command: object, **_: object) -> object:
        asked.append(command)
        device = '{"name":"V","description":"RX","kind":"gpu","free_bytes":2,"total_bytes":3}'
        return SimpleNamespace(stdout=f"[{device}]")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("localchat_llamacpp.gpu_detection.can_offload", lambda: False)
    assert detect_gpus(MACHINE) is MACHINE and not asked
    monkeypatch.setattr("localchat_llamacpp.gpu_detection.can_offload", lambda: True)
    assert detect_gpus(MACHINE).gpus == (Gpu(0, "RX", 3, 2),)
    detect_gpus(replace(MACHINE, unified_memory=True))
    assert len(asked) == 1


def test_the_real_library_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localchat_llamacpp.gpu_detection.can_offload", lambda: True)
    assert detect_gpus(MACHINE).cores == MACHINE.cores


@pytest.mark.parametrize(("gpu_layers", "hidden"), [(None, True), (0, True), (3, False)])
def test_neither_a_vocabulary_nor_a_load_without_layers_sees_the_card(
    models: dict[str, Path], gpu_layers: int | None, hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp asks each device that it is given for its free memory: with CUDA, 0.5 GB of the card."""
    api = library().api
    load = api.llama_model_load_from_file
    empty: list[bool] = []

    def watched(path: bytes, parameters: Any) -> object:
        at = parameters.devices
        empty.append(at is not None and ctypes.c_void_p.from_address(at).value is None)
        return load(path, parameters)

    monkeypatch.setattr(api, "llama_model_load_from_file", watched)
    if gpu_layers is None:
        handle = load_vocabulary(models["llama"])[0]
    else:
        handle = load_weights(
            models["llama"],
            placement=Placement(gpu_layers),
            safe_mode=True,
            total_bytes=1,
            progress=lambda done, total: True,
        ).handle
    api.llama_model_free(handle)
    assert empty == [hidden]
