"""Energy that the processor and the GPUs of this machine have used, where the hardware counts it."""

import importlib
from pathlib import Path
from typing import Any, Final

_RAPL: Final = Path("/sys/class/powercap")


class EnergyMeter:
    """Reads the counters of RAPL (processor packages) and NVML (GPUs). root: the folder of RAPL, for tests."""

    def __init__(self, root: Path = _RAPL) -> None:
        # intel-rapl:0 is a package; intel-rapl:0:1 is a part of it. AMD's processors use the same names.
        self._zones = [
            zone for zone in sorted(root.glob("intel-rapl:*")) if zone.name.count(":") == 1
        ]
        self._zones = [zone for zone in self._zones if _number(zone / "energy_uj") is not None]
        self._nvml, self._gpus = _gpus()
        self._before = self._counters()

    @property
    def sources(self) -> tuple[str, ...]:
        """What is counted; empty: nothing is."""
        return (*(["processor"] if self._zones else []), *(["GPUs"] if self._gpus else []))

    def restart(self) -> None:
        """Count from now on."""
        self._before = self._counters()

    def joules(self) -> float | None:
        """Energy since the last `restart`; None where nothing is counted. A counter may wrap around once."""
        if not self.sources:
            return None
        total = 0.0
        for (now, most), (before, _) in zip(self._counters(), self._before, strict=True):
            total += now - before if now >= before else now - before + most
        return total

    def _counters(self) -> list[tuple[float, float]]:
        """Joules of each counter, and at how many it begins again."""
        found = [
            (
                (_number(zone / "energy_uj") or 0) / 1e6,
                (_number(zone / "max_energy_range_uj") or 0) / 1e6,
            )
            for zone in self._zones
        ]
        for gpu in self._gpus:
            found.append((self._nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3, 0.0))
        return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # readable by root alone on many systems
        return None


def _gpus() -> tuple[Any, list[Any]]:
    """NVML and the handles of the GPUs that count their energy."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None, []
    found = []
    try:
        nvml.nvmlInit()
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
            found.append(handle)
    except nvml.NVMLError:
        return nvml, []
    return nvml, found
