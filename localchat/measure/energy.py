"""Energy use of the processor and the GPUs, if the hardware counts it."""

import importlib
from pathlib import Path
from typing import Any, Final

_RAPL: Final = Path("/sys/class/powercap")


class EnergyMeter:
    """Reads the energy counters of RAPL (processor packages) and NVML (GPUs)."""

    def __init__(self, root: Path = _RAPL) -> None:
        # intel-rapl:0 is a package, intel-rapl:0:1 a part of it. AMD's processors use the same names.
        packages = [path for path in sorted(root.glob("intel-rapl:*")) if path.name.count(":") == 1]
        self._packages = [path for path in packages if _read(path / "energy_uj") is not None]
        self._nvml, self._gpus = _gpus()
        self._start = self._counters()

    @property
    def sources(self) -> tuple[str, ...]:
        """Devices that count their energy; empty if no device does."""
        sources = []
        if self._packages:
            sources.append("processor")
        if self._gpus:
            sources.append("GPUs")
        return tuple(sources)

    def restart(self) -> None:
        """Start counting from zero."""
        self._start = self._counters()

    def joules(self) -> float | None:
        """Return the energy since `restart`; None without counters. A counter may wrap once."""
        if not self.sources:
            return None
        total = 0.0
        for (now, wrap), (before, _) in zip(self._counters(), self._start, strict=True):
            total += now - before
            if now < before:
                total += wrap
        return total

    def _counters(self) -> list[tuple[float, float]]:
        """Return (joules, joules at which the counter wraps) for each device."""
        counters = []
        for package in self._packages:
            joules = (_read(package / "energy_uj") or 0) / 1e6
            wrap = (_read(package / "max_energy_range_uj") or 0) / 1e6
            counters.append((joules, wrap))
        for gpu in self._gpus:
            counters.append((self._nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3, 0.0))
        return counters


def _read(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # only root may read it on many systems
        return None


def _gpus() -> tuple[Any, list[Any]]:
    """Return NVML and the handles of the GPUs that count their energy."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None, []
    handles = []
    try:
        nvml.nvmlInit()
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
            handles.append(handle)
    except nvml.NVMLError:
        return nvml, []
    return nvml, handles
