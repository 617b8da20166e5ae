"""The build: what is asked of pip, what its output tells, and what is left when it ends early."""

import json
import os
import shlex
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from localchat.backend_api.interface import RebuildProgress
from localchat.errors import LocalchatError
from localchat_llamacpp.rebuild import builder
from localchat_llamacpp.rebuild.builder import BuildRequest, build, progress_of
from tests.support.paths import ROOT

REQUEST = BuildRequest("cpu", "0.3.36")


def fake_pip(**how: object) -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.support.fake_pip", json.dumps(how))


def built(tmp_path: Path, request: BuildRequest = REQUEST, **how: object) -> tuple[Path, list[str]]:
    """The library and the steps that were reported."""
    steps: list[str] = []
    work = tmp_path / "work"
    work.mkdir()
    library = build(
        request, work, tmp_path / "log", lambda one: steps.append(one.step), fake_pip(**how)
    )
    return library, steps


def test_a_build_is_one_install_of_the_source_into_a_folder_of_its_own(tmp_path: Path) -> None:
    library, _ = built(tmp_path, library="x")
    assert library == tmp_path / "work/packages/llama_cpp/lib/libllama.so"
    told = json.loads((tmp_path / "log").read_text().splitlines()[0])
    asked = told["arguments"]
    assert asked[-1] == "llama-cpp-python==0.3.36"
    assert "--no-deps" in asked and asked[asked.index("--no-binary") + 1] == "llama-cpp-python"
    assert "-DGGML_NATIVE=on" in told["cmake"] and "AMX" not in told["cmake"]


def test_each_kind_asks_cmake_for_what_it_computes_on(tmp_path: Path) -> None:
    first = tmp_path / "Application Support/first.cmake"
    arguments = {
        kind: builder.cmake_arguments(BuildRequest(kind, "1"), first) for kind in builder.KINDS
    }
    assert len(set(arguments.values())) == len(builder.KINDS)
    assert "-DGGML_CUDA=on" in arguments["cuda"]
    without = shlex.split(builder.cmake_arguments(REQUEST._replace(without_amx=True), first))
    assert "-DCMAKE_CXX_FLAGS=-U__AMX_INT8__" in without
    assert f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={first}" in without


def test_the_build_of_the_tests_leaves_out_what_a_rebuild_leaves_out() -> None:
    file = ROOT / "scripts/llama_cpp.cmake"
    assert builder._WITHOUT_COMMON in file.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("line", "progress"),
    [
        ("  [12/96] Building CXX object a.o", RebuildProgress("compiling", 12, 96)),
        ("DEBUG [7/78] Building CXX object a.o", RebuildProgress("compiling", 7, 78)),
        ("DEBUG Downloading source distribution: x", RebuildProgress("downloading the source")),
        ("[ 45%] Building CXX object a.o", RebuildProgress("compiling", 45, 100)),
        ("Collecting llama-cpp-python==0.3.36", RebuildProgress("downloading the source")),
        ("  Installing build dependencies: started", RebuildProgress("getting cmake")),
        ("Installing collected packages: cmake", None),
        ("Collecting cmake>=3.21", None),
        ("-- Found Threads: TRUE", None),
        ("  a[1/2] in a message", None),
    ],
)
def test_lines_of_pip_and_ninja_tell_the_step(line: str, progress: RebuildProgress | None) -> None:
    assert progress_of(line) == progress


def test_steps_are_reported_as_they_come(tmp_path: Path) -> None:
    _, steps = built(
        tmp_path,
        library="x",
        lines=["Collecting llama-cpp-python==1", "nothing", "[1/2] Building a.o"],
    )
    assert steps == ["downloading the source", "compiling"]


def test_a_build_that_fails_names_the_first_error_and_the_log(tmp_path: Path) -> None:
    lines = ["[1/2] Building error.o", "fatal error: Killed signal terminated cc1plus", "the end"]
    with pytest.raises(LocalchatError) as failed:
        built(tmp_path, lines=lines, status=1)
    assert "Killed signal terminated cc1plus" in failed.value.message
    assert str(tmp_path / "log") in failed.value.hint
    assert "the end" in (tmp_path / "log").read_text()


def test_a_build_that_ends_well_without_a_library_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(LocalchatError, match="without a library"):
        built(tmp_path)


def test_an_interrupt_leaves_no_process_of_the_build(tmp_path: Path) -> None:
    note = tmp_path / "child"

    def interrupt() -> None:
        while not note.exists() or not note.read_text():
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        built(tmp_path, hang=str(note))
    pid = int(note.read_text())
    deadline = time.monotonic() + 20
    while _runs(pid):
        assert time.monotonic() < deadline, "a child of the build still runs"
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return not Path("/proc/self").exists()
    return state != "Z"


def test_without_pip_uv_is_asked_and_without_both_it_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("UV", raising=False)
    assert builder.find_installer()[:4] == (sys.executable, "-m", "pip", "install")
    monkeypatch.setattr(builder, "find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    assert builder.find_installer() == ("/bin/uv", "pip", "install", "--python", sys.executable)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(LocalchatError, match="pip or uv") as refused:
        builder.find_installer()
    assert "ensurepip" in refused.value.hint


def test_missing_tools_are_named_with_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    there = {"cc", "c++"}
    monkeypatch.setattr("shutil.which", lambda name: name if name in there else None)
    assert builder.missing_tools("cpu") == ""
    assert "nvcc" in builder.missing_tools("cuda")
    assert "glslc" in builder.missing_tools("vulkan")
    there.remove("c++")
    assert "apt install g++" in builder.missing_tools("cpu")
