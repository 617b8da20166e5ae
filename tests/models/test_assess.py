"""The verdict before the download: `fit` of names that are not here, and `pull`."""

import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localchat.backend_api.interface import Availability
from localchat.backend_api.registry import find_backends
from localchat.cli.context import AppContext
from localchat.cli.main import run
from localchat.fit.hardware import Gpu, Machine
from localchat_cuda.backend import CudaBackend
from tests.support.cuda_configs import QWEN25
from tests.support.fake_hub import FakeHub, Fault
from tests.support.gguf_files import Q4_0, Size, llama, write_split
from tests.support.ram_bandwidth import put_bandwidth
from tests.support.shards import SHARDS
from tests.support.terminal_screen import Screen

GB = 10**9
LAPTOP = Machine("laptop", frozenset({"avx2"}), 4, 8 * GB, 6 * GB)
CARD = Gpu(0, "RTX 4090", 24 * GB, 21 * GB, (8, 9), bytes_per_s=1008 * GB)
NAME = "maker/Model"
SMALL = llama(Size(layers=1, code=Q4_0)).encode()

Outcome = tuple[int, str, str]
Call = Callable[..., Outcome]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Machine], None]:
    """Set the machine that is found."""
    put_bandwidth(monkeypatch, 20e9)

    def put(found: Machine) -> None:
        monkeypatch.setattr("localchat.fit.hardware.read_machine", lambda: found)
        monkeypatch.setattr("localchat_cuda.backend.read_machine", lambda: found)

    put(LAPTOP)
    return put


@pytest.fixture
def call(
    machine: Callable[[Machine], None],
    hub: FakeHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Call:
    hub.add(NAME, {"model-q4_0.gguf": SMALL})
    monkeypatch.setenv("LOCALCHAT_MODELS", str(tmp_path / "models"))

    def called(*args: str) -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        return run(args, AppContext()), *capfd.readouterr()

    return called


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA backend as if it could run here."""
    can = Availability(True, "torch is installed.")
    monkeypatch.setattr(CudaBackend, "available", lambda self: can)


def told(outcome: Outcome) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(outcome[1])
    return found


# ---------------------------------------------------------------------------- fit


def test_fit_reads_the_headers_of_a_name_that_is_not_here(call: Call, hub: FakeHub) -> None:
    code, out, err = call("fit", NAME, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["model"], found["path"]) == (f"hf.co/{NAME}:Q4_0", None)
    assert found["weights_bytes"] >= len(SMALL) * 0.8
    assert found["why"] == "A GGUF file runs on llama.cpp, on the CPU."
    assert "is not on this machine; reading its headers" in err
    assert not hub.requests("store")


def test_fit_of_a_name_of_the_catalogue_finds_all_parts(
    call: Call, hub: FakeHub, tmp_path: Path
) -> None:
    parts = write_split(tmp_path, "qwen2.5-7b-instruct-q4_k_m", 2, Size(layers=4))
    hub.add("Qwen/Qwen2.5-7B-Instruct-GGUF", {part.name: part.read_bytes() for part in parts})
    found = told(call("fit", "qwen2.5:7b", "--json"))
    assert found["model"] == "qwen2.5:7b-q4_k_m"
    assert found["weights_bytes"] >= sum(part.stat().st_size for part in parts) * 0.6


def test_fit_of_what_is_nowhere_says_what_every_command_says(call: Call) -> None:
    assert call("fit", "maker/none")[0] == 3
    code, _, err = call("fit", "wholly-unlike-anything")
    assert code == 3
    assert "no model 'wholly-unlike-anything'" in err
    code, _, err = call("fit", NAME, "--offline")
    assert code == 5
    assert "offline is set (--offline)" in err


def test_fit_of_the_catalogue_needs_no_network(call: Call, hub: FakeHub) -> None:
    code, out, err = call("fit", "qwen2.5:0.5b", "--offline", "--json")
    assert (code, hub.asked) == (0, [])
    assert "using its published shape" in err
    assert 390e6 < json.loads(out)["weights_bytes"] < 900e6


def test_fit_without_a_network_takes_the_published_shape(call: Call, hub: FakeHub) -> None:
    hub.close()
    code, out, err = call("fit", "qwen2.5:0.5b", "--json")
    assert code == 0
    assert "using the published shape of qwen2.5:0.5b-q4_k_m" in err
    assert 390e6 < json.loads(out)["weights_bytes"] < 900e6
    code, _, err = call("fit", NAME)
    assert code == 5
    assert "check your connection" in err


def test_a_checkpoint_that_lacks_a_card_is_not_drawn_as_a_bar(call: Call, hub: FakeHub) -> None:
    hub.add("maker/Full", {"config.json": json.dumps(QWEN25).encode(), **SHARDS})
    code, out, _ = call("fit", "hf.co/maker/Full")
    assert code == 4
    assert "needs an NVIDIA GPU" in out
    assert "It would take " in out
    assert "[" not in out
    assert out.count("GGUF") == 1


def test_a_checkpoint_that_the_engine_lacks_says_what_to_take(call: Call, hub: FakeHub) -> None:
    config = {**QWEN25, "architectures": ["MambaForCausalLM"]}
    hub.add("maker/State", {"config.json": json.dumps(config).encode(), **SHARDS})
    code, _, err = call("fit", "hf.co/maker/State")
    assert code == 1
    assert "MambaForCausalLM" in err
    assert "take a GGUF of it" in err


def test_a_shape_that_is_not_known_offline_says_which_are(call: Call) -> None:
    code, _, err = call("fit", "qwen2.5:7b-q3_k_s", "--offline")
    assert code == 5
    assert "its published shape is unknown" in err
    assert "qwen2.5:7b-q4_k_m, " in err


def test_fit_of_a_checkpoint_asks_the_cuda_backend(
    call: Call, hub: FakeHub, cuda: None, tmp_path: Path, machine: Callable[[Machine], None]
) -> None:
    files = {"config.json": json.dumps(QWEN25).encode(), **SHARDS}
    hub.add("maker/Full", files)
    machine(
        replace(LAPTOP, gpus=(replace(CARD, index=0, free_bytes=4 * GB), replace(CARD, index=1)))
    )
    found = told(call("fit", "maker/Full", "--json"))
    assert found["backend"] == "cuda"
    assert found["fits"]
    assert (
        found["why"] == "A safetensors checkpoint runs on the CUDA backend, all layers on the GPU."
    )
    assert found["expected_tokens_per_s"] == pytest.approx(0.6 * 1008 * GB / 1_800_000, rel=0.01)
    assert any("number 1" in note for note in found["notes"])
    assert any("GGUF" in line for line in found["alternatives"])
    folder = tmp_path / "full"
    folder.mkdir()
    for name, body in files.items():
        (folder / name).write_bytes(body)
    local = told(call("fit", str(folder), "--json"))
    same = ("weights_bytes", "kv_bytes", "total_bytes", "why", "fits")
    assert {key: local[key] for key in same} == {key: found[key] for key in same}


def test_a_checkpoint_without_a_gpu_is_said_to_need_one(
    call: Call, hub: FakeHub, cuda: None
) -> None:
    hub.add("maker/Full", {"config.json": json.dumps(QWEN25).encode(), **SHARDS})
    code, out, _ = call("fit", "maker/Full")
    assert code == 4
    assert "needs an NVIDIA GPU, and none was found" in out
    assert "GGUF" in out
    code, _, err = call("fit", "maker/Full", "--backend", "llamacpp")
    assert code == 1
    assert "llama.cpp does not run a safetensors checkpoint" in err


def test_a_checkpoint_where_no_backend_is_for_it(
    call: Call, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends = {name: one for name, one in find_backends().items() if name != "cuda"}
    monkeypatch.setattr("localchat.backend_api.registry.find_backends", lambda: backends)
    monkeypatch.setattr("localchat.models.assess.find_backends", lambda: backends)
    hub.add("maker/Full", {"config.json": json.dumps(QWEN25).encode(), **SHARDS})
    code, _, err = call("fit", "maker/Full")
    assert code == 1
    assert "no installed backend runs a safetensors checkpoint" in err


def test_require_gpu_ends_with_4_and_says_what_is_missing(
    call: Call, machine: Callable[[Machine], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = call("fit", NAME, "--require-gpu")
    assert code == 4
    assert "llama.cpp is built for the CPU alone" in out
    assert "doctor --rebuild" in out
    monkeypatch.setattr("localchat_llamacpp.backend.can_offload", lambda: True)
    assert "none was found" in call("fit", NAME, "--require-gpu")[1]
    machine(replace(LAPTOP, gpus=(replace(CARD, free_bytes=GB),)))
    assert "hold not even one layer" in call("fit", NAME, "--require-gpu")[1]
    machine(replace(LAPTOP, gpus=(CARD,)))
    assert call("fit", NAME, "--require-gpu")[0] == 0


# ---------------------------------------------------------------------------- pull


def test_pull_says_first_whether_it_will_fit(call: Call, hub: FakeHub) -> None:
    code, out, _ = call("pull", "--json", NAME)
    events = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [event["event"] for event in events[:2]] == ["verdict", "found"]
    assert events[0]["fits"] and events[0]["total_bytes"] > 0
    assert len(hub.requests("header")) <= 2


def test_pull_of_what_will_not_fit_warns_a_pipe_and_goes_on(
    call: Call, tmp_path: Path, machine: Callable[[Machine], None]
) -> None:
    machine(replace(LAPTOP, ram_free_bytes=GB // 2))
    code, _, err = call("pull", NAME)
    assert code == 0
    assert "will not fit" in err and "lists what makes room" in err
    assert (tmp_path / "models" / NAME / "model-q4_0.gguf").is_file()


def test_pull_that_goes_on_judges_no_second_time(call: Call, hub: FakeHub) -> None:
    hub.faults += [Fault(cut_after=5000), Fault(status=404)]
    assert call("pull", NAME)[0] == 5
    asked = len(hub.requests("header"))
    assert call("pull", NAME)[0] == 0
    assert len(hub.requests("header")) == asked


_TINY_MACHINE = """
import sys
from localchat.fit import hardware
from localchat.cli import main
hardware.read_machine = lambda: hardware.Machine("tiny", frozenset(), 1, 10**9, 10**8)
main(sys.argv[1:])
"""


@pytest.mark.parametrize(("key", "code", "told"), [("n", 4, "--yes"), ("y", 0, "is downloaded")])
def test_pull_of_what_will_not_fit_asks_on_a_terminal(
    call: Call, tmp_path: Path, key: str, code: int, told: str
) -> None:
    screen = Screen(["-c", _TINY_MACHINE, "pull", NAME], term="xterm")
    try:
        assert "will not fit" in screen.wait_for("[y/N]")
        screen.press(f"{key}\n")
        ended, rest = screen.finish()
    finally:
        screen.close()
    assert ended == code
    assert told in rest
    assert (tmp_path / "models" / NAME / "model-q4_0.gguf").is_file() is (key == "y")
    screen = Screen(["-c", _TINY_MACHINE, "pull", "--yes", NAME], term="xterm")
    try:
        assert screen.finish()[0] == 0
    finally:
        screen.close()
