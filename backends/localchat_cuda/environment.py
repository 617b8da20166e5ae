"""Checks for an NVIDIA GPU, its driver and the libraries, without importing torch."""

import hashlib
import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from localchat.backend_api.interface import Availability
from localchat.fit.hardware import Gpu, read_gpus

LEAST_CAPABILITY = (8, 0)
LIBRARIES = {
    "torch": "torch>=2.11",
    "triton": "triton>=3.6",
    "safetensors": "safetensors>=0.5",
    "tokenizers": "tokenizers>=0.21",
    "pynvml": "nvidia-ml-py>=12",
}
"""Requirements by the module that they install."""
_DRIVERS = {11: 450, 12: 525, 13: 580}
"""First driver branch for each CUDA toolkit, from NVIDIA's compatibility table."""
_GGUF_HINT = "A GGUF of the model runs on llama.cpp, with or without a GPU."


def check_installation() -> Availability:
    """Report the first obstacle, or the GPU that will compute."""
    missing = [required for module, required in LIBRARIES.items() if find_spec(module) is None]
    gpus, note = read_gpus()
    driver = Path("/proc/driver/nvidia/version").exists() or bool(gpus)
    if not gpus and not driver:
        return Availability(False, note or "No NVIDIA GPU with a driver was found.", _GGUF_HINT)
    if missing:
        return Availability(False, f"{_list(missing)} not installed.", _install(missing))
    if not gpus:
        return Availability(
            False, note or "The driver shows no NVIDIA GPU to this process.", _GGUF_HINT
        )
    return check_gpu(gpus[usable_gpus(gpus)[0]], torch_cuda())


def usable_gpus(gpus: Sequence[Gpu]) -> list[int]:
    """Return the indices of the supported GPUs, most free memory first.

    Without a supported GPU, return the best other one, which messages name."""
    order = sorted(range(len(gpus)), key=lambda index: -gpus[index].free_bytes)
    supported = [n for n in order if gpus[n].compute_capability >= LEAST_CAPABILITY]
    return supported or order[:1]


def check_gpu(gpu: Gpu, toolkit: str) -> Availability:
    """Check a GPU against torch's CUDA version (empty: torch was built without CUDA)."""
    if not toolkit:
        return Availability(
            False,
            f"torch {installed_version('torch')} is built without CUDA.",
            # Without the flag, pip accepts the installed version.
            _install(["torch>=2.11"], "--force-reinstall"),
        )
    if gpu.compute_capability < LEAST_CAPABILITY:
        capability = ".".join(map(str, gpu.compute_capability))
        return Availability(
            False,
            f"{gpu.name} has compute capability {capability}; 8.0 (Ampere) or later is required.",
            _GGUF_HINT,
        )
    required_branch = _DRIVERS.get(int(toolkit.partition(".")[0]), 0)
    branch = gpu.driver.partition(".")[0]
    if branch.isdigit() and int(branch) < required_branch:
        return Availability(
            False,
            f"The NVIDIA driver {gpu.driver} is too old for torch's CUDA {toolkit}.",
            f"Install driver {required_branch} or later, or a torch for an older CUDA. {_GGUF_HINT}",
        )
    libraries = [(name, installed_version(name)) for name in ("torch", "triton")]
    return Availability(
        True,
        f"{gpu.name}, driver {gpu.driver}, CUDA {toolkit}.",
        versions=(*libraries, ("cuda", toolkit)),
    )


def build_key() -> str:
    """Return a digest of everything that decides whether kernels run; empty without a GPU."""
    gpus, _ = read_gpus()
    if not gpus:
        return ""
    gpu = gpus[usable_gpus(gpus)[0]]
    libraries = map(installed_version, ("torch", "triton"))
    seen = [gpu.name, gpu.compute_capability, gpu.driver, *libraries]
    folder = Path(__file__).parent / "kernels"
    seen += [(path.name, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*.py"))]
    return f"cuda-{hashlib.sha256(repr(seen).encode()).hexdigest()[:24]}"


def torch_cuda() -> str:
    """Return the CUDA version of the installed torch from its version file; empty: no CUDA."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        text = Path(spec.origin).with_name("version.py").read_text(errors="replace")
    except OSError:
        return ""
    match = re.search(r"^cuda(?:: [^=]*)? = ['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else ""


def installed_version(name: str) -> str:
    """Return the version of a distribution. Empty if it is not installed under this name."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _list(missing: list[str]) -> str:
    names = [re.split("[<>=]", requirement)[0] for requirement in missing]
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _install(missing: list[str], *flags: str) -> str:
    command = " ".join((*flags, *(f"'{requirement}'" for requirement in missing)))
    return f"Install: {sys.executable} -m pip install {command}"
