"""Runs that competed for the CPU are recognized by the kernel's pressure, else by the load average."""

from pathlib import Path
from typing import NamedTuple

import pytest

from localchat.fit import contention

WAITING_SHARE = contention._waiting_share
"""The real function, which tests replace."""


@pytest.fixture(autouse=True)
def _real_pressure(_quiet_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention, "_waiting_share", WAITING_SHARE)


def pressure(root: Path, percent: float) -> Path:
    (root / "proc/pressure").mkdir(parents=True, exist_ok=True)
    text = f"some avg10={percent:.2f} avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00 total=0\n"
    (root / "proc/pressure/cpu").write_text(text)
    return root


def test_a_run_whose_threads_waited_is_contended(tmp_path: Path) -> None:
    assert contention.cpu_was_contended(60, 2, 2, pressure(tmp_path, 98))
    assert not contention.cpu_was_contended(60, 2, 2, pressure(tmp_path, 12))


def test_a_short_run_is_judged_by_its_part_of_the_average(tmp_path: Path) -> None:
    root = pressure(tmp_path, 20)
    assert contention.cpu_was_contended(3, 2, 2, root)
    assert not contention.cpu_was_contended(30, 2, 2, root)


@pytest.mark.parametrize(
    ("load", "contended"), [(2.0, False), (4.1, True), (0.3, False), (3.0, True)]
)
def test_without_pressure_the_load_average_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: float, contended: bool
) -> None:
    monkeypatch.setattr(contention, "_load_average", lambda: load)
    assert contention.cpu_was_contended(600, 2, 2, tmp_path) is contended


def test_without_any_source_no_run_is_contended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contention, "_load_average", lambda: None)
    assert not contention.cpu_was_contended(60, 2, 2, tmp_path)


def _readings(monkeypatch: pytest.MonkeyPatch, *times: NamedTuple) -> None:
    """Let psutil report these times, one after the other."""
    readings = iter(times)
    monkeypatch.setattr("psutil.cpu_times", lambda: next(readings))


def test_time_of_other_programs_is_measured_without_ones_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Times(NamedTuple):
        user: float
        idle: float
        iowait: float
        guest: float

    own = [5.0, 9.0]
    monkeypatch.setattr(contention, "_own_cpu_s", lambda: own.pop(0))
    # Disks do not use the CPU, and time of guests is part of the user's.
    _readings(monkeypatch, Times(10.0, 50.0, 0.0, 3.0), Times(20.0, 55.0, 5.0, 8.0))
    assert contention.CpuWatch().others_share() == pytest.approx((10 - 4) / 20)


def test_a_system_without_counters_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise FileNotFoundError("/proc/stat")

    monkeypatch.setattr("psutil.cpu_times", fail)
    assert contention.CpuWatch().others_share() == 0.0


def test_systems_without_waiting_for_disks_report_other_programs_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Times(NamedTuple):
        user: float
        idle: float

    monkeypatch.setattr(contention, "_own_cpu_s", lambda: 0.0)
    _readings(monkeypatch, Times(100.0, 100.0), Times(103.0, 101.0))
    assert contention.CpuWatch().others_share() == pytest.approx(0.75)
