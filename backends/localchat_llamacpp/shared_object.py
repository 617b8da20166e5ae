"""Loads a shared object, or explains why it cannot be loaded.

Checks the file first: the system's loader maps a truncated one without an error, and the process dies of SIGBUS
later.
"""

import ctypes
import os
import platform
import re
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Final

from localchat.errors import LocalchatError

_CPP_RUNTIME: Final = "libstdc++.so.6"
_MACHINES: Final[Mapping[int, str]] = {
    3: "x86",
    40: "arm",
    62: "x86_64",
    183: "aarch64",
    243: "riscv64",
}
"""ELF's numbers of machines."""
_OF_64_BITS = 2
_LITTLE_ENDIAN = 1
_LOADED: Final = 1
"""Type of a segment that is mapped."""
_SECTION = struct.Struct("<IIQQQQ")
"""Entry of ELF's section table: offset of the name, type, flags, address, offset in the file, bytes."""
_NO_LIBRARY = re.compile(r"([^\s:]+\.so[.\d]*): cannot open shared object file")
_NO_VERSION = re.compile(r"version [`']\w+_[\d.]+' not found")
"""The system's glibc, libstdc++ or libgomp is too old."""
_PACKAGES: Final[Mapping[str, str]] = {
    "libgomp.so.1": "libgomp1",
    _CPP_RUNTIME: "libstdc++6",
    "libgcc_s.so.1": "libgcc-s1",
    "libvulkan.so.1": "libvulkan1",
}
"""Debian's packages of the libraries that llama.cpp needs."""


def load(file: Path, again: str = "") -> ctypes.CDLL:
    """Load a shared object into this process. Raises LocalchatError with what to do.

    again: sentence on how to replace the file.
    """
    _check(file, again)
    _load_cpp_runtime()
    try:
        return ctypes.CDLL(str(file))
    except OSError as problem:
        raise _explained(file, str(problem), again) from problem


def _load_cpp_runtime() -> None:
    """Make the system's C++ library resolve the symbols of every object loaded later.

    A library may export parts of libstdc++ that were linked into it (libggml-cuda does, with some compilers).
    If it precedes libstdc++ in the search order, libllama calls that copy, while libstdc++ itself, loaded
    earlier by numpy, uses its own. The two have different tables of facets, and the first number written to a
    stream is a SIGSEGV. Global symbols are searched first, so all calls use one copy.
    """
    if sys.platform == "linux":
        try:
            ctypes.CDLL(_CPP_RUNTIME, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            return  # the load itself reports what is missing


def _check(file: Path, again: str) -> None:
    """Raise LocalchatError for a file that is not a library for this machine, or truncated."""
    try:
        with file.open("rb") as data:
            if sys.platform == "linux":
                _check_elf(file, data, again)
    except OSError as problem:
        raise LocalchatError(f"{file} cannot be read: {problem.strerror or problem}") from problem


def section(file: Path, name: str) -> bytes:
    """Return a section of an ELF file, or the whole file if there is no such section."""
    with file.open("rb") as data:
        head = data.read(64)
        if head[:5] == b"\x7fELF\x02":
            (table,) = struct.unpack_from("<Q", head, 40)
            entry_bytes, entries, names_at = struct.unpack_from("<HHH", head, 58)
            data.seek(table)
            sections = [_SECTION.unpack(data.read(entry_bytes)[:40]) for _ in range(entries)]
            data.seek(sections[names_at][4])
            names = data.read(sections[names_at][5])
            for start, _, _, _, offset, size in sections:
                if names[start:].startswith(name.encode() + b"\0"):
                    data.seek(offset)
                    return data.read(size)
        data.seek(0)
        return data.read()


def _check_elf(file: Path, data: BinaryIO, again: str) -> None:
    head = data.read(64)
    if len(head) < 64 or head[:4] != b"\x7fELF":
        raise LocalchatError(f"{file} is not a shared library.", hint=again)
    if head[4] != _OF_64_BITS or head[5] != _LITTLE_ENDIAN:
        raise LocalchatError(f"{file} is not for 64-bit little-endian machines such as this one.")
    (machine,) = struct.unpack_from("<H", head, 18)
    made_for = _MACHINES.get(machine, f"machine {machine}")
    here = {"amd64": "x86_64", "arm64": "aarch64"}.get(name := platform.machine().lower(), name)
    if made_for != here:
        raise LocalchatError(
            f"{file} was built for {made_for}, and this machine is {here}.",
            hint="Install localchat again on this machine: an environment cannot be copied to another kind.",
        )
    (table,) = struct.unpack_from("<Q", head, 32)
    entry_bytes, entries = struct.unpack_from("<HH", head, 54)
    data.seek(table)
    segments = data.read(entry_bytes * entries)
    end = table + entry_bytes * entries
    if len(segments) == entry_bytes * entries and entry_bytes >= 56:
        for entry_offset in range(0, len(segments), entry_bytes):
            kind, _, offset, _, _, in_file = struct.unpack_from("<IIQQQQ", segments, entry_offset)
            if kind == _LOADED:
                end = max(end, offset + in_file)
    size = os.fstat(data.fileno()).st_size
    if size < end:
        raise LocalchatError(
            f"{file} is cut short: it has {size:,} bytes of at least {end:,}.", hint=again
        )


def _explained(file: Path, problem: str, again: str) -> LocalchatError:
    """Explain an error of the system's loader."""
    if match := _NO_LIBRARY.search(problem):
        return LocalchatError(
            f"llama.cpp needs {match[1]}, which is not installed ({file}).",
            hint=_installing(match[1]),
        )
    if _NO_VERSION.search(problem):
        again = "Build llama.cpp on this machine: `localchat doctor --rebuild`."
    return LocalchatError(f"{file} cannot be loaded: {problem}", hint=again)


def _installing(library: str) -> str:
    """Return what to install for a missing library."""
    if library.startswith(("libcuda", "libcublas", "libnv")):
        return (
            "It is part of NVIDIA's driver or CUDA: install that again, or use the CPU alone with "
            "LOCALCHAT_LLAMACPP_LIBRARY=xllamacpp."
        )
    hint = f"Install the package of this system that has {library}"
    if library in _PACKAGES:
        return f"{hint} (on Debian and Ubuntu: apt install {_PACKAGES[library]})."
    return f"{hint}."
