"""`doctor` on backends of our own making: what it finds, what it says, and what it runs after asking."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from localchat.backend_api.interface import (
    Availability,
    Backend,
    BuildInfo,
    Device,
    OpenModel,
    Remedy,
)
from localchat.config.paths import find_paths
from localchat.engine.local.crash_record import CrashRecord
from localchat.errors import LocalchatError
from localchat.fit.hardware import Gpu, Machine
from localchat.fit.report import Kind
from tests.support.cli_program import SCENARIOS
from tests.support.terminal_screen import Call

INSTALLED = Availability(
    ok=True, reason="the binding is installed", versions=(("llama-cpp-python", "0.3.36"),)
)
CARD = Device("GPU0", "a card", "gpu", 10_000_000_000, 12_000_000_000)
BUILD = BuildInfo(
    library="/lib/libllama.so",
    version="0.3.36",
    features=frozenset({"AVX2", "AMX_INT8"}),
    offload=False,
    devices=(CARD,),
)


class FakeBackend(Backend):
    name = "llamacpp"
    kinds: tuple[Kind, ...] = ("gguf",)

    def __init__(
        self, *, available: Availability = INSTALLED, broken: Exception | None = None
    ) -> None:
        self._available = available
        self._broken = broken
        self.found: tuple[Remedy, ...] = ()
        self.build = BUILD

    def available(self) -> Availability:
        return self._available

    def accepts(self, path: Path) -> bool:
        return True

    def open(self, path: Path, say: Callable[[str], None]) -> OpenModel:
        raise AssertionError("doctor opens nothing")

    def build_key(self) -> str:
        return "this build"

    def build_info(self) -> BuildInfo:
        if self._broken:
            raise self._broken
        return self.build

    def remedies(self) -> tuple[Remedy, ...]:
        return self.found


Install = Callable[..., FakeBackend]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    def installed(**how: object) -> FakeBackend:
        backend = FakeBackend(**how)  # type: ignore[arg-type]
        found: dict[str, Backend] = {"llamacpp": backend}
        monkeypatch.setattr("localchat.cli.settings.doctor_report.find_backends", lambda: found)
        return backend

    return installed


def doctor(call: Call, *args: str) -> tuple[int, str, str]:
    return call(SCENARIOS["hello"], "doctor", *args, named=False)


def test_a_second_backend_with_a_gpu_may_take_what_it_runs_faster(
    call: Call, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = install(), FakeBackend()
    first.build = second.build = replace(BUILD, offload=True)
    monkeypatch.setattr(second, "name", "cuda")
    monkeypatch.setattr(
        "localchat.cli.settings.doctor_report.find_backends",
        lambda: {"llamacpp": first, "cuda": second},
    )
    _, out, _ = doctor(call)
    assert (
        "A GGUF file runs on llama.cpp, as many layers on the GPU as fit, or on the CUDA backend where that is "
        "faster."
    ) in out.replace("\n", " ")


def test_it_tells_machine_build_and_devices(call: Call, install: Install) -> None:
    install()
    code, out, _ = doctor(call)
    assert code == 0
    for word in (
        "Python",
        "cores",
        "free of",
        "AMX_INT8",
        "a card",
        "uses no GPU",
        "llamacpp: available",
        "A GGUF file runs on llama.cpp.",
        "A safetensors checkpoint cannot be run here",
    ):
        assert word in out
    assert "safe mode" not in out


def test_json_holds_the_same(call: Call, install: Install) -> None:
    install()
    code, out, _ = doctor(call, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["backends"][0]["features"] == ["AMX_INT8", "AVX2"]
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))


def test_what_is_wrong_in_the_users_files_is_told(
    call: Call, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    assert json.loads(doctor(call, "--json")[1])["troubles"] == []
    paths = find_paths(os.environ)
    paths.settings_file.parent.mkdir(parents=True)
    paths.settings_file.write_text("[nonsense]")
    paths.settings_file.with_name("models.toml").write_text("[models")
    paths.data_dir.mkdir(parents=True, exist_ok=True)
    (paths.data_dir / "bookmarks.json").write_text("{")
    code, out, _ = doctor(call, "--json")
    settings, catalogue, bookmarks = json.loads(out)["troubles"]
    assert code == 0
    assert "nonsense" in settings and "models.toml is not TOML" in catalogue
    assert "bookmarks.json cannot be read" in bookmarks
    text = doctor(call)[1]
    assert text.count("\nError: ") == 3
    paths.settings_file.unlink()
    monkeypatch.setenv("LOCALCHAT_THREADS", "many")
    assert "LOCALCHAT_THREADS: threads must be a whole number" in doctor(call)[1]


def test_memory_is_told_once_and_by_whom(
    call: Call, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(0, "RTX 4090", 24_000_000_000, 21_000_000_000)
    machine = Machine("a CPU", frozenset(), 1, 16_000_000_000, 9_000_000_000, gpus=(gpu,))
    monkeypatch.setattr("localchat.fit.hardware.read_machine", lambda: machine)
    backend = install()
    backend.build = replace(
        BUILD, devices=(Device("CPU", "a CPU", "cpu", 16 * 10**9, 16 * 10**9), CARD)
    )
    out = doctor(call)[1]
    rows = {line[2:13].strip(): line[13:] for line in out.splitlines() if line.startswith("  ")}
    assert rows["memory"] == "9.0 GB free of 16.0 GB"
    assert "RTX 4090, 21.0 GB free of 24.0 GB" in out
    # The library calls all of the RAM free; of a card it is said that this is its count.
    assert "CPU (cpu): a CPU\n" in out
    assert "a card; reports 10.0 GB free of 12.0 GB" in out
    assert "1 core," in rows["CPU"]
    found = json.loads(doctor(call, "--json")[1])
    assert found["memory_available_bytes"] == 9_000_000_000
    assert found["gpus"] == [
        {"name": "RTX 4090", "free_bytes": 21_000_000_000, "total_bytes": 24_000_000_000}
    ]
    cpu, card = found["backends"][0]["devices"]
    assert "free_bytes" not in cpu
    assert card["free_bytes"] == 10_000_000_000


def test_each_gpu_has_its_row(
    call: Call, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = tuple(
        Gpu(index, "RTX 3090", 24 * 10**9, free * 10**9) for index, free in ((0, 21), (1, 3))
    )
    machine = Machine("a CPU", frozenset(), 1, 16_000_000_000, 9_000_000_000, gpus=gpus)
    monkeypatch.setattr("localchat.fit.hardware.read_machine", lambda: machine)
    install()
    rows = [" ".join(line.split()) for line in doctor(call)[1].splitlines()]
    assert "GPU 0 RTX 3090, 21.0 GB free of 24.0 GB" in rows
    assert "GPU 1 RTX 3090, 3.0 GB free of 24.0 GB" in rows


def test_a_remembered_crash_is_reported_with_both_remedies(call: Call, install: Install) -> None:
    import os

    backend = install()
    backend.found = (
        Remedy("Stay in safe mode."),
        Remedy("Build it again.", "cpu"),
    )
    CrashRecord(find_paths(os.environ).state_dir / "safe-builds.json").add("this build")
    out = doctor(call)[1]
    assert "safe mode" in out
    assert "Stay in safe mode." in out
    assert "localchat doctor --rebuild=cpu" in out
    assert '"safe_mode":true' in doctor(call, "--json")[1]


def test_a_backend_that_cannot_run_says_why_and_what_to_do(call: Call, install: Install) -> None:
    install(
        available=Availability(ok=False, reason="no torch here", hint="install localchat-app[cuda]")
    )
    code, out, _ = doctor(call)
    assert code == 0
    assert "not available" in out
    assert "no torch here" in out
    assert "localchat-app[cuda]" in out


def test_a_library_that_cannot_be_loaded_is_told_with_what_to_do(
    call: Call, install: Install
) -> None:
    install(broken=LocalchatError("llama.cpp needs libgomp.so.1", hint="apt install libgomp1"))
    out = doctor(call)[1]
    assert "  to do      apt install libgomp1\n  trouble    llama.cpp needs libgomp.so.1\n" in out


def test_a_library_that_does_not_load_is_a_finding(call: Call, install: Install) -> None:
    install(broken=OSError("libcudart.so.12: cannot open shared object file"))
    code, out, _ = doctor(call)
    assert code == 0
    assert "libcudart.so.12" in out
