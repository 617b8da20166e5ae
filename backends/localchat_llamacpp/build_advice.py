"""The installed llama.cpp build: what it can do, and the commands that build a better one.

Data only: `doctor` prints and asks.
"""

import ctypes
import hashlib
import mmap
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from localchat.backend_api.interface import BuildInfo, Device, Remedy

DISTRIBUTION = "llama-cpp-python"
CMAKE_ARGS = {
    "cuda": "-DGGML_CUDA=on",
    "metal": "-DGGML_METAL=on",
    "vulkan": "-DGGML_VULKAN=on",
    "no-amx": "-DCMAKE_CXX_FLAGS=-U__AMX_INT8__ -DCMAKE_C_FLAGS=-U__AMX_INT8__",
}
"""Arguments for cmake, by the purpose of the build."""
_OFFLOADING = tuple(
    f"ggml-{kind}." for kind in ("cuda", "metal", "vulkan", "hip", "sycl", "musa", "cann", "opencl")
)


def binding_version() -> str:
    """Installed version of the binding, without importing it; empty: none."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return ""


def library_file() -> Path | None:
    """The native library, found without loading it; None: the binding is not installed."""
    spec = find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations))) / "lib"
    names = ("libllama.so", "libllama.dylib", "llama.dll")
    return next((folder / name for name in names if (folder / name).is_file()), None)


def can_offload() -> bool:
    """True if this build puts layers on a GPU, by the libraries in its folder; nothing is loaded.

    (`llama_supports_gpu_offload` of the loaded library returns the same.)
    """
    path = library_file()
    if path is None:
        return False
    found = (file.name.removeprefix("lib") for file in path.parent.iterdir())
    return any(name.startswith(_OFFLOADING) for name in found)


def knows_architecture(name: str) -> bool:
    """True if this build can load models of the architecture; True where there is no library to look into.

    The names of all known architectures stand in the library as C strings.
    """
    path = library_file()
    if path is None or not name:
        return True
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return text.find(name.encode() + b"\0") >= 0


def build_key(root: Path = Path("/")) -> str:
    """Names the native build and this CPU with its features: what safe mode is remembered by.

    Empty where there is no library. root: the folder with /proc.
    """
    path = library_file()
    if path is None:
        return ""
    files = sorted(path.parent.glob(f"libggml-cpu*{path.suffix}")) or [path]
    seen = [f"{file}:{file.stat().st_size}:{file.stat().st_mtime_ns}" for file in files]
    try:
        info = (root / "proc/cpuinfo").read_text(errors="replace").split("\n\n", 1)[0]
    except OSError:
        info = platform.processor()
    processor = [
        line for line in info.splitlines() if line.startswith(("model name", "flags", "Features"))
    ]
    digest = hashlib.sha256("\n".join([*seen, *(processor or [info])]).encode()).hexdigest()
    return f"llama.cpp-{digest[:24]}"


def rebuild_command(kind: str) -> Remedy:
    """Rebuild the installed version for `cuda`, `metal`, `vulkan` or `no-amx`. Raises KeyError otherwise."""
    requirement = f"{DISTRIBUTION}=={binding_version()}" if binding_version() else DISTRIBUTION
    command = (
        *(sys.executable, "-m", "pip", "install", "--force-reinstall", "--no-cache-dir"),
        *("--no-deps", f"--no-binary={DISTRIBUTION}", requirement),
    )
    return Remedy(
        f"Build llama.cpp again for {kind} (some minutes, needs a C++ compiler).",
        command,
        (("CMAKE_ARGS", CMAKE_ARGS[kind]),),
    )


def offload_kind(root: Path = Path("/")) -> str:
    """The build to advise for a GPU of this machine. root: the folder with /proc."""
    if sys.platform == "darwin":
        return "metal"
    return "cuda" if (root / "proc/driver/nvidia").exists() else "vulkan"


def offload_advice() -> str:
    """Why layers stay on the CPU, and what to run."""
    way = rebuild_command(offload_kind())
    ((name, arguments),) = way.environment
    return (
        "Layers were asked for on the graphics card, but this llama.cpp was built for the CPU alone: all "
        "layers stay on the CPU. `localchat doctor --rebuild` builds it again, or by hand: "
        f'{name}="{arguments}" {" ".join(way.command)}'
    )


def amx_remedies() -> tuple[Remedy, Remedy]:
    """Both remedies where the build's AMX code crashes: safe mode, and a build without it."""
    safe = Remedy(
        "Safe mode leaves that code alone (4 to 30 % slower, by model); localchat chooses it by itself after "
        "a crash and remembers it for this library and CPU."
    )
    return safe, rebuild_command("no-amx")


def remedies(build: BuildInfo, root: Path = Path("/")) -> tuple[Remedy, ...]:
    """Ways to a better build here, best first. root: the folder with /proc and /dev.

    A build for the GPU that this one cannot use, and the two remedies for the AMX fault.
    """
    found: tuple[Remedy, ...] = ()
    if not build.offload and _has_graphics_card(root):
        found += (rebuild_command(offload_kind(root)),)
    if amx_at_risk(build):
        found += amx_remedies()
    return found


def amx_at_risk(build: BuildInfo) -> bool:
    """True if the build uses AMX and was compiled by GCC, some versions of which get that wrong."""
    return "AMX_INT8" in build.features and _built_by_gcc(Path(build.library))


def _has_graphics_card(root: Path) -> bool:
    """True if llama.cpp could compute on a GPU here: Apple's, NVIDIA's or AMD's with their drivers."""
    if sys.platform == "darwin":
        return platform.machine() == "arm64"
    return any((root / place).exists() for place in ("proc/driver/nvidia", "dev/kfd"))


def read_build() -> BuildInfo:
    """Read the build from the library. Imports it (0.1 s)."""
    from localchat_llamacpp.native import library

    api = library().api
    system = api.llama_print_system_info().decode("utf-8", "replace").strip()
    path = library_file()
    return BuildInfo(
        library=str(path) if path else "",
        version=f"{binding_version()} (llama.cpp {_text(api.llama_version())})",
        features=_features(system),
        offload=bool(api.llama_supports_gpu_offload()),
        devices=devices(),
    )


def devices() -> tuple[Device, ...]:
    """Devices in the library's own registry.

    The binding does not bind these functions; they are reached through the loaded libllama, because the
    libggml in its folder would be a second copy with a registry of its own.
    """
    from localchat_llamacpp.native import library

    native: ctypes.CDLL = library().api._lib
    native.ggml_backend_dev_count.restype = ctypes.c_size_t
    native.ggml_backend_dev_get.restype = ctypes.c_void_p
    native.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    for name in ("name", "description"):
        call = getattr(native, f"ggml_backend_dev_{name}")
        call.restype, call.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    native.ggml_backend_dev_type.restype = ctypes.c_int
    native.ggml_backend_dev_type.argtypes = [ctypes.c_void_p]
    size = ctypes.POINTER(ctypes.c_size_t)
    native.ggml_backend_dev_memory.restype = None
    native.ggml_backend_dev_memory.argtypes = [ctypes.c_void_p, size, size]
    return tuple(
        _device(native, native.ggml_backend_dev_get(number))
        for number in range(native.ggml_backend_dev_count())
    )


def _device(native: ctypes.CDLL, handle: int) -> Device:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    native.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
    kind = int(native.ggml_backend_dev_type(handle))
    return Device(
        name=_text(native.ggml_backend_dev_name(handle)),
        description=_text(native.ggml_backend_dev_description(handle)),
        kind={0: "cpu", 1: "gpu", 2: "igpu", 3: "accel"}.get(kind, str(kind)),
        free_bytes=int(free.value),
        total_bytes=int(total.value),
    )


def _features(system: str) -> frozenset[str]:
    """Names that are on in a line like `CPU : SSE3 = 1 | AVX2 = 1 | `."""
    pairs = (part.rsplit(":", 1)[-1].partition("=") for part in system.split("|"))
    return frozenset(name.strip() for name, _, value in pairs if value.strip() == "1")


def _built_by_gcc(library_path: Path) -> bool:
    """True if the CPU library carries GCC's comment; assumed where it cannot be read."""
    cpu = next(iter(sorted(library_path.parent.glob("libggml-cpu*"))), None)
    return cpu is None or b"GCC: (" in cpu.read_bytes()


def _text(data: bytes | None) -> str:
    return (data or b"").decode("utf-8", "replace")
