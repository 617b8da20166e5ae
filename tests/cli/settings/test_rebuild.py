"""`doctor --rebuild`, on a rebuilder of our own making."""

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from localchat.backend_api.interface import (
    Availability,
    Backend,
    OpenModel,
    RebuildOffer,
    RebuildOutcome,
    Remedy,
)
from localchat.errors import LocalchatError
from tests.support.cli_program import SCENARIOS
from tests.support.terminal_screen import Call

OFFER = RebuildOffer("cpu", "uses AVX-512: prompts are read 1.3 times as fast")


class FakeRebuilder:
    kinds = ("cpu", "cuda")

    def __init__(self) -> None:
        self.offered: RebuildOffer | None = OFFER
        self.outcome = RebuildOutcome(installed=True, sentence="it writes the same text")
        self.fails: BaseException | None = None
        self.built: list[str] = []
        self.there = False

    def offer(self) -> RebuildOffer | None:
        return self.offered

    def rebuild(self, kind: str) -> RebuildOutcome:
        self.built.append(kind)
        if self.fails is not None:
            raise self.fails
        return self.outcome

    def undo(self) -> bool:
        there, self.there = self.there, False
        return there


class FakeBackend(Backend):
    name = "llamacpp"

    def __init__(self, builder: FakeRebuilder) -> None:
        self._builder = builder
        self.found: tuple[Remedy, ...] = ()

    def available(self) -> Availability:
        raise AssertionError("a rebuild does not ask")

    def accepts(self, path: Path) -> bool:
        return False

    def open(self, path: Path, notify: Callable[[str], None]) -> OpenModel:
        raise AssertionError("a rebuild opens nothing")

    def remedies(self) -> tuple[Remedy, ...]:
        return self.found

    def rebuilder(self) -> FakeRebuilder:
        return self._builder


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    # First imported below, it would keep the backends of this test for all that follow.
    importlib.import_module("localchat.cli.settings.doctor_report")
    made = FakeBackend(FakeRebuilder())
    found: dict[str, Backend] = {"llamacpp": made}
    monkeypatch.setattr("localchat.backend_api.registry.find_backends", lambda: found)
    return made


@pytest.fixture
def builder(backend: FakeBackend) -> FakeRebuilder:
    return backend.rebuilder()


def doctor(call: Call, *args: str) -> tuple[int, str, str]:
    return call(SCENARIOS["hello"], "doctor", *args, named=False)


def test_a_better_build_is_used_and_can_be_taken_back(call: Call, builder: FakeRebuilder) -> None:
    code, out, err = doctor(call, "--rebuild", "--yes")
    assert (code, out, builder.built) == (0, "", ["cpu"])
    assert "used from the next start on: it writes the same text" in err
    assert "localchat doctor --rebuild=undo" in err


def test_a_build_that_is_not_better_says_why(call: Call, builder: FakeRebuilder) -> None:
    builder.outcome = RebuildOutcome(installed=False, sentence="it crashed (SIGILL)")
    code, out, err = doctor(call, "--rebuild", "--yes")
    assert (code, out) == (0, "")
    assert "not used: it crashed (SIGILL)" in err and "undo" not in err


def test_a_build_that_fails_ends_with_1_and_its_reason(call: Call, builder: FakeRebuilder) -> None:
    builder.fails = LocalchatError("llama.cpp could not be built", hint="see above")
    code, _, err = doctor(call, "--rebuild", "--yes")
    assert code == 1 and "could not be built" in err and "see above" in err


def test_an_interrupt_says_that_nothing_changed(call: Call, builder: FakeRebuilder) -> None:
    builder.fails = KeyboardInterrupt()
    code, _, err = doctor(call, "--rebuild", "--yes")
    assert code == 130 and "nothing was changed" in err


def test_the_kind_that_is_named_is_built_and_an_unknown_one_is_refused(
    call: Call, builder: FakeRebuilder
) -> None:
    builder.offered = None
    assert doctor(call, "--rebuild=cuda", "--yes")[0] == 0
    code, _, err = doctor(call, "--rebuild=cudo", "--yes")
    assert (code, builder.built) == (2, ["cuda"]) and "cuda" in err


def test_where_nothing_would_be_better_nothing_is_built(
    call: Call, backend: FakeBackend, builder: FakeRebuilder
) -> None:
    builder.offered = None
    code, _, err = doctor(call, "--rebuild", "--yes")
    assert (code, builder.built) == (0, []) and "nothing to rebuild" in err
    backend.found = (Remedy("Stay in safe mode."), Remedy("Build without AMX.", "cpu"))
    assert doctor(call, "--rebuild", "--yes")[0] == 0
    assert builder.built == ["cpu"]


def test_a_missing_compiler_is_named_before_anything_begins(
    call: Call, builder: FakeRebuilder
) -> None:
    builder.offered = RebuildOffer("cpu", "is faster", "It needs a C++ compiler: get g++.")
    code, _, err = doctor(call, "--rebuild", "--yes")
    assert (code, builder.built) == (1, []) and "It needs a C++ compiler: get g++." in err


def test_without_a_terminal_it_wants_yes_and_offline_it_refuses(
    call: Call, builder: FakeRebuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = doctor(call, "--rebuild")
    assert code == 2 and "--yes" in err
    monkeypatch.setenv("LOCALCHAT_OFFLINE", "1")
    code, _, err = doctor(call, "--rebuild", "--yes")
    assert code == 2 and "offline" in err
    assert builder.built == []


def test_undo_takes_the_build_back(call: Call, builder: FakeRebuilder) -> None:
    builder.there = True
    assert "the build is removed" in doctor(call, "--rebuild=undo")[2]
    assert "there is no build" in doctor(call, "--rebuild=undo")[2]
