"""Backends are found by entry point, and a broken one does not hide the others."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localchat.backend_api.interface import Availability, Backend, OpenModel
from localchat.backend_api.registry import (
    choose_for_file,
    choose_for_load,
    choose_for_model,
    find_backends,
    require_for_file,
)
from localchat.errors import LocalchatError, ModelInvalid, UsageError
from localchat.fit.hardware import Gpu, Machine
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat.fit.report import Kind
from localchat.fit.speed import Estimate, Spread
from localchat.model_files.checkpoint import Checkpoint, ModelSummary
from tests.support.gguf_files import Size, llama
from tests.support.memory_plans import PLAN


def declare(folder: Path, *points: str) -> None:
    """Put a distribution with these entry points into the folder."""
    about = folder / "stranger-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1\n")
    (about / "entry_points.txt").write_text("\n".join(("[localchat.backends]", *points)) + "\n")


def test_a_strangers_backend_enters_as_ours_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stranger_backend.py").write_text("class Backend:\n    name = 'stranger'\n")
    declare(tmp_path, "stranger = stranger_backend:Backend", "broken = stranger_backend:Missing")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = find_backends()
    assert found["stranger"].name == "stranger"
    assert {"llamacpp", "broken"} <= set(found)
    del sys.modules["stranger_backend"]


def test_a_backend_that_cannot_be_imported_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(tmp_path, "broken = no_such_module_here:Backend")
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = find_backends()["broken"]
    available = broken.available()
    assert not available.ok
    assert "no_such_module_here" in available.reason
    assert (broken.build_key(), broken.remedies()) == ("", ())
    assert not broken.accepts(tmp_path / "m.gguf")
    with pytest.raises(LocalchatError, match="no_such_module_here"):
        broken.open(tmp_path / "m.gguf", print)


def test_the_backend_for_a_file_is_one_that_accepts_it(tmp_path: Path) -> None:
    assert choose_for_file(tmp_path / "m.gguf").backend.name == "llamacpp"
    assert choose_for_file(tmp_path / "m.bin", "llamacpp").backend.name == "llamacpp"
    with pytest.raises(UsageError, match="'nonsense'"):
        choose_for_file(tmp_path / "m.gguf", "nonsense")
    with pytest.raises(LocalchatError, match="not a format"):
        choose_for_file(tmp_path / "m.bin")


class Fake(Backend):
    kinds: tuple[Kind, ...] = ("gguf", "safetensors")

    def __init__(
        self, name: str, *, ok: bool = True, kinds: tuple[Kind, ...] = kinds,
        rate: Estimate | None = None, **plan: Any,
    ) -> None:  # fmt: skip
        self.name, self.kinds, self._plan, self._rate = name, kinds, plan, rate
        self._availability = Availability(ok, f"{name} reason.", f"{name} hint.")

    def plan(self, model: ModelSummary, options: LoadOptions, machine: Machine) -> MemoryPlan:
        if not self._plan:
            raise UsageError("no such options here")
        return replace(PLAN, backend=self.name, layers=29, **self._plan)

    def expected_rate(self, model: ModelSummary, plan: MemoryPlan, threads: int) -> Estimate | None:
        return self._rate

    def available(self) -> Availability:
        return self._availability

    def accepts(self, path: Path) -> bool:
        return path.suffix == ".gguf"

    def open(self, path: Path, notify: Callable[[str], None]) -> OpenModel:
        raise AssertionError("nothing is opened here")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def put(*backends: Fake) -> None:
        found: dict[str, Backend] = {one.name: one for one in backends}
        monkeypatch.setattr("localchat.backend_api.registry.find_backends", lambda: found)

    return put


def test_front_ends_and_the_engine_choose_alike_and_for_the_same_reason(
    install: Callable[..., None],
) -> None:
    install(Fake("first", ok=False), Fake("second", ok=True))
    chosen = choose_for_model(Checkpoint("m", {}), "gguf")
    assert chosen.backend.name == "second"
    assert chosen.why == "a GGUF file runs on second (first: first reason)"
    assert require_for_file(Path("m.gguf")) == chosen
    assert choose_for_file(Path("m.gguf")) == chosen


def test_a_backend_comes_first_for_the_files_that_it_names_first(
    install: Callable[..., None],
) -> None:
    install(Fake("first", ok=True, kinds=("safetensors", "gguf")), Fake("second", ok=True))
    chosen = choose_for_model(Checkpoint("m", {}), "gguf")
    assert (chosen.backend.name, chosen.others) == ("second", ("first",))
    assert choose_for_file(Path("m.gguf")).backend.name == "second"
    assert choose_for_model(Checkpoint("m", {}), "safetensors").backend.name == "first"
    assert choose_for_file(Path("m.gguf"), "first").backend.name == "first"
    install(Fake("first", ok=True, kinds=("safetensors", "gguf")), Fake("second", ok=False))
    assert choose_for_file(Path("m.gguf")).backend.name == "first"


def test_a_front_end_may_look_at_a_backend_that_cannot_run_and_the_engine_may_not(
    install: Callable[..., None],
) -> None:
    install(Fake("first", ok=False), Fake("second", ok=False))
    assert choose_for_file(Path("m.gguf")).backend.name == "first"
    with pytest.raises(ModelInvalid, match=r"first: first reason\. first hint\.; second: second"):
        require_for_file(Path("m.gguf"))
    with pytest.raises(LocalchatError, match="second cannot run here: second reason") as caught:
        require_for_file(Path("m.gguf"), "second")
    assert caught.value.hint == "second hint."


def test_a_file_that_nobody_accepts_goes_to_one_that_explains_what_is_wrong(
    install: Callable[..., None],
) -> None:
    install(Fake("first", ok=False), Fake("second", ok=True))
    assert require_for_file(Path("m.bin")).backend.name == "second"
    install(Fake("first", ok=False))
    with pytest.raises(ModelInvalid, match="not a format that any installed backend supports"):
        require_for_file(Path("m.bin"))


def test_others_that_could_run_a_model_are_named(install: Callable[..., None]) -> None:
    install(Fake("first", ok=True), Fake("second", ok=True), Fake("third", ok=False))
    assert choose_for_model(Checkpoint("m", {}), "gguf").others == ("second",)
    named = choose_for_model(Checkpoint("m", {}), "gguf", "third")
    assert (named.backend.name, named.why) == ("third", "third was asked for")
    assert named.others == ("first", "second")


GPU = Machine("m", frozenset(), 4, 0, 0, gpus=(Gpu(0, "card", 0, 0),))
Plan = dict[str, Any]
ON_CPU: Plan = {"gpu_layers": 0}
PARTLY: Plan = {"gpu_layers": 20}
WHOLE: Plan = {"gpu_layers": 29}


@pytest.mark.parametrize(
    ("first", "second", "options", "chosen"),
    [
        (ON_CPU, WHOLE, {}, "second"),
        (PARTLY, WHOLE, {}, "second"),
        (PARTLY, WHOLE, {"gpu_layers": "all"}, "second"),
        (WHOLE, WHOLE, {}, "first"),
        ({**WHOLE, "experts_on_cpu": 4}, WHOLE, {}, "second"),
        ({**WHOLE, "fits": False}, WHOLE, {}, "second"),
        (ON_CPU, PARTLY, {}, "first"),
        (ON_CPU, {**WHOLE, "fits": False}, {}, "first"),
        (ON_CPU, {}, {}, "first"),
        (ON_CPU, WHOLE, {"gpu_layers": 0}, "first"),
        (ON_CPU, WHOLE, {"gpu_layers": 10}, "first"),
        (ON_CPU, WHOLE, {"experts_on_cpu": 2}, "first"),
        (ON_CPU, WHOLE, {"draft": "small.gguf"}, "first"),
        ({**ON_CPU, "context_tokens": 32_768}, {**WHOLE, "context_tokens": 8192}, {}, "second"),
        ({**ON_CPU, "context_tokens": 32_768}, {**WHOLE, "context_tokens": 4096}, {}, "first"),
        ({**ON_CPU, "context_tokens": 4096}, {**WHOLE, "context_tokens": 4096}, {}, "second"),
    ],
)
def test_a_gpu_that_holds_the_whole_model_goes_before_a_cpu(
    install: Callable[..., None],
    first: dict[str, Any],
    second: dict[str, Any],
    options: dict[str, Any],
    chosen: str,
) -> None:
    install(Fake("first", **first), Fake("second", **second))
    model, load = Checkpoint("m", {}), LoadOptions(**options)
    found = choose_for_load(model, "gguf", load, GPU)
    assert found.backend.name == chosen
    assert found.others == (("second",) if chosen == "first" else ("first",))
    assert choose_for_load(model, "gguf", load, replace(GPU, gpus=())).backend.name == "first"
    assert choose_for_load(model, "gguf", load, GPU, "first").backend.name == "first"


def test_the_reason_tells_why_the_usual_backend_was_passed_over(
    install: Callable[..., None],
) -> None:
    model = Checkpoint("m", {})
    install(Fake("llamacpp", **ON_CPU), Fake("cuda", **WHOLE))
    assert choose_for_load(model, "gguf", LoadOptions(), GPU).why == (
        "llama.cpp would compute it on the CPU here, so a GGUF file runs on the CUDA backend"
    )
    install(Fake("llamacpp", **PARTLY), Fake("cuda", **WHOLE))
    assert "a part of it" in choose_for_load(model, "gguf", LoadOptions(), GPU).why


EXACT = Spread(1.0, 1.0)
SLOW, FAST, NEARLY = EXACT.around(100.0), EXACT.around(120.0), EXACT.around(119.0)
GUESS = EXACT.around(900.0, untried=True)
SHORT: Plan = {**WHOLE, "context_tokens": PLAN.context_tokens - 1}


@pytest.mark.parametrize(
    ("usual", "other", "plan", "chosen"),
    [
        (SLOW, FAST, WHOLE, "cuda"),
        (SLOW, NEARLY, WHOLE, "llamacpp"),
        (FAST, SLOW, WHOLE, "llamacpp"),
        (SLOW, GUESS, WHOLE, "llamacpp"),
        (SLOW, None, WHOLE, "llamacpp"),
        (None, FAST, WHOLE, "llamacpp"),
        (SLOW, FAST, SHORT, "llamacpp"),
        (SLOW, FAST, PARTLY, "llamacpp"),
    ],
)
def test_of_two_that_hold_the_whole_model_on_the_gpu_the_clearly_faster_runs_it(
    install: Callable[..., None], usual: Estimate, other: Estimate, plan: Plan, chosen: str
) -> None:
    install(Fake("llamacpp", rate=usual, **WHOLE), Fake("cuda", rate=other, **plan))
    found = choose_for_load(Checkpoint("m", {}), "gguf", LoadOptions(), GPU)
    assert found.backend.name == chosen
    once = choose_for_load(Checkpoint("m", {}), "gguf", LoadOptions(single_request_tokens=100), GPU)
    assert once.backend.name == "llamacpp"
    if chosen == "cuda":
        assert found.why == (
            "llama.cpp is expected to generate 100 tok/s here, not 120, so a GGUF file runs on the "
            "CUDA backend"
        )


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a file, on a machine with a GPU."""
    monkeypatch.setattr("localchat.fit.hardware.read_machine", lambda: GPU)
    found = tmp_path / "m.gguf"
    found.write_bytes(llama(Size(layers=1)).encode())
    return found


def test_the_engine_chooses_for_a_file_and_its_options_as_front_ends_do(
    install: Callable[..., None], path: Path
) -> None:
    install(Fake("first", **ON_CPU), Fake("second", **WHOLE))
    assert require_for_file(path, None, LoadOptions()).backend.name == "second"
    assert require_for_file(path, None, LoadOptions(gpu_layers=0)).backend.name == "first"
    assert require_for_file(path, "first", LoadOptions()).backend.name == "first"
    assert require_for_file(path).backend.name == "first"
