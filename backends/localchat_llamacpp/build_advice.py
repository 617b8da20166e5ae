"""Describes the llama.cpp build of this machine, and suggests a better one.

Data only: `doctor` prints and asks.
"""

import ctypes
import hashlib
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from localchat.backend_api.interface import BuildInfo, Device, RebuildOffer, Remedy
from localchat.fit.hardware import Machine, read_cpu_flags
from localchat_llamacpp.library_source import BINDING, PREBUILT, VARIABLE, LibraryFile, find_library
from localchat_llamacpp.shared_object import section

_GPU_GAIN = "computes on the graphics card, which is several times as fast"
_CPU_GAIN = "uses this processor's {}: prompts are read about 1.4 times as fast"
"""Measured with AVX-512 VNNI: 1.4 for prompts, 1.0 to 1.1 for answers (CPU time; guide, 0.5B, 1.5B)."""
_INSTRUCTIONS = {"AVX-512": "avx512f", "AVX-VNNI": "avx_vnni", "AMX": "amx_int8"}
"""Instruction sets that the prebuilt library does not use, by their flag in /proc/cpuinfo."""
_OFFLOADING = ("cuda", "metal", "vulkan", "hip", "sycl", "musa", "cann", "opencl")


def can_offload() -> bool:
    """Return True if the library of this machine puts layers on a GPU. Loads nothing.

    Looks at the libraries beside it, and at the names that it exports. `llama_supports_gpu_offload` of the
    loaded library returns the same.
    """
    library = find_library().library
    if library is None:
        return False
    neighbors = (file.name.removeprefix("lib") for file in library.file.parent.iterdir())
    if any(name.startswith(tuple(f"ggml-{kind}." for kind in _OFFLOADING)) for name in neighbors):
        return True
    names = section(library.file, ".dynstr")
    return any(f"ggml_backend_{kind}_reg\0".encode() in names for kind in _OFFLOADING)


def as_built(machine: Machine) -> Machine:
    """Return the machine with only the CPU features that the library uses. Loads nothing.

    Builds for this machine use all that matter here. The prebuilt one for x86-64 stops at AVX2.
    """
    library = find_library().library
    if library is None or library.source != PREBUILT:
        return machine
    used = (
        flag for flag in machine.cpu_flags if not flag.startswith(("avx512", "amx", "avx_vnni"))
    )
    return replace(machine, cpu_flags=frozenset(used))


def knows_architecture(name: str) -> bool:
    """Return True if this build supports the architecture, or if there is no library."""
    library = find_library().library
    return library is None or not name or _knows(library, name)


def other_library(name: str) -> str:
    """Return another library of this machine that supports the architecture. Empty without one."""
    for source in (PREBUILT, BINDING):
        library = find_library({**os.environ, VARIABLE: source}).library
        if library is not None and _knows(library, name):
            return source
    return ""


def _knows(library: LibraryFile, architecture: str) -> bool:
    # The library contains the names of its architectures as C strings.
    return architecture.encode() + b"\0" in section(library.file, ".rodata")


def build_key(root: Path = Path("/")) -> str:
    """Return a key of the library and this CPU, under which safe mode is stored.

    Empty without a library. root: the folder with /proc.
    """
    library = find_library().library
    if library is None:
        return ""
    parts = sorted(library.file.parent.glob(f"libggml*{library.file.suffix}"))
    files = [
        f"{file}:{file.stat().st_size}:{file.stat().st_mtime_ns}" for file in (library.file, *parts)
    ]
    try:
        info = (root / "proc/cpuinfo").read_text(errors="replace").split("\n\n", 1)[0]
    except OSError:
        info = platform.processor()
    processor = [
        line for line in info.splitlines() if line.startswith(("model name", "flags", "Features"))
    ]
    digest = hashlib.sha256("\n".join([*files, *(processor or [info])]).encode()).hexdigest()
    return f"llama.cpp-{digest[:24]}"


def offload_kind(root: Path = Path("/")) -> str:
    """Return the build to suggest for a GPU of this machine. root: the folder with /proc."""
    if sys.platform == "darwin":
        return "metal"
    if (root / "proc/driver/nvidia").exists():
        return "cuda"
    return "vulkan"


def best_offer(root: Path = Path("/")) -> RebuildOffer | None:
    """Return the build that would help most here, and prefer one whose tools are installed.

    None if the library in use is fine, or the user named it. root: the folder with /proc and /dev.
    """
    library = find_library().library
    if library is None or library.source == "named":
        return None
    offers = []
    if not can_offload() and _has_graphics_card(root):
        offers.append(_offer(offload_kind(root), _GPU_GAIN))
    if library.source == PREBUILT and (sets := unused_instructions(root)):
        names = " and ".join(filter(None, (", ".join(sets[:-1]), sets[-1])))
        offers.append(_offer("cpu", _CPU_GAIN.format(names)))
    return min(offers, key=lambda offer: bool(offer.missing), default=None)


def _offer(kind: str, gain: str) -> RebuildOffer:
    from localchat_llamacpp.build_tools import missing_tools  # not for every load

    return RebuildOffer(kind, gain, missing_tools(kind))


def unused_instructions(root: Path = Path("/")) -> tuple[str, ...]:
    """Return the instruction sets of this CPU that the prebuilt library does not use."""
    flags = read_cpu_flags(root)
    return tuple(name for name, needed in _INSTRUCTIONS.items() if needed in flags)


def has_amx(root: Path = Path("/")) -> bool:
    """Return True if the CPU has AMX for integers. root: the folder with /proc."""
    return "amx_int8" in read_cpu_flags(root)


def remedies(build: BuildInfo, root: Path = Path("/")) -> tuple[Remedy, ...]:
    """Return ways to a better build here, best first. root: the folder with /proc and /dev."""
    offered: tuple[Remedy, ...] = ()
    offer = best_offer(root)
    if offer is not None:
        sentence = f"A llama.cpp built for this machine {offer.gain}; the build takes minutes."
        offered += (Remedy(" ".join(filter(None, (sentence, offer.missing))), offer.kind),)
    if amx_at_risk(build):
        offered += amx_remedies()
    return offered


def amx_remedies() -> tuple[Remedy, Remedy]:
    """Return the remedies if the build's AMX code crashes: safe mode, and a build without AMX."""
    safe = Remedy(
        "Safe mode does not use that code (4 to 30 % slower, by model). localchat chooses it by itself after "
        "a crash, and remembers it for this library and CPU."
    )
    return safe, Remedy("A build without AMX needs no safe mode.", "cpu")


def amx_at_risk(build: BuildInfo) -> bool:
    """Return True for an AMX build by GCC, which may have compiled it wrongly."""
    return "AMX_INT8" in build.features and _built_by_gcc(Path(build.library))


def _has_graphics_card(root: Path) -> bool:
    """Return True if llama.cpp could use a GPU here: Apple's, NVIDIA's or AMD's with their drivers."""
    if sys.platform == "darwin":
        return platform.machine() == "arm64"
    return any((root / path).exists() for path in ("proc/driver/nvidia", "dev/kfd"))


def read_build() -> BuildInfo:
    """Read the build from the library. Loads it (0.1 s). Raises LocalchatError."""
    from localchat_llamacpp.native import library

    native = library()
    return BuildInfo(
        library=str(native.origin.file),
        version=f"{native.origin.title} (llama.cpp {_text(native.api.llama_version())})",
        features=_features(_text(native.api.llama_print_system_info())),
        offload=bool(native.api.llama_supports_gpu_offload()),
        devices=devices(),
    )


def devices() -> tuple[Device, ...]:
    """Return the devices in the library's registry. Loads the library. Raises LocalchatError."""
    from localchat_llamacpp.native import library

    api = library().api
    return tuple(
        _device(api, api.ggml_backend_dev_get(number))
        for number in range(api.ggml_backend_dev_count())
    )


def _device(api: Any, handle: int) -> Device:  # noqa: ANN401 - see native.py
    free = ctypes.c_size_t()
    total = ctypes.c_size_t()
    api.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
    kind = int(api.ggml_backend_dev_type(handle))
    return Device(
        name=_text(api.ggml_backend_dev_name(handle)),
        description=_text(api.ggml_backend_dev_description(handle)),
        kind={0: "cpu", 1: "gpu", 2: "igpu", 3: "accel"}.get(kind, str(kind)),
        free_bytes=int(free.value),
        total_bytes=int(total.value),
    )


def _features(system: str) -> frozenset[str]:
    """Return the enabled names in a line like `CPU : SSE3 = 1 | AVX2 = 1 | `."""
    pairs = (part.rsplit(":", 1)[-1].partition("=") for part in system.split("|"))
    return frozenset(name.strip() for name, _, value in pairs if value.strip() == "1")


def _built_by_gcc(library_path: Path) -> bool:
    """Return True if the CPU library contains GCC's comment, or cannot be found."""
    cpu = next(iter(sorted(library_path.parent.glob("libggml-cpu*"))), None)
    return cpu is None or b"GCC: (" in cpu.read_bytes()


def _text(data: bytes | None) -> str:
    return (data or b"").decode("utf-8", "replace")
