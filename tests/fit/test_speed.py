"""Speeds learned from this machine's runs, and the file that keeps them."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from localchat.engine.events import Done, Speculation
from localchat.fit import speed
from localchat.fit.speed import (
    MAX_RUNS,
    Bandwidth,
    SpeedHistory,
    is_bandwidth_disturbed,
    ram_bandwidth,
)
from localchat.models import speed_recorder
from localchat.models.speed_recorder import measured_run, record_speed
from tests.support.cli_program import DONE, INFO
from tests.support.gguf_files import Size, write_model
from tests.support.speed_runs import run

LONG: Done = msgspec.structs.replace(
    DONE,
    usage=msgspec.structs.replace(DONE.usage, completion_tokens=100),
    speculation=Speculation(drafted=0, accepted=0),
)


def measured(
    paces: SpeedHistory, path: Path, threads: int = 2, kv_type: str = "f16"
) -> float | None:
    found = paces.measured(path, backend="llamacpp", threads=threads, gpu_layers=0, kv_type=kv_type)
    return found.tokens_per_s if found is not None else None


def test_the_best_of_the_last_runs_of_a_file_is_its_speed(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf")
    bytes_ = model.stat().st_size
    paces = SpeedHistory(tmp_path / "state")
    assert measured(paces, model) is None
    for rate in (10.0, 12.0, 3.0):
        paces.record(run(model, rate, file_bytes=bytes_))
    assert measured(paces, model) == 12.0
    assert measured(paces, model, threads=4) is None
    assert measured(paces, model, kv_type="q8_0") is None
    assert len(paces.runs()) == 1
    write_model(model, size=Size(layers=3))
    assert measured(paces, model) is None


def test_the_file_stays_small_and_what_cannot_be_read_counts_as_empty(tmp_path: Path) -> None:
    paces = SpeedHistory(tmp_path)
    for number in range(MAX_RUNS + 5):
        paces.record(run(f"{number}.gguf", 1.0))
    for _ in range(30):
        paces.record(run("same.gguf", 2.0))
    assert len(paces.runs()) == MAX_RUNS
    assert paces.runs()[-1].path == "same.gguf"
    assert len(paces.runs()[-1].rates) <= 10
    (tmp_path / "paces.json").write_text("{")
    assert paces.runs() == ()
    paces.record(run("new.gguf", 1.0))
    assert [one.path for one in paces.runs()] == ["new.gguf"]


def test_two_processes_lose_nothing_of_each_other(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from localchat.fit.speed import SpeedHistory\n"
        "from tests.support.speed_runs import run\n"
        "for number in range(15): SpeedHistory(Path(sys.argv[1])).record(run(f'{sys.argv[2]}{number}', 1.0))"
    )
    both = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path), name]) for name in "ab"]
    assert [one.wait() for one in both] == [0, 0]
    found = {one.path for one in SpeedHistory(tmp_path).runs()}
    assert found == {f"{name}{number}" for name in "ab" for number in range(15)}


@pytest.mark.parametrize(
    "done",
    [
        DONE,  # too short, and with drafts
        msgspec.structs.replace(LONG, speculation=DONE.speculation),
        msgspec.structs.replace(LONG, kv_used_tokens=9000),
        msgspec.structs.replace(
            LONG, timings=msgspec.structs.replace(LONG.timings, decode_tokens_per_s=None)
        ),
    ],
)
def test_answers_that_tell_nothing_are_left_out(done: Done, tmp_path: Path) -> None:
    assert measured_run(INFO, done) is None
    record_speed(INFO, done, tmp_path)
    assert SpeedHistory(tmp_path).runs() == ()


def test_answers_that_several_gpus_computed_are_left_out() -> None:
    assert measured_run(INFO, LONG) is not None
    assert measured_run(msgspec.structs.replace(INFO, gpus=2), LONG) is None


def test_what_drafts_gained_is_taken_out_again() -> None:
    drafted = Speculation(drafted=90, accepted=60, speedup=2.0)
    found = measured_run(INFO, msgspec.structs.replace(LONG, speculation=drafted))
    assert found is not None
    assert found.rates == (31.02,)


def test_a_run_beside_other_programs_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed_recorder, "cpu_was_contended", lambda *run: True)
    record_speed(INFO, LONG, tmp_path)
    assert SpeedHistory(tmp_path).runs() == ()
    on_gpu = msgspec.structs.replace(INFO, gpu_layers=INFO.layers)
    record_speed(on_gpu, LONG, tmp_path)
    assert len(SpeedHistory(tmp_path).runs()) == 1


def test_a_speed_names_the_day_and_the_number_of_runs(tmp_path: Path) -> None:
    paces = SpeedHistory(tmp_path)
    for rate in (10.0, 12.0):
        paces.record(run("m.gguf", rate))
    (found,) = paces.runs()
    assert found.basis == f"measured here on {found.at[:10]}, the best of 2 runs"


def test_an_answer_is_remembered_with_how_it_ran(tmp_path: Path) -> None:
    record_speed(INFO, LONG, tmp_path)
    (found,) = SpeedHistory(tmp_path).runs()
    assert found.rates == (62.04,)
    assert (found.path, found.backend, found.threads) == ("tiny.gguf", "llamacpp", INFO.threads)
    record_speed(msgspec.structs.replace(INFO, threads=0), LONG, tmp_path)
    assert SpeedHistory(tmp_path).runs()[-1].threads >= 1


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[Bandwidth]:
    """Measurements of the bandwidth to come, of which each process makes one."""
    coming: list[Bandwidth] = []
    monkeypatch.setattr(speed, "_measured_bandwidth", lambda cpu, threads: coming.pop(0))
    monkeypatch.setattr(speed, "read_cpu_name", lambda: "cpu")
    return coming


def test_a_busy_machine_measures_its_memory_again(probes: list[Bandwidth]) -> None:
    def in_a_new_process() -> float:
        speed._bandwidth.cache_clear()
        return ram_bandwidth(4)

    probes += [
        Bandwidth("cpu", 4, 10e9, quiet=False),
        Bandwidth("cpu", 4, 30e9, quiet=False),
        Bandwidth("cpu", 4, 12e9, quiet=False),
        Bandwidth("cpu", 4, 20e9, quiet=True),
    ]
    assert in_a_new_process() == 25e9  # a usual laptop's
    assert is_bandwidth_disturbed(4)
    assert in_a_new_process() == 30e9
    assert in_a_new_process() == 30e9
    assert in_a_new_process() == 20e9
    assert not is_bandwidth_disturbed(4)
    # A quiet measurement is final.
    assert in_a_new_process() == 20e9
    speed._bandwidth.cache_clear()
