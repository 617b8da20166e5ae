"""Advice about the llama.cpp build that `doctor` prints."""

import sys
from pathlib import Path

import pytest

from localchat.backend_api.interface import BuildInfo
from localchat_llamacpp import build_advice
from localchat_llamacpp.library_source import find_library


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


@pytest.mark.parametrize("kind", sorted(build_advice.CMAKE_ARGS))
def test_a_rebuild_is_one_command_of_this_python(kind: str) -> None:
    way = build_advice.rebuild_command(kind)
    assert way.command[:3] == (sys.executable, "-m", "pip")
    assert way.command[-1] == f"llama-cpp-python=={build_advice.BINDING_VERSION}"
    assert way.environment == (("CMAKE_ARGS", build_advice.CMAKE_ARGS[kind]),)


def test_the_amx_fault_has_two_remedies() -> None:
    safe, build = build_advice.amx_remedies()
    assert safe.command == ()
    assert "-U__AMX_INT8__" in build.environment[0][1]


def _build(*, offload: bool = False, amx: bool = False) -> BuildInfo:
    return BuildInfo("libllama.so", "0", frozenset({"AMX_INT8"} if amx else ()), offload, ())


def test_a_build_that_fits_the_machine_has_no_remedies(tmp_path: Path) -> None:
    assert build_advice.remedies(_build(), tmp_path) == ()


def test_a_card_that_the_build_cannot_use_and_the_amx_fault_are_told(tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    ways = build_advice.remedies(_build(amx=True), tmp_path)
    assert [dict(way.environment).get("CMAKE_ARGS") for way in ways] == [
        build_advice.CMAKE_ARGS["cuda"],
        None,
        build_advice.CMAKE_ARGS["no-amx"],
    ]
    assert build_advice.remedies(_build(offload=True), tmp_path) == ()


def test_what_the_library_file_tells_is_what_the_library_says() -> None:
    assert build_advice.can_offload() == build_advice.read_build().offload


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3moe", "gemma3", "gpt-oss", "mamba"])
def test_the_architectures_of_a_build_are_found_in_its_file(name: str) -> None:
    assert build_advice.knows_architecture(name)


@pytest.mark.parametrize("name", ["gptoss", "qwen25vl", "no-such-architecture"])
def test_an_architecture_that_only_others_know_is_not_found(name: str) -> None:
    assert not build_advice.knows_architecture(name)
