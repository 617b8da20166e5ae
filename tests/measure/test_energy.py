"""Energy: growth of the counters of processor packages."""

from pathlib import Path

import pytest

from localchat.measure.energy import EnergyMeter


def test_energy_is_the_growth_of_the_packages(tmp_path: Path) -> None:
    def write(zone: str, joules: float) -> None:
        folder = tmp_path / zone
        folder.mkdir(exist_ok=True)
        (folder / "energy_uj").write_text(str(int(joules * 1e6)))
        (folder / "max_energy_range_uj").write_text("1000000000")

    write("intel-rapl:0", 990)
    write("intel-rapl:1", 5)
    write("intel-rapl:0:0", 1)
    meter = EnergyMeter(tmp_path)
    assert "processor" in meter.sources
    meter.restart()
    write("intel-rapl:0", 10)  # began again at 1,000
    write("intel-rapl:1", 12)
    write("intel-rapl:0:0", 100)
    assert meter.joules() == pytest.approx(27)


def test_without_counters_there_is_no_energy(tmp_path: Path) -> None:
    meter = EnergyMeter(tmp_path)
    assert meter.sources or meter.joules() is None
