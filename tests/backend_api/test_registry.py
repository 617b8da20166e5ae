"""Backends are found by entry point, and a broken one does not hide the others."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from localchat.backend_api.interface import Availability, Backend, MinimalBackend, OpenModel
from localchat.backend_api.registry import (
    choose_for_file,
    choose_for_model,
    find_backends,
    require_for_file,
)
from localchat.errors import LocalchatError, ModelInvalid, UsageError
from localchat.fit.report import Kind
from localchat.model_files.checkpoint import Checkpoint


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


class Fake(MinimalBackend):
    kinds: tuple[Kind, ...] = ("gguf", "safetensors")

    def __init__(self, name: str, *, ok: bool, kinds: tuple[Kind, ...] = kinds) -> None:
        self.name, self.kinds = name, kinds
        self._availability = Availability(ok, f"{name} reason.", f"{name} hint.")

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
