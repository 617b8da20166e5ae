"""A rebuild from begin to end with a fake pip: what is asked, what is taken, and what stays as it was."""

import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from localchat.backend_api.interface import RebuildOutcome
from localchat.errors import LocalchatError
from localchat_llamacpp import build_tools
from localchat_llamacpp import rebuild as rebuild_module
from localchat_llamacpp.library_source import (
    RECORD,
    VARIABLE,
    LibraryFile,
    find_library,
    native_build_folder,
)
from localchat_llamacpp.rebuild import LlamaCppRebuilder
from tests.support.paths import ROOT

FAKE_PIP = """
import json, os, subprocess, sys, time
from pathlib import Path

how, asked = json.loads(sys.argv[1]), sys.argv[2:]
told = {"arguments": asked, "cmake": os.environ["CMAKE_ARGS"], "group": os.getpgrp()}
Path(how["note"]).write_text(json.dumps(told))
if how["hang"]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(how["hang"]).write_text(str(child.pid))
    time.sleep(600)
if how["library"]:
    folder = Path(asked[asked.index("--target") + 1], "llama_cpp/lib")
    folder.mkdir(parents=True)
    (folder / "libllama.so").write_text(how["library"])
    (folder / "libggml.so").write_text("ggml")
sys.exit(how["status"])
"""

ANSWER = "The KV cache keeps the keys and values of all earlier tokens, for every layer."
Rebuild = Callable[..., RebuildOutcome]


@pytest.fixture
def note(tmp_path: Path) -> Path:
    """The file in which the fake pip writes what it was asked."""
    return tmp_path / "note"


@pytest.fixture
def rebuild(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, note: Path) -> Rebuild:
    """Rebuild with a pip that writes this library, and these answers in the trial.

    Compilers are said to be there. An answer that starts with `crashed` is a failure.
    """
    monkeypatch.setenv("LOCALCHAT_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(rebuild_module, "missing_tools", lambda kind: "")
    monkeypatch.setattr(rebuild_module, "has_amx", lambda: False)

    def made(
        library: str = "built",
        kind: str = "cpu",
        *,
        new: str = ANSWER,
        old: str = ANSWER,
        status: int = 0,
        hang: str = "",
    ) -> RebuildOutcome:
        how = {"note": str(note), "library": library, "status": status, "hang": hang}
        installer = (sys.executable, "-c", FAKE_PIP, json.dumps(how))
        before = find_library().library

        def answer(file: Path, placement: tuple[str, ...]) -> str:
            in_use = before is not None and file == before.file
            on_gpu = "--require-gpu" in placement
            assert on_gpu == (kind != "cpu" and not in_use), (
                "the library in use computes on the CPU"
            )
            text = old if in_use else new
            if text.startswith("crashed"):
                raise rebuild_module._TrialFailed(text)
            return text

        monkeypatch.setattr(rebuild_module, "_find_installer", lambda: installer)
        monkeypatch.setattr(rebuild_module, "_answer", answer)
        return LlamaCppRebuilder().rebuild(kind)

    return made


def in_use() -> LibraryFile | None:
    found = find_library(os.environ).library
    return found if found is not None and found.source == "native" else None


def left() -> int:
    """Builds in the folder, whole or not."""
    return sum(path.name != RECORD for path in native_build_folder().iterdir())


def test_a_build_is_used_from_then_on_with_all_its_libraries(rebuild: Rebuild, note: Path) -> None:
    assert in_use() is None
    outcome = rebuild("first")
    assert outcome.installed and "same text" in outcome.sentence
    library = in_use()
    assert library is not None and library.version == "0.3.36 for cpu"
    assert library.file.read_text() == "first"
    assert library.file.with_name("libggml.so").read_text() == "ggml"
    asked = json.loads(note.read_text())
    assert asked["arguments"][-1] == "llama-cpp-python==0.3.36"
    assert "--no-deps" in asked["arguments"] and "--no-binary" in asked["arguments"]
    assert "-DGGML_NATIVE=on" in asked["cmake"] and "AMX" not in asked["cmake"]
    assert rebuild("second", "cuda").installed
    library = in_use()
    assert library is not None and library.file.read_text() == "second"
    assert left() == 1, "the earlier build is gone"


@pytest.mark.parametrize("first", ["", "first"])
def test_a_build_that_fails_or_is_wrong_changes_nothing(rebuild: Rebuild, first: str) -> None:
    if first:
        rebuild(first)
    outcome = rebuild("wrong", new="crashed (SIGILL)")
    assert outcome == RebuildOutcome(installed=False, sentence="it crashed (SIGILL)")
    outcome = rebuild("wrong", new="The KV the the the")
    assert not outcome.installed and "another text" in outcome.sentence
    for library, status in (("wrong", 2), ("", 0)):
        with pytest.raises(LocalchatError, match="could not be built"):
            rebuild(library, status=status)
    library_in_use = in_use()
    assert (library_in_use.file.read_text() if library_in_use else "") == first
    assert left() == bool(first)


def test_another_word_at_the_end_is_within_rounding(rebuild: Rebuild) -> None:
    assert rebuild(new=ANSWER.replace("layer", "block")).installed


def test_where_the_library_in_use_does_not_work_one_that_works_is_taken(rebuild: Rebuild) -> None:
    outcome = rebuild(old="crashed (SIGSEGV)")
    assert outcome.installed and "in use crashed (SIGSEGV)" in outcome.sentence


def test_a_build_is_taken_back(rebuild: Rebuild) -> None:
    assert not LlamaCppRebuilder().undo()
    rebuild()
    assert LlamaCppRebuilder().undo()
    assert in_use() is None and not native_build_folder().exists()
    assert not LlamaCppRebuilder().undo()


def test_a_named_library_is_a_reason_against_a_build(
    rebuild: Rebuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "xllamacpp")
    with pytest.raises(LocalchatError, match="would not be used"):
        rebuild()


def test_an_interrupt_leaves_no_process_of_the_build(rebuild: Rebuild, tmp_path: Path) -> None:
    child = tmp_path / "child"

    def interrupt() -> None:
        while not child.exists() or not child.read_text():
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        rebuild(hang=str(child))
    assert in_use() is None and left() == 0
    pid = int(child.read_text())
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "a child of the build still runs"
        time.sleep(0.01)


def test_each_kind_asks_cmake_for_what_it_computes_on(tmp_path: Path) -> None:
    first = tmp_path / "Application Support/first.cmake"
    arguments = {
        kind: rebuild_module._cmake_arguments(kind, first, without_amx=False)
        for kind in LlamaCppRebuilder.kinds
    }
    assert len(set(arguments.values())) == len(arguments)
    assert "-DGGML_CUDA=on" in arguments["cuda"]
    without = shlex.split(rebuild_module._cmake_arguments("cpu", first, without_amx=True))
    assert "-DCMAKE_CXX_FLAGS=-U__AMX_INT8__" in without
    assert f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={first}" in without


def test_the_build_of_the_tests_leaves_out_what_a_rebuild_leaves_out() -> None:
    file = ROOT / "scripts/llama_cpp.cmake"
    assert rebuild_module._WITHOUT_COMMON in file.read_text(encoding="utf-8")


def test_without_pip_uv_is_asked_and_without_both_it_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("UV", raising=False)
    monkeypatch.setattr(rebuild_module, "find_spec", lambda name: name)
    assert rebuild_module._find_installer()[:4] == (sys.executable, "-m", "pip", "install")
    monkeypatch.setattr(rebuild_module, "find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    uv = ("/bin/uv", "pip", "install", "--python", sys.executable)
    assert rebuild_module._find_installer() == uv
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(LocalchatError, match="pip or uv") as refused:
        rebuild_module._find_installer()
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
    assert build_tools.missing_tools("cpu") == ""
    assert "nvcc" in build_tools.missing_tools("cuda")
    assert "glslc" in build_tools.missing_tools("vulkan")
    there.remove("c++")
    assert "apt install g++" in build_tools.missing_tools("cpu")


def test_a_library_is_tried_by_the_program_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    library = find_library().library
    assert library is not None
    monkeypatch.setenv("LOCALCHAT_MODEL", "nothing")
    assert "keys and values" in rebuild_module._answer(library.file, rebuild_module._ON_CPU)
    with pytest.raises(rebuild_module._TrialFailed, match="a GPU is required"):
        rebuild_module._answer(library.file, rebuild_module._ON_GPU)


def test_a_program_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "libllama.so"
    file.write_text("no library")
    with pytest.raises(rebuild_module._TrialFailed, match="not a shared library"):
        rebuild_module._answer(file, rebuild_module._ON_CPU)
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\n"
        f"if os.environ.get('{VARIABLE}') == 'dies':\n"
        "    os.kill(os.getpid(), signal.SIGILL)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(rebuild_module._TrialFailed, match="status -4"):
        rebuild_module._answer(Path("dies"), rebuild_module._ON_CPU)


def test_a_library_that_answers_in_safe_mode_only_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, pathlib\n"
        f"if os.environ.get('{VARIABLE}') == 'crashes':\n"
        "    state = pathlib.Path(os.environ['LOCALCHAT_DATA_DIR']) / 'state'\n"
        "    state.mkdir()\n"
        "    (state / 'safe-builds.json').write_text('{}')\n"
        "    os.write(1, b'The KV cache')\n"
        "    os._exit(0)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(rebuild_module._TrialFailed, match="works in safe mode only"):
        rebuild_module._answer(Path("crashes"), rebuild_module._ON_CPU)
