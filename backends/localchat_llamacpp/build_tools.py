"""Finds the compilers of a build of llama.cpp."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

_COMPILER_PACKAGES: Final = (
    "on Debian and Ubuntu `sudo apt install g++`, on Fedora `sudo dnf install gcc-c++`, elsewhere the package "
    "with g++ or clang++"
)


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
    result = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return "clang" not in result.stdout.lower()


def find_nvcc() -> str:
    """Return NVIDIA's compiler. Empty without one."""
    usual = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin/nvcc"
    return shutil.which("nvcc") or (str(usual) if usual.is_file() else "")
