"""Reads the cores, memory and GPUs of this machine. Nothing is cached.

Tests and what-if plans create a `Machine` by hand. This module imports no torch and starts no GPU context:
it reads NVIDIA GPUs through nvidia-ml-py, if that is installed.
"""

import importlib
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU and its free memory."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    compute_capability: tuple[int, int] = (0, 0)
    """(9, 0) for Hopper."""
    driver: str = ""
    bytes_per_s: int = 0
    """Peak read bandwidth of its memory. 0 if unknown."""

    @property
    def others_bytes(self) -> int:
        """Memory that other processes and the driver use."""
        return self.total_bytes - self.free_bytes


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware properties that a plan needs."""

    cpu_name: str
    cpu_flags: frozenset[str]
    cores: int
    """Physical cores that this process may use, without known efficiency cores."""
    ram_total_bytes: int
    ram_free_bytes: int
    """RAM that is available without swapping, within the limits of a container."""
    unified_memory: bool = False
    """Whether the GPU uses the RAM (Apple)."""
    gpus: tuple[Gpu, ...] = ()
    gpu_note: str = ""
    """Sentence on why no GPU was found, if the reason is unusual."""

    @property
    def gpu_free_bytes(self) -> int:
        """Free graphics memory of all GPUs."""
        return sum(gpu.free_bytes for gpu in self.gpus)


def on_battery() -> bool:
    """Return whether this machine runs on its battery."""
    if not hasattr(psutil, "sensors_battery"):
        return False
    battery = psutil.sensors_battery()
    return battery is not None and battery.power_plugged is False


def read_machine(root: Path = Path("/")) -> Machine:
    """Read this machine. root: the folder with /proc and /sys (for tests)."""
    memory = psutil.virtual_memory()
    limits = read_limits(root)
    gpus, note = read_gpus()
    total = int(memory.total)
    free = int(memory.available)
    if limits.memory_bytes:
        total = min(total, limits.memory_bytes)
        free = min(free, max(limits.memory_bytes - limits.memory_used_bytes, 0))
    return Machine(
        cpu_name=read_cpu_name(root),
        cpu_flags=read_cpu_flags(root),
        cores=read_cores(root),
        ram_total_bytes=total,
        ram_free_bytes=free,
        unified_memory=platform.system() == "Darwin" and platform.machine() == "arm64",
        gpus=gpus,
        gpu_note=note,
    )


def read_cpu_name(root: Path = Path("/")) -> str:
    """Return the processor's name. Empty if the system does not report it."""
    name = _cpu_info(root).get("model name")
    return name or _mac("machdep.cpu.brand_string") or platform.processor()


def read_cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """Return the CPU's features as Linux names them. Empty on other systems."""
    info = _cpu_info(root)
    return frozenset((info.get("flags") or info.get("Features") or "").split())


def read_cores(root: Path = Path("/")) -> int:
    """Return the physical cores that this process may use, at least 1: the default number of threads."""
    cores = _physical_cores(root, _allowed())
    limits = read_limits(root)
    if limits.cpus:
        return min(cores, max(int(limits.cpus), 1))
    return cores


def read_cpus() -> int:
    """Return the logical CPUs that this process may use, at least 1: the most threads that can run at once."""
    return len(_allowed()) or os.cpu_count() or 1


class ContainerLimits(NamedTuple):
    """Limits of control groups. 0: no limit."""

    memory_bytes: int = 0
    memory_used_bytes: int = 0
    """Used memory without reclaimable file pages."""
    cpus: float = 0.0


def read_limits(root: Path = Path("/")) -> ContainerLimits:
    """Return the tightest limits of this process's control groups, version 1 or 2."""
    memory = 0
    used = 0
    cpus = 0.0
    for folder in _control_groups(root):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        # Version 1 writes "no limit" as a number near 2^63.
        if 0 < limit < 1 << 60 and (not memory or limit < memory):
            now = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
            memory = limit
            used = max(now - _inactive_file(folder), 0)
        if quota := _cpu_quota(folder):
            cpus = min(cpus, quota) if cpus else quota
    return ContainerLimits(memory, used, cpus)


def _control_groups(root: Path) -> list[Path]:
    """Return the folders of this process's groups and of all groups above them."""
    base = root / "sys/fs/cgroup"
    folders: list[Path] = []
    for line in _text(root / "proc/self/cgroup").splitlines() or ["0::/"]:
        _, _, group = line.partition(":")
        controllers, _, path = group.partition(":")
        # Version 2 names no controllers: its groups lie directly under the base.
        tops = [base]
        if controllers:
            tops = [base / name for name in (controllers, *controllers.split(","))]
        inner = Path(path.lstrip("/"))
        for top in tops:
            folders += [top / part for part in (inner, *inner.parents)]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def _cpu_quota(folder: Path) -> float:
    quota, _, period = _text(folder / "cpu.max").partition(" ")
    if not quota:
        quota = _text(folder / "cpu.cfs_quota_us")
        period = _text(folder / "cpu.cfs_period_us")
    try:
        share = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max": no quota
        return 0.0
    return max(share, 0.0)


def _inactive_file(folder: Path) -> int:
    for line in _text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.isdigit():
            return int(value)
    return 0


def _number(path: Path) -> int:
    text = _text(path)
    if text.isdigit():
        return int(text)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _allowed() -> frozenset[int]:
    """Return the logical CPUs that this process may run on. Empty if unknown."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return frozenset()


def _physical_cores(root: Path, allowed: frozenset[int]) -> int:
    """Count the physical cores among `allowed`, only the fast ones if they differ. At least 1."""
    if fast := _mac("hw.perflevel0.physicalcpu"):
        return max(int(fast), 1)
    performance = _cpu_list(_text(root / "sys/devices/cpu_core/cpus"))
    if not performance:
        performance = _fastest(root, allowed)
    usable = (allowed & performance) or allowed
    topology = root / "sys/devices/system/cpu"
    siblings = {
        _text(topology / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in usable
    }
    return len(siblings) or psutil.cpu_count(logical=False) or os.cpu_count() or 1


def _fastest(root: Path, allowed: frozenset[int]) -> frozenset[int]:
    """Return the CPUs with at least half the greatest capacity (ARM big.LITTLE reports cpu_capacity)."""
    folder = root / "sys/devices/system/cpu"
    capacity = {cpu: _number(folder / f"cpu{cpu}/cpu_capacity") for cpu in allowed}
    max_capacity = max(capacity.values(), default=0)
    return frozenset(
        cpu for cpu, value in capacity.items() if max_capacity and 2 * value >= max_capacity
    )


def _cpu_list(text: str) -> frozenset[int]:
    """Parse `0-3,8` into a set. Empty for other text."""
    cpus: set[int] = set()
    for piece in text.split(","):
        low, _, high = piece.partition("-")
        if low.isdigit() and (high or low).isdigit():
            cpus.update(range(int(low), int(high or low) + 1))
    return frozenset(cpus)


def _cpu_info(root: Path) -> Mapping[str, str]:
    """Return the first processor's entries of /proc/cpuinfo."""
    first = _text(root / "proc/cpuinfo").split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _mac(name: str) -> str:
    if platform.system() != "Darwin":
        return ""
    try:
        answer = subprocess.run(
            ["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, timeout=2, check=True
        )
    except (OSError, subprocess.SubprocessError):  # an older system does not know the name
        return ""
    return answer.stdout.strip()


def read_gpus() -> tuple[tuple[Gpu, ...], str]:
    """Return the NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves, and a sentence if they cannot be read."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        if not Path("/proc/driver/nvidia/version").exists():
            return (), ""
        return (), "An NVIDIA driver is here; `nvidia-ml-py` is missing to read its memory."
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as trouble:
        # Without a driver there is no GPU to report.
        if isinstance(trouble, nvml.NVMLError_LibraryNotFound):
            return (), ""
        return (), f"The NVIDIA driver does not answer: {trouble}."
    try:
        driver = _decoded(nvml.nvmlSystemGetDriverVersion())
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return tuple(
            _gpu(nvml, handles[i], i, driver)
            for i in visible([_uuid(nvml, handle) for handle in handles], os.environ)
        ), ""
    except nvml.NVMLError as trouble:
        return (), f"The NVIDIA driver does not report its memory: {trouble}."
    finally:
        nvml.nvmlShutdown()


def visible(uuids: Sequence[str], environment: Mapping[str, str]) -> tuple[int, ...]:
    """Return the indices of the GPUs that CUDA would show, given their names (`GPU-…`).

    CUDA's rule: numbers or beginnings of names, and the list ends at the first entry without a match. Parts of
    GPUs (`MIG-…`) are not supported: they select all GPUs.
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None or "MIG-" in listed:
        return tuple(range(len(uuids)))
    indices: list[int] = []
    for name in map(str.strip, listed.split(",")):
        if name.isdigit():
            matching = [int(name)] if int(name) < len(uuids) else []
        else:
            matching = [i for i, uuid in enumerate(uuids) if name and uuid.startswith(name)]
        if len(matching) != 1:
            break
        indices += matching
    return tuple(dict.fromkeys(indices))


def _gpu(nvml: Any, handle: Any, index: int, driver: str) -> Gpu:  # noqa: ANN401  pynvml has no types
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        index=index,
        name=_decoded(nvml.nvmlDeviceGetName(handle)),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        compute_capability=(int(major), int(minor)),
        driver=driver,
        bytes_per_s=_bandwidth(nvml, handle),
    )


def _uuid(nvml: Any, handle: Any) -> str:  # noqa: ANN401
    """Return the name of a GPU. Empty if the driver does not report it."""
    try:
        return _decoded(nvml.nvmlDeviceGetUUID(handle))
    except nvml.NVMLError:
        return ""


def _bandwidth(nvml: Any, handle: Any) -> int:  # noqa: ANN401
    """Return two transfers per clock times the bus width. 0 if the driver does not report both."""
    try:
        clock_mhz = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM)
        width_bits = nvml.nvmlDeviceGetMemoryBusWidth(handle)
    except (nvml.NVMLError, AttributeError):
        return 0
    return int(clock_mhz) * 1_000_000 * 2 * int(width_bits) // 8


def _decoded(text: str | bytes) -> str:
    if isinstance(text, bytes):
        return text.decode(errors="replace")
    return text
