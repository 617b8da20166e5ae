"""The machine, looked at through made-up /proc and /sys folders."""

from pathlib import Path

import psutil
import pytest

from localchat.fit import hardware
from localchat.fit.hardware import Gpu, read_limits, read_machine, visible

GB = 10**9


@pytest.fixture
def root(tmp_path: Path) -> Path:
    put(
        tmp_path / "proc/cpuinfo",
        "processor : 0\nmodel name : Toy CPU\nflags : avx2 amx_int8\n\nprocessor : 1\n",
    )
    return tmp_path


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def allow(monkeypatch: pytest.MonkeyPatch, *cpus: int) -> None:
    monkeypatch.setattr(hardware, "_allowed", lambda: frozenset(cpus))


def test_this_machine_can_be_read() -> None:
    found = read_machine()
    assert found.cores >= 1
    assert 0 < found.ram_free_bytes <= found.ram_total_bytes <= psutil.virtual_memory().total


def test_the_processor_is_named_with_its_abilities(root: Path) -> None:
    found = read_machine(root)
    assert found.cpu_name == "Toy CPU"
    assert found.cpu_flags == {"avx2", "amx_int8"}


def test_threads_of_one_core_count_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu in range(4):
        put(
            root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list",
            f"{cpu % 2},{cpu % 2 + 2}",
        )
    allow(monkeypatch, 0, 1, 2, 3)
    assert read_machine(root).cores == 2
    allow(monkeypatch, 0, 2)
    assert read_machine(root).cores == 1


def test_efficiency_cores_are_left_out(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, *range(8))
    put(root / "sys/devices/cpu_core/cpus", "0-2,5")
    assert read_machine(root).cores == 4
    allow(monkeypatch, 6, 7)
    assert read_machine(root).cores == 2, "pinned to slow cores: those are what there is"


def test_small_arm_cores_are_left_out(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, *range(4))
    for cpu, capacity in enumerate((300, 300, 1024, 900)):
        put(root / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", str(capacity))
    assert read_machine(root).cores == 2


def test_version_2_control_groups_bound_memory_and_cores(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(monkeypatch, *range(8))
    put(root / "proc/self/cgroup", "0::/app/inner\n")
    outer, inner = root / "sys/fs/cgroup/app", root / "sys/fs/cgroup/app/inner"
    put(outer / "memory.max", "3000000")
    put(outer / "memory.current", "2000000")
    put(outer / "memory.stat", "anon 1\ninactive_file 500000\n")
    put(inner / "memory.max", "max")
    put(inner / "cpu.max", "250000 100000")
    assert read_limits(root) == (3_000_000, 1_500_000, 2.5)
    found = read_machine(root)
    assert (found.cores, found.ram_total_bytes, found.ram_free_bytes) == (2, 3_000_000, 1_500_000)


def test_version_1_control_groups_bound_memory_and_cores(root: Path) -> None:
    put(root / "proc/self/cgroup", "9:memory:/a\n4:cpu,cpuacct:/a\n")
    put(root / "sys/fs/cgroup/memory/a/memory.limit_in_bytes", "4096000")
    put(root / "sys/fs/cgroup/memory/a/memory.usage_in_bytes", "96000")
    put(root / "sys/fs/cgroup/memory/memory.limit_in_bytes", str((1 << 63) - 4096))
    put(root / "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "50000")
    put(root / "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "100000")
    assert read_limits(root) == (4_096_000, 96_000, 0.5)
    assert read_machine(root).cores == 1


def test_without_control_groups_nothing_is_bounded(root: Path) -> None:
    assert read_limits(root) == (0, 0, 0.0)
    put(root / "sys/fs/cgroup/cpu.max", "max 100000")
    assert read_limits(root).cpus == 0.0


@pytest.mark.parametrize(
    ("setting", "cards"),
    [
        (None, (0, 1)),
        ("1", (1,)),
        ("", ()),
        ("-1", ()),
        ("1,0", (1, 0)),
        ("0,7,1", (0,)),
        ("GPU-ab", (1,)),
        ("GPU-abcd,GPU-12", (1, 0)),
        ("GPU-", ()),
        ("GPU-99,0", ()),
        ("0,GPU-ab", (0, 1)),
        ("MIG-ab", (0, 1)),
    ],
)
def test_only_visible_cards_count(setting: str | None, cards: tuple[int, ...]) -> None:
    environment = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    assert visible(["GPU-1234", "GPU-abcd"], environment) == cards


def test_other_processes_share_of_a_card_is_told() -> None:
    assert Gpu(0, "card", 24 * GB, 21 * GB).others_bytes == 3 * GB
