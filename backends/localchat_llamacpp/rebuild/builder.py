"""Builds llama.cpp through llama-cpp-python's source distribution, with pip or uv.

pip downloads cmake and ninja if the system lacks them. Only libllama and its dependencies are compiled, without
image support, programs and tools.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

from localchat.backend_api.interface import RebuildProgress
from localchat.errors import LocalchatError
from localchat_llamacpp.library_source import BINDING

_LIBRARIES: Final = ("libllama.so", "libllama.dylib")
_NICE: Final = 10
_STOP_S: Final = 5.0
_TAIL_LINES: Final = 400
_ARGUMENTS: Final[Mapping[str, tuple[str, ...]]] = {
    "cpu": (),
    "cuda": ("-DGGML_CUDA=on",),
    "vulkan": ("-DGGML_VULKAN=on",),
    "metal": ("-DGGML_METAL=on",),
}
KINDS: Final = tuple(_ARGUMENTS)
"""Kinds of builds, by the device that computes."""
_ALWAYS: Final = ("-DGGML_NATIVE=on", "-DLLAVA_BUILD=off")
_WITHOUT_COMMON: Final = "set(LLAMA_BUILD_COMMON OFF)\n"
"""Leaves out llama.cpp's library for its own programs, which compiles 78 files instead of 140. llama-cpp-python
turns the library on in cmake's cache, and a variable overrides the cache."""
_WITHOUT_AMX: Final = ("-DCMAKE_CXX_FLAGS=-U__AMX_INT8__", "-DCMAKE_C_FLAGS=-U__AMX_INT8__")
_COMPILED = re.compile(r"\[\s*(\d+)(?:/(\d+)\]|%\])")
"""A line of ninja, `[12/96] Building …`, or of make, `[ 12%] Building …`."""
_STEPS: Final[Mapping[str, str]] = {
    f"Collecting {BINDING}": "downloading the source",
    "Installing build dependencies": "getting cmake",
    "Preparing metadata": "configuring",
    "Building wheel": "configuring",
    "Downloading source distribution": "downloading the source",
    "Creating build environment": "getting cmake",
    "Calling `scikit_build_core": "configuring",
}
"""Build step by the beginning of a line of pip or uv."""
_ERROR = re.compile(r"\berror\b|CMake Error|No space left|Killed", re.IGNORECASE)


class BuildRequest(NamedTuple):
    """Options of a build."""

    kind: str
    version: str
    """Version of llama-cpp-python."""
    without_amx: bool = False


def cmake_arguments(request: BuildRequest, first: Path) -> str:
    """Return CMAKE_ARGS. first: a file that cmake reads first. Raises KeyError for an unknown kind."""
    amx = _WITHOUT_AMX if request.without_amx else ()
    read = f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={first}"
    return shlex.join((*_ALWAYS, *_ARGUMENTS[request.kind], *amx, read))


def build(
    request: BuildRequest,
    workspace: Path,
    log: Path,
    report: Callable[[RebuildProgress], None],
    installer: tuple[str, ...] | None = None,
) -> Path:
    """Compile into `workspace` at low priority, and return the file of libllama. Blocks for minutes.

    installer: the command of pip or uv up to the package. Its output goes to `log`. No process of the build
    survives this call. Raises LocalchatError with the cause, OSError.
    """
    target = workspace / "packages"
    command = (
        *(installer or find_installer()),
        *("--verbose", "--no-deps", "--target", str(target)),
        *("--no-binary", BINDING, f"{BINDING}=={request.version}"),
    )
    temporary = workspace / "tmp"  # the system's may be in memory
    temporary.mkdir()
    first = workspace / "first.cmake"
    first.write_text(_WITHOUT_COMMON)
    environment = {
        **os.environ,
        **_compilers(request.kind),
        "CMAKE_ARGS": cmake_arguments(request, first),
        "SKBUILD_BUILD_TARGETS": "llama",
        "TMPDIR": str(temporary),
        "PIP_NO_CACHE_DIR": "1",  # a cached wheel may have other arguments
        "UV_NO_CACHE": "1",
        "PIP_USER": "0",
    }
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    with (
        log.open("w", encoding="utf-8", errors="replace") as log_file,
        _running(command, environment) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            log_file.write(line)
            tail.append(line.strip())
            if (progress := progress_of(line)) is not None:
                report(progress)
    if process.returncode:
        raise LocalchatError(
            f"llama.cpp could not be built: {_cause(tail)}", hint=f"the whole output is in {log}"
        )
    libraries = (target / "llama_cpp/lib" / name for name in _LIBRARIES)
    library = next((file for file in libraries if file.is_file()), None)
    if library is None:
        raise LocalchatError(
            "llama.cpp was built without a library", hint=f"the whole output is in {log}"
        )
    return library


def find_installer() -> tuple[str, ...]:
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


def progress_of(line: str) -> RebuildProgress | None:
    """Return the build step that a line of output shows, or None."""
    text = _bare(line)
    if match := _COMPILED.match(text):
        return RebuildProgress("compiling", int(match[1]), int(match[2] or 100))
    step = next((step for begin, step in _STEPS.items() if text.startswith(begin)), "")
    if step:
        return RebuildProgress(step)
    return None


def _bare(line: str) -> str:
    """Return a line without the prefix that uv adds to a build's output."""
    return line.strip().removeprefix("DEBUG ").strip()


def missing_tools(kind: str) -> str:
    """Return a sentence on a missing requirement of this kind of build. Empty if nothing is missing."""
    if not _has_compiler():
        how = "xcode-select --install" if sys.platform == "darwin" else _COMPILER_PACKAGES
        return f"It needs a C++ compiler: {how}."
    if kind == "cuda" and not find_nvcc():
        return "It needs NVIDIA's CUDA toolkit with nvcc, its compiler."
    if kind == "vulkan" and not shutil.which("glslc"):
        return "It needs the Vulkan SDK with glslc, its compiler."
    return ""


_COMPILER_PACKAGES: Final = (
    "on Debian and Ubuntu `sudo apt install g++`, on Fedora `sudo dnf install gcc-c++`, elsewhere the package "
    "with g++ or clang++"
)


def _has_compiler() -> bool:
    if sys.platform == "darwin":
        # macOS always has a c++, which opens a window if there is no compiler.
        result = subprocess.run(["xcode-select", "-p"], capture_output=True, check=False)
        return result.returncode == 0
    return bool(_compiler("CXX", "c++", "g++", "clang++") and _compiler("CC", "cc", "gcc", "clang"))


def _compiler(variable: str, *names: str) -> str:
    """Return the compiler that cmake would use. Empty without one."""
    named = os.environ.get(variable, "").split(" ")[0]
    return next((path for name in (named, *names) if name and (path := shutil.which(name))), "")


def builds_with_gcc() -> bool:
    """Return True if GCC would compile, some versions of which produce crashing AMX code."""
    compiler = _compiler("CXX", "c++", "g++", "clang++")
    if not compiler:
        return False
    try:
        result = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=20, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return True
    return "clang" not in result.lower()


def find_nvcc() -> str:
    """Return NVIDIA's compiler. Empty without one."""
    usual = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin/nvcc"
    return shutil.which("nvcc") or (str(usual) if usual.is_file() else "")


def _compilers(kind: str) -> dict[str, str]:
    """Return variables that point cmake to a CUDA compiler outside of PATH."""
    if kind != "cuda" or os.environ.get("CUDACXX") or shutil.which("nvcc"):
        return {}
    nvcc = find_nvcc()
    if nvcc:
        return {"CUDACXX": nvcc}
    return {}


_SUPERVISED: Final = """
import os, signal, subprocess, sys, threading

def end_with_parent():
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)

threading.Thread(target=end_with_parent, daemon=True).start()
sys.exit(subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL) != 0)
"""
"""Runs a command, and kills its group when stdin closes because this program was killed."""


@contextmanager
def _running(command: tuple[str, ...], environment: dict[str, str]) -> Iterator["_Process"]:
    """Run a command in a process group that ends with the block or this program.

    Compilers would outlive pip, and pip would outlive the reader of its output.
    """
    process = subprocess.Popen(
        (sys.executable, "-c", _SUPERVISED, *command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    )
    try:
        with suppress(OSError):  # the group may have ended already
            os.setpriority(os.PRIO_PGRP, process.pid, _NICE)
        yield process
        process.wait()
    finally:
        _end(process)


_Process = subprocess.Popen[str]


def _end(process: _Process) -> None:
    """End the whole group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def _cause(lines: "deque[str]") -> str:
    """Return the most informative line of the output."""
    errors = [line for line in lines if _ERROR.search(line) and "Building" not in line]
    first = next((line for line in errors if "fatal error" in line or "CMake Error" in line), "")
    if first:
        return first
    if errors:
        return errors[0][:300]
    if lines:
        return lines[-1][:300]
    return "it printed nothing"
