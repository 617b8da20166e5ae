"""Builds llama.cpp for this machine, and takes the build only if it answers as before.

pip or uv compiles llama-cpp-python's source distribution, and downloads cmake and ninja if the system lacks
them. Only libllama and its dependencies are compiled, without image support, programs and tools.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from localchat.atomic import write_text
from localchat.backend_api.interface import RebuildOffer, RebuildOutcome
from localchat.config.paths import CRASH_RECORD, find_paths
from localchat.errors import LocalchatError
from localchat_llamacpp.build_advice import best_offer, has_amx
from localchat_llamacpp.build_tools import builds_with_gcc, find_nvcc, missing_tools
from localchat_llamacpp.library_source import (
    BINDING,
    BINDING_VERSION,
    RECORD,
    VARIABLE,
    find_library,
    native_build_folder,
)

_ARGUMENTS: Final[Mapping[str, tuple[str, ...]]] = {
    "cpu": (),
    "cuda": ("-DGGML_CUDA=on",),
    "vulkan": ("-DGGML_VULKAN=on",),
    "metal": ("-DGGML_METAL=on",),
}
_ALWAYS: Final = ("-DGGML_NATIVE=on", "-DLLAVA_BUILD=off")
_WITHOUT_COMMON: Final = "set(LLAMA_BUILD_COMMON OFF)\n"
"""Leaves out llama.cpp's library for its own programs, which compiles 78 files instead of 140. llama-cpp-python
turns the library on in cmake's cache, and a variable overrides the cache."""
_WITHOUT_AMX: Final = ("-DCMAKE_CXX_FLAGS=-U__AMX_INT8__", "-DCMAKE_C_FLAGS=-U__AMX_INT8__")
_NICE: Final = 10

_QUESTION: Final = "What is a KV cache, and why does a model need one?"
_TRIAL: Final = (
    *("-m", "guide", "--backend", "llamacpp", "--no-attach", "--no-history", "--quiet"),
    *("--temperature", "0", "--max-tokens", "48"),
)
_ON_CPU: Final = ("--gpu-layers", "0")
_ON_GPU: Final = ("--gpu-layers", "all", "--require-gpu")
_SAME_CHARACTERS: Final = 60
"""Start of the answer that must be equal. Libraries round differently, so a later word may differ by right."""
_TIMEOUT_S: Final = 300.0
_PREFIX: Final = "localchat: "


class _TrialFailed(Exception):
    """A trial without an answer. The text is the end of a sentence."""


class LlamaCppRebuilder:
    """Builds llama-cpp-python's llama.cpp for this machine into a folder of its own."""

    kinds: Sequence[str] = tuple(_ARGUMENTS)

    def offer(self) -> RebuildOffer | None:
        """Return the build that would help most here. None if the library in use is fine. Loads no library."""
        return best_offer()

    def rebuild(self, kind: str) -> RebuildOutcome:
        """Build a library, try it, and use it if it is correct. See Rebuilder."""
        if os.environ.get(VARIABLE):
            raise LocalchatError(
                f"{VARIABLE} names the library to use, so a build would not be used",
                hint=f"unset {VARIABLE} first",
            )
        if missing := missing_tools(kind):
            raise LocalchatError(f"llama.cpp cannot be built for {kind} here", hint=missing)
        folder = native_build_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix="work-", dir=folder, ignore_cleanup_errors=True
        ) as work:
            library = _build(kind, Path(work))
            current = find_library().library
            outcome = _try(current and current.file, library, on_gpu=kind != "cpu")
            if outcome.installed:
                _take(library, kind)
        return outcome

    def undo(self) -> bool:
        """Remove the build in use. False without one."""
        folder = native_build_folder()
        existed = (folder / RECORD).exists()
        shutil.rmtree(folder, ignore_errors=True)
        return existed


def _build(kind: str, work: Path) -> Path:
    """Compile in the folder `work` at low priority, and return the file of libllama. Blocks for minutes.

    The output goes to stderr. No process of the build survives this call. Raises LocalchatError, OSError.
    """
    temporary = work / "tmp"  # the system's may be in memory
    temporary.mkdir()
    first = work / "first.cmake"
    first.write_text(_WITHOUT_COMMON)
    environment = {
        **os.environ,
        "CMAKE_ARGS": _cmake_arguments(kind, first, without_amx=has_amx() and builds_with_gcc()),
        "SKBUILD_BUILD_TARGETS": "llama",
        "TMPDIR": str(temporary),
        "PIP_NO_CACHE_DIR": "1",  # a cached wheel may have other arguments
        "UV_NO_CACHE": "1",
        "PIP_USER": "0",
    }
    if kind == "cuda":
        environment.setdefault("CUDACXX", find_nvcc())  # which may be outside of PATH
    process = subprocess.Popen(
        (
            *(*_find_installer(), "--no-deps", "--target", str(work / "packages")),
            *("--no-binary", BINDING, f"{BINDING}=={BINDING_VERSION}"),
        ),
        stdin=subprocess.DEVNULL,
        stdout=2,
        env=environment,
        start_new_session=True,  # compilers would outlive pip
    )
    try:
        with suppress(OSError):  # the group may have ended already
            os.setpriority(os.PRIO_PGRP, process.pid, _NICE)
        process.wait()
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    libraries = (work / "packages/llama_cpp/lib").glob("libllama.*")
    library = next((file for file in libraries if file.suffix in (".so", ".dylib")), None)
    if process.returncode or library is None:
        raise LocalchatError("llama.cpp could not be built", hint="the output above says why")
    return library


def _cmake_arguments(kind: str, first: Path, *, without_amx: bool) -> str:
    """Return CMAKE_ARGS. first: a file that cmake reads first."""
    amx = _WITHOUT_AMX if without_amx else ()
    read = f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={first}"
    return shlex.join((*_ALWAYS, *_ARGUMENTS[kind], *amx, read))


def _find_installer() -> tuple[str, ...]:
    """Return the command of pip, else of uv, whose environments lack pip. Raises LocalchatError."""
    if find_spec("pip") is not None:
        flags = ("--no-input", "--disable-pip-version-check")
        return (sys.executable, "-m", "pip", "install", *flags)
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv:
        return (uv, "pip", "install", "--python", sys.executable)
    raise LocalchatError(
        f"a build needs pip or uv, and this environment has neither ({sys.prefix})",
        hint=f"{sys.executable} -m ensurepip   (on Debian and Ubuntu: apt install python3-venv first)",
    )


def _try(current: Path | None, built: Path, *, on_gpu: bool) -> RebuildOutcome:
    """Compare a new library with the one in use: the guide must begin the same answer with both.

    current: the library in use, which is tried on the CPU; None without one. Blocks for seconds. Raises
    OSError.
    """
    try:
        new = _answer(built, _ON_GPU if on_gpu else _ON_CPU)
    except _TrialFailed as problem:
        return RebuildOutcome(False, f"it {problem}")
    if current is None:
        return RebuildOutcome(True, "it is the only library here, and it works")
    try:
        old = _answer(current, _ON_CPU)
    except _TrialFailed as problem:
        return RebuildOutcome(True, f"the library in use {problem}, and this one does not")
    if old[:_SAME_CHARACTERS] != new[:_SAME_CHARACTERS]:
        return RebuildOutcome(False, f"it generates another text: {new[:_SAME_CHARACTERS]!r}")
    return RebuildOutcome(True, "it writes the same text as the library in use")


def _answer(library: Path, placement: tuple[str, ...]) -> str:
    """Return the guide's answer with a library. Raises _TrialFailed.

    It answers in a localchat of its own, with its own folders, because it may crash.
    """
    with tempfile.TemporaryDirectory(prefix="localchat-") as folder:
        own = {name: text for name, text in os.environ.items() if not name.startswith("LOCALCHAT_")}
        own[VARIABLE] = str(library)
        own["LOCALCHAT_DATA_DIR"] = folder
        own["LOCALCHAT_CONFIG"] = f"{folder}/settings.toml"
        own["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "localchat", *_TRIAL, *placement, _QUESTION],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
                env=own,
            )
        except subprocess.TimeoutExpired as slow:
            raise _TrialFailed(f"took longer than {_TIMEOUT_S:.0f} s") from slow
        crashed = (find_paths(own).state_dir / CRASH_RECORD).exists()
    if done.returncode or not done.stdout.strip():
        lines = [line for line in done.stderr.splitlines() if line.startswith(_PREFIX)]
        lines.append(f"status {done.returncode}")
        raise _TrialFailed(f"failed: {lines[0].removeprefix(_PREFIX)}")
    # The engine restarts such a library without its faster kernels, and then it answers.
    if crashed:
        raise _TrialFailed("crashed before its first answer, and works in safe mode only")
    return done.stdout.strip()


def _take(library: Path, kind: str) -> None:
    """Make the library's folder the build in use, and remove earlier builds. Raises OSError.

    Only the record decides which build is in use, and it is replaced as a whole.
    """
    folder = native_build_folder()
    kept = Path(tempfile.mkdtemp(prefix="build-", dir=folder))
    library.parent.rename(kept / "lib")
    record = {
        "library": f"{kept.name}/lib/{library.name}",
        "version": BINDING_VERSION,
        "kind": kind,
    }
    write_text(folder / RECORD, msgspec.json.encode(record).decode() + "\n")
    for earlier in folder.glob("build-*"):
        if earlier != kept:
            shutil.rmtree(earlier, ignore_errors=True)
