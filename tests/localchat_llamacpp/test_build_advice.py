"""Advice about the llama.cpp build that `doctor` prints."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from localchat.backend_api.interface import BuildInfo
from localchat.fit.hardware import Machine
from localchat_llamacpp import build_advice, build_tools
from localchat_llamacpp.library_source import (
    VARIABLE,
    LibraryFile,
    Search,
    Source,
    find_library,
)


def test_facts_name_the_library_and_its_devices() -> None:
    facts = build_advice.read_build()
    assert facts.library.endswith((".so", ".dylib", ".dll"))
    library = find_library().library
    assert library is not None
    assert facts.version.startswith(library.title)
    assert any(device.kind == "cpu" and device.total_bytes > 0 for device in facts.devices)


def test_features_are_those_that_are_on() -> None:
    found = build_advice._features(
        "CPU : SSE3 = 1 | AMX_INT8 = 0 | AVX2 = 1 | CUDA : ARCHS = 900 | "
    )
    assert found == {"SSE3", "AVX2"}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Source], None]:
    """Make a library of this source the one in use."""

    def used(source: Source) -> None:
        file = tmp_path / "libllama.so"
        file.touch()
        search = Search(LibraryFile(source, file, "1", "why"))
        monkeypatch.setattr(build_advice, "find_library", lambda: search)
        monkeypatch.setattr(build_advice, "can_offload", lambda: False)

    monkeypatch.setattr(build_tools, "missing_tools", lambda kind: "")
    return used


def _machine(root: Path, flags: str = "", *, nvidia: bool = False) -> Path:
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text(f"model name : x\nflags : {flags}\n\nflags : {flags}\n")
    if nvidia:
        (root / "proc/driver/nvidia").mkdir(parents=True)
    return root


def test_a_plan_counts_on_the_features_that_the_library_was_built_for(
    library: Callable[[Source], None],
) -> None:
    flags = frozenset({"avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8"})
    machine = Machine("server", flags, 4, 16 << 30, 12 << 30)
    library("xllamacpp")
    assert build_advice.as_built(machine).cpu_flags == {"avx2", "fma"}
    for own in ("llama-cpp-python", "native", "named"):
        library(own)
        assert build_advice.as_built(machine) is machine


def test_instructions_that_the_prebuilt_library_lacks_are_worth_a_build(
    library: Callable[[Source], None], tmp_path: Path
) -> None:
    library("xllamacpp")
    offer = build_advice.best_offer(_machine(tmp_path, "avx avx2 fma avx512f avx512_vnni amx_int8"))
    assert offer is not None and offer.kind == "cpu"
    assert "AVX-512 and AMX" in offer.gain


@pytest.mark.parametrize("source", ["native", "llama-cpp-python", "named"])
def test_a_library_that_was_built_here_needs_no_other_for_the_cpu(
    library: Callable[[Source], None], tmp_path: Path, source: Source
) -> None:
    library(source)
    assert build_advice.best_offer(_machine(tmp_path, "avx2 avx512f")) is None


def test_a_cpu_that_the_prebuilt_library_uses_whole_needs_no_build(
    library: Callable[[Source], None], tmp_path: Path
) -> None:
    library("xllamacpp")
    assert build_advice.best_offer(_machine(tmp_path, "avx avx2 fma f16c")) is None


def test_a_card_comes_before_instructions_unless_its_compiler_is_missing(
    library: Callable[[Source], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.platform == "darwin":
        pytest.skip("Apple's graphics cards need no build")
    library("xllamacpp")
    root = _machine(tmp_path, "avx2 avx512f", nvidia=True)
    offer = build_advice.best_offer(root)
    assert offer is not None and (offer.kind, offer.missing) == ("cuda", "")
    monkeypatch.setattr(build_tools, "missing_tools", lambda kind: "nvcc" if kind == "cuda" else "")
    offer = build_advice.best_offer(root)
    assert offer is not None and offer.kind == "cpu"
    monkeypatch.setattr(build_tools, "missing_tools", lambda kind: f"no compiler for {kind}")
    offer = build_advice.best_offer(root)
    assert offer is not None and (offer.kind, offer.missing) == ("cuda", "no compiler for cuda")


def _build(*, offload: bool = False, amx: bool = False) -> BuildInfo:
    return BuildInfo("libllama.so", "0", frozenset({"AMX_INT8"} if amx else ()), offload, ())


def test_a_build_that_fits_the_machine_has_no_remedies(
    library: Callable[[Source], None], tmp_path: Path
) -> None:
    library("llama-cpp-python")
    assert build_advice.remedies(_build(), tmp_path) == ()


def test_a_better_build_and_the_amx_fault_are_told(
    library: Callable[[Source], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library("xllamacpp")
    monkeypatch.setattr(build_tools, "missing_tools", lambda kind: "It needs a compiler.")
    better, safe, without = build_advice.remedies(
        _build(amx=True), _machine(tmp_path, "avx2 avx512f")
    )
    assert better.rebuild == "cpu"
    assert better.sentence.endswith("the build takes minutes. It needs a compiler.")
    assert (safe.rebuild, without.rebuild) == ("", "cpu")
    assert "safe mode" in safe.sentence.lower() and "AMX" in without.sentence


def test_what_the_library_file_tells_is_what_the_library_says() -> None:
    assert build_advice.can_offload() == build_advice.read_build().offload


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3moe", "gemma3", "gpt-oss", "mamba"])
def test_the_architectures_of_a_build_are_found_in_its_file(name: str) -> None:
    assert build_advice.knows_architecture(name)


@pytest.mark.parametrize("name", ["gptoss", "qwen25vl", "no-such-architecture"])
def test_an_architecture_that_only_others_know_is_not_found(name: str) -> None:
    assert not build_advice.knows_architecture(name)


def test_a_library_that_knows_more_than_the_one_in_use_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {"llama": ("xllamacpp", "native"), "newer": ("xllamacpp",), "newest": ()}
    files = {
        source: LibraryFile(source, Path(source), "1", "why") for source in ("xllamacpp", "native")
    }
    monkeypatch.setattr(
        build_advice,
        "find_library",
        lambda environ=None: Search(files.get((environ or {}).get(VARIABLE, "native"))),
    )
    monkeypatch.setattr(build_advice, "_knows", lambda library, name: library.source in known[name])
    assert build_advice.knows_architecture("llama")
    assert not build_advice.knows_architecture("newer")
    assert build_advice.other_library("newer") == "xllamacpp"
    assert build_advice.other_library("newest") == ""
